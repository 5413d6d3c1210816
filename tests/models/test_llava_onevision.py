"""LLaVA-OneVision: one picture tiled, several not, a clip pooled: parity with the stock model, sizes by header."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

from triptych.core.errors import InvalidRequest
from triptych.core.media import DecodedImage, DecodedVideo, MediaHeader, Modality
from triptych.models.registry import load_layout

from .folders import spread_weights, write_folder
from .parity import Case, assert_parity, drawing, header_of
from .test_image_families import TEXT, TOWER
from .tokens import byte_tokenizer

SIDE = 28
PINPOINTS = [[h * SIDE, w * SIDE] for h in (1, 2, 3) for w in (1, 2, 3)]
PREPROCESSOR = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "size": {"height": SIDE, "width": SIDE},
    "image_grid_pinpoints": PINPOINTS,
}


def tiny_onevision():
    words = byte_tokenizer(("<image>", "<video>"), {"image": "<image>", "video": "<video>"})
    text = TEXT | dict(vocab_size=len(words), eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id)
    config = LlavaOnevisionConfig(
        text_config=text | dict(model_type="qwen2"),
        vision_config=TOWER | dict(model_type="siglip_vision_model", image_size=SIDE, patch_size=7),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        video_token_index=words.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_4",
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return spread_weights(LlavaOnevisionForConditionalGeneration(config)), words


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model, words = tiny_onevision()
    folder = write_folder(tmp_path_factory.mktemp("onevision"), model, words, preprocessor=PREPROCESSOR)
    return folder, model, words


@pytest.fixture(scope="module")
def layout(served):
    return load_layout(served[0])


def chat(words, *parts):
    content = [{"type": p} if p in ("image", "video") else {"type": "text", "text": p} for p in parts]
    messages = [{"role": "user", "content": content}]
    return words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def stock_inputs(prompt):
    pictures = [item for item in prompt.items if item.modality is Modality.IMAGE]
    clips = [item for item in prompt.items if item.modality is Modality.VIDEO]
    inputs = {}
    if pictures:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([i.features["pixel_values"] for i in pictures]))
        inputs["image_sizes"] = torch.from_numpy(np.concatenate([i.features["image_size"] for i in pictures]))
        inputs["batch_num_images"] = torch.tensor([len(pictures)])
    if clips:
        inputs["pixel_values_videos"] = torch.from_numpy(np.stack([i.features["pixel_values"] for i in clips]))
    return inputs


def test_greedy_equals_generate_for_one_picture(served):
    """The only picture of a prompt is tiled; wide, tall, and larger than the limit of tiles."""
    folder, model, words = served
    cases = [
        Case(chat(words, "image", "how many"), [(Modality.IMAGE, drawing(w, h, w), None)])
        for w, h in ((90, 40), (30, 80), (84, 84))
    ]

    tokens = assert_parity(folder, model, cases, stock_inputs)

    assert len({token for answer in tokens for token in answer}) > 1


def test_greedy_equals_generate_for_several_pictures(served):
    """Several pictures of one prompt are one tile each."""
    folder, model, words = served
    options = {"anyres": False}
    media = [(Modality.IMAGE, drawing(w, h, w), None) for w, h in ((90, 40), (30, 80))]
    case = Case(chat(words, "image", "how many", "image"), media, options)

    assert_parity(folder, model, [case, Case(chat(words, "the"), [])], stock_inputs)


def test_greedy_equals_generate_for_a_clip(served):
    """Frames are pooled, with one line end after the last."""
    folder, model, words = served
    frames = np.stack([drawing(40, 30, seed).pixels for seed in range(3)])
    clip = DecodedVideo(frames, np.arange(3.0), 1.0)

    assert_parity(folder, model, [Case(chat(words, "video", "how"), [(Modality.VIDEO, clip, None)])], stock_inputs)


@settings(max_examples=25, deadline=None)
@given(width_px=st.integers(1, 300), height_px=st.integers(1, 300), tiled=st.booleans())
def test_size_from_header_is_what_the_model_gives(served, layout, width_px, height_px, tiled):
    """The header's width and height give the number of embeddings that the stock model packs."""
    model = served[1]
    decoded = DecodedImage(np.zeros((height_px, width_px, 3), np.uint8))
    size = layout.size(header_of(decoded), {"anyres": tiled})
    done = layout.process(decoded, {"anyres": tiled})
    tiles = len(done.features["pixel_values"])
    rows = torch.zeros(tiles, layout.embeds_a_tile, 32)
    packed, _ = model.model.pack_image_features(
        [rows], [[height_px, width_px]], image_newline=torch.zeros(32), vision_aspect_ratio="anyres_max_4"
    )

    assert size == done.size
    assert size.num_embeds == len(packed[0])
    assert size.num_tokens_encoder == tiles * layout.embeds_a_tile


def test_only_picture_of_a_request_is_tiled(layout):
    """What else a request holds decides the tiling; a clip beside it does not count."""
    image, video = Modality.IMAGE, Modality.VIDEO

    assert layout.request_options([image]) == layout.request_options([image, video]) == {"anyres": True}
    assert layout.request_options([image, image]) == {"anyres": False}


def test_clip_size_follows_the_options(layout):
    """`num_frames` frames, one line end."""
    header = MediaHeader(Modality.VIDEO, "video/mp4", 1, 40, 30, 100, 25.0, 4.0)

    assert layout.size(header, {"num_frames": 5}).num_embeds == 5 * 4 + 1
    assert len(layout.decode_spec(header, {"num_frames": 5}).times_s) == 5
    with pytest.raises(InvalidRequest, match="fps"):
        layout.size(header, {"fps": -1})

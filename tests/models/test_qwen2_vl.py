"""Qwen2-VL and Qwen2.5-VL: parity with the stock models, positions, sizes from the header alone."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.errors import InvalidMedia, InvalidRequest, PromptRefused, UnsupportedMedia
from triptych.core.media import DecodedImage, DecodedVideo, MediaHeader, Modality
from triptych.models.registry import load_layout

from .folders import TINY_TEXT, spread_weights, write_folder
from .parity import Case, assert_parity, drawing, header_of, prepare
from .tokens import byte_tokenizer

MEDIA = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 28 * 28,
    "max_pixels": 28 * 28 * 24,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
VIDEO = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 24}}  # the stock frames are too large for a test


def tokenizer():
    return byte_tokenizer(SPECIAL, MEDIA)


def tiny(architecture):
    words = tokenizer()
    token = words.convert_tokens_to_ids
    kind = getattr(transformers, architecture)
    vision = dict(depth=3, num_heads=2, patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
    if architecture.startswith("Qwen2_5"):
        vision |= dict(
            hidden_size=32,
            intermediate_size=48,
            out_hidden_size=32,
            window_size=56,
            fullatt_block_indexes=[1],
            tokens_per_second=2,
        )
    else:
        vision |= dict(embed_dim=32, hidden_size=32, mlp_ratio=2)
    config = kind.config_class(
        text_config=TINY_TEXT
        | dict(
            vocab_size=len(words),
            rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
            bos_token_id=None,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        ),
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    return spread_weights(kind(config)), words


@pytest.fixture(scope="module", params=["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"])
def served(request, tmp_path_factory):
    model, words = tiny(request.param)
    folder = write_folder(tmp_path_factory.mktemp("qwen"), model, words, preprocessor=PREPROCESSOR, video=VIDEO)
    return folder, model, words


def picture(width_px, height_px, seed):
    return (Modality.IMAGE, drawing(width_px, height_px, seed), None)


def clip(num_frames, width_px, height_px):
    frames = np.stack([drawing(width_px, height_px, seed).pixels for seed in range(num_frames)])
    return DecodedVideo(frames, np.arange(num_frames) / 2, 2.0)


def chat(words, *turns):
    messages = [
        {"role": role, "content": [{"type": p} if p in MEDIA else {"type": "text", "text": p} for p in parts]}
        for role, *parts in turns
    ]
    return words.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def stock_inputs(words):
    def build(prompt):
        ids = torch.tensor([prompt.expanded.token_ids])
        image, video = (words.convert_tokens_to_ids(name) for name in ("<|image_pad|>", "<|video_pad|>"))
        inputs = {"mm_token_type_ids": (ids == image).int() + 2 * (ids == video).int()}
        for kind, pixels, grid in (
            (Modality.IMAGE, "pixel_values", "image_grid_thw"),
            (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
        ):
            chosen = [item for item in prompt.items if item.modality is kind]
            if chosen:
                inputs[pixels] = torch.from_numpy(np.concatenate([i.features["pixel_values"] for i in chosen]))
                inputs[grid] = torch.from_numpy(np.concatenate([i.features["grid_thw"] for i in chosen]))
        return inputs

    return build


def test_greedy_equals_generate(served):
    """Several pictures of different sizes, several turns, text alone beside them: token for token."""
    folder, model, words = served
    first = chat(words, ("user", "image", "how many red", "image"), ("assistant", "the"), ("user", "image", "is the"))
    second = chat(words, ("user", "how many"))
    cases = [
        Case(first, [picture(90, 60, 1), picture(40, 200, 2), picture(33, 33, 3)]),
        Case(second, []),
        Case(chat(words, ("user", "image")), [picture(120, 50, 4)]),
    ]

    tokens = assert_parity(folder, model, cases, stock_inputs(words), num_axes=3)

    assert len({token for answer in tokens for token in answer}) > 3


def test_greedy_equals_generate_with_video(served):
    """A clip between two pictures, an odd number of frames."""
    folder, model, words = served
    ids = chat(words, ("user", "image", "how many", "video", "red", "image"))
    case = Case(ids, [picture(60, 60, 1), (Modality.VIDEO, clip(5, 56, 84), None), picture(90, 30, 2)])

    def inputs(prompt):
        extra = {"second_per_grid_ts": torch.tensor([1.0])} if "Qwen2_5" in type(model).__name__ else {}
        return stock_inputs(words)(prompt) | extra

    assert_parity(folder, model, [case], inputs, num_axes=3)


def test_positions_equal_stock_rope_index(served):
    """Positions and offset are those of `get_rope_index`, for pictures and clips mixed."""
    folder, model, words = served
    layout = load_layout(folder)
    ids = chat(words, ("user", "image", "how", "video"), ("assistant", "red"), ("user", "video", "image"))
    media = [picture(60, 90, 1), (Modality.VIDEO, clip(8, 56, 56), None)]
    media += [(Modality.VIDEO, clip(3, 84, 56), None), picture(200, 40, 2)]
    prompt = prepare(layout, Case(ids, media))
    inputs = stock_inputs(words)(prompt)
    extra = {"second_per_grid_ts": torch.tensor([1.0, 1.0])} if "Qwen2_5" in type(model).__name__ else {}
    expected, deltas = model.model.get_rope_index(
        torch.tensor([prompt.expanded.token_ids]),
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        video_grid_thw=inputs["video_grid_thw"],
        **extra,
    )

    assert np.array_equal(expected[:, 0].numpy(), prompt.expanded.positions)
    assert int(deltas) == prompt.expanded.position_offset


@settings(max_examples=25, deadline=None)
@given(width_px=st.integers(1, 500), height_px=st.integers(1, 500), detail=st.sampled_from(["auto", "low"]))
def test_size_from_header_is_what_is_processed(qwen_layout, width_px, height_px, detail):
    """The header's width and height give the exact number of embeddings and patches."""
    decoded = DecodedImage(np.zeros((height_px, width_px, 3), np.uint8))
    options = {"detail": detail}
    try:
        size = qwen_layout.size(header_of(decoded), options)
    except InvalidMedia:
        assert max(width_px, height_px) / min(width_px, height_px) > 200
        return
    done = qwen_layout.process(decoded, options)

    assert size == done.size
    assert size.num_tokens_encoder == len(done.features["pixel_values"])
    assert tuple(done.features["grid_thw"][0]) == size.grid


@settings(max_examples=15, deadline=None)
@given(
    num_frames=st.integers(1, 60),
    rate=st.sampled_from([1.0, 12.5, 24.0, 29.97]),
    width_px=st.integers(28, 90),
    height_px=st.integers(28, 90),
)
def test_video_size_from_header_is_what_is_processed(qwen_layout, num_frames, rate, width_px, height_px):
    """The plan made from the header decodes to the size it promised."""
    header = MediaHeader(Modality.VIDEO, "video/mp4", 1, width_px, height_px, num_frames, rate, num_frames / rate)
    spec = qwen_layout.decode_spec(header, {})
    size = qwen_layout.size(header, {})
    assert spec.times_s is not None
    frames = np.zeros((len(spec.times_s), height_px, width_px, 3), np.uint8)
    done = qwen_layout.process(DecodedVideo(frames, np.array(spec.times_s), rate), {})

    assert (size.num_embeds, size.grid) == (done.size.num_embeds, done.size.grid)
    assert size.num_tokens_encoder == len(done.features["pixel_values"])


@pytest.fixture(scope="module")
def qwen_layout(tmp_path_factory):
    model, words = tiny("Qwen2_5_VLForConditionalGeneration")
    small = PREPROCESSOR | {"max_pixels": 28 * 28 * 40}
    return load_layout(write_folder(tmp_path_factory.mktemp("sizes"), model, words, preprocessor=small, video=VIDEO))


def test_unknown_option_is_named(qwen_layout):
    """A typo in a media option is an error that lists what there is."""
    with pytest.raises(InvalidRequest, match=r"max_pixel'.*max_pixels"):
        qwen_layout.size(header_of(drawing(50, 50)), {"max_pixel": 1})


def test_audio_is_refused(qwen_layout):
    """A kind that the model does not take is refused at the header."""
    with pytest.raises(UnsupportedMedia, match="audio"):
        qwen_layout.size(MediaHeader(Modality.AUDIO, "audio/wav", 1), {})


def test_placeholders_must_match_media(qwen_layout):
    """A prompt with one place and a request with two pictures do not go together."""
    size = qwen_layout.size(header_of(drawing(50, 50)), {})
    ids = chat(qwen_layout.tokenizer, ("user", "image"))

    with pytest.raises(PromptRefused, match="image, image"):
        qwen_layout.expand(ids, [(Modality.IMAGE, size)] * 2)


def test_processor_key_follows_parameters(tmp_path):
    """Another processor parameter, another key."""
    model, words = tiny("Qwen2VLForConditionalGeneration")
    folder = write_folder(tmp_path, model, words, preprocessor=PREPROCESSOR)

    keys = {load_layout(folder, changes).processor_key for changes in ({}, {"max_pixels": 9000}, {"fps": 1.0})}

    assert len(keys) == 3

"""Qwen3-VL: deepstack levels, interleaved rotary axes, clips under time stamps."""

import numpy as np
import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from triptych.core.media import DecodedVideo, MediaHeader, Modality
from triptych.models.registry import load_layout, load_served_model

from .folders import TINY_TEXT, spread_weights, write_folder
from .parity import Case, assert_parity, drawing, prepare
from .test_qwen2_vl import chat, clip, picture, stock_inputs, tokenizer

PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 16 * 16,
    "max_pixels": 16 * 16 * 40,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def tiny_qwen3():
    words = tokenizer()
    token = words.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config=TINY_TEXT
        | dict(
            vocab_size=len(words),
            num_hidden_layers=4,
            head_dim=8,
            rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
            bos_token_id=None,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        ),
        vision_config=dict(
            depth=4,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            out_hidden_size=32,
            patch_size=8,
            spatial_merge_size=2,
            temporal_patch_size=2,
            num_position_embeddings=36,
            deepstack_visual_indexes=[0, 2],
        ),
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    return spread_weights(Qwen3VLForConditionalGeneration(config)), words


VIDEO = {"size": {"shortest_edge": 16 * 16, "longest_edge": 16 * 16 * 40}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model, words = tiny_qwen3()
    folder = write_folder(tmp_path_factory.mktemp("qwen3"), model, words, preprocessor=PREPROCESSOR, video=VIDEO)
    return folder, model, words


def test_greedy_equals_generate(served):
    """Several pictures, several turns, text alone beside them: token for token, through the deepstack levels."""
    folder, model, words = served
    first = chat(words, ("user", "image", "how many red", "image"), ("assistant", "the"), ("user", "image", "is the"))
    cases = [
        Case(first, [picture(90, 60, 1), picture(40, 200, 2), picture(33, 33, 3)]),
        Case(chat(words, ("user", "how many")), []),
        Case(chat(words, ("user", "image")), [picture(120, 50, 4)]),
    ]

    tokens = assert_parity(folder, model, cases, stock_inputs(words), num_axes=3)

    assert len({token for answer in tokens for token in answer}) > 1


def test_greedy_equals_generate_with_video(served):
    """A clip between two pictures: stamps, frame runs and positions as the stock model reads them."""
    folder, model, words = served
    ids = chat(words, ("user", "image", "how many", "video", "red", "image"))
    case = Case(ids, [picture(60, 60, 1), (Modality.VIDEO, clip(5, 48, 32), None), picture(90, 30, 2)])

    assert_parity(folder, model, [case], stock_inputs(words), num_axes=3)


def test_positions_equal_stock_rope_index(served):
    """Positions and offset are those of `get_rope_index`, which splits a clip at its stamps."""
    folder, model, words = served
    layout = load_layout(folder)
    ids = chat(words, ("user", "image", "how", "video"), ("user", "video", "image"))
    media = [picture(60, 90, 1), (Modality.VIDEO, clip(8, 32, 32), None)]
    media += [(Modality.VIDEO, clip(3, 48, 32), None), picture(200, 40, 2)]
    prompt = prepare(layout, Case(ids, media))
    inputs = stock_inputs(words)(prompt)
    expected, deltas = model.model.get_rope_index(
        torch.tensor([prompt.expanded.token_ids]),
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        video_grid_thw=inputs["video_grid_thw"],
    )

    assert np.array_equal(expected[:, 0].numpy(), prompt.expanded.positions)
    assert int(deltas) == prompt.expanded.position_offset


def test_clip_is_laid_out_under_time_stamps(served):
    """Each temporal step has its stamp, in seconds of the video, before its frames."""
    folder, _, words = served
    layout = load_layout(folder)
    header = MediaHeader(Modality.VIDEO, "video/mp4", 1, 32, 32, 20, 10.0, 2.0)
    size = layout.size(header, {})
    text = words.decode(layout.run(Modality.VIDEO, size).token_ids)
    spec = layout.decode_spec(header, {})
    frames = np.zeros((len(spec.times_s), 32, 32, 3), np.uint8)
    done = layout.process(DecodedVideo(frames, np.array(spec.times_s), 10.0), {})

    assert text.startswith("<0.2 seconds><|vision_start|><|video_pad|>")
    assert text.count("seconds>") == size.grid[0] == 2
    assert (size.num_embeds, size.grid, size.times_s) == (done.size.num_embeds, done.size.grid, done.size.times_s)


def test_embeddings_hold_the_deepstack_levels(served):
    """One row is the hidden size and two levels wide."""
    folder, _, words = served
    layout, model = load_layout(folder), load_served_model(folder, "float32", "cpu")
    prompt = prepare(layout, Case(chat(words, ("user", "image")), [(Modality.IMAGE, drawing(64, 64), None)]))
    with torch.inference_mode():
        (rows,) = model.encode(prompt.items)

    assert (prompt.items[0].num_embeds, 3 * 32) == tuple(rows.shape)
    assert model.info.embed_width == 96

"""Qwen2-Audio: parity with the stock model, sizes from the header alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.errors import BudgetExceeded, InvalidMedia, UnsupportedMedia
from triptych.core.media import DecodedAudio, MediaHeader, Modality
from triptych.models.registry import load_layout

from .folders import write_folder
from .parity import Case, assert_parity
from .tiny_audio import EXTRACTOR, RATE, SECONDS, tiny_audio


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model, words = tiny_audio()
    folder = write_folder(tmp_path_factory.mktemp("audio"), model, words, preprocessor=EXTRACTOR)
    return folder, model, words


def sound(num_samples, seed=0):
    rng = np.random.default_rng(seed)
    tone = np.sin(np.arange(num_samples) * rng.uniform(0.01, 0.3))
    return DecodedAudio((0.5 * tone + 0.05 * rng.standard_normal(num_samples)).astype(np.float32), RATE)


def chat(words, *parts):
    content = [{"type": p} if p == "audio" else {"type": "text", "text": p} for p in parts]
    return words.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )


def stock_inputs(prompt):
    if not prompt.items:
        return {}
    mel = np.concatenate([item.features["input_features"] for item in prompt.items])
    frames = np.array([int(item.features["num_frames"][0]) for item in prompt.items])
    mask = np.arange(mel.shape[-1])[None] < frames[:, None]
    return {"input_features": torch.from_numpy(mel), "feature_attention_mask": torch.from_numpy(mask).long()}


def test_greedy_equals_generate(served):
    """Two sounds of different length in one prompt, text alone beside them: token for token."""
    folder, model, words = served
    cases = [
        Case(chat(words, "audio", "how many", "audio"), [(Modality.AUDIO, sound(n), None) for n in (9_000, 32_000)]),
        Case(chat(words, "how many"), []),
        Case(chat(words, "audio"), [(Modality.AUDIO, sound(20_001, 3), None)]),
    ]

    tokens = assert_parity(folder, model, cases, stock_inputs)

    assert len({token for answer in tokens for token in answer}) > 1


@pytest.fixture(scope="module")
def layout(served):
    return load_layout(served[0])


@settings(max_examples=40, deadline=None)
@given(num_samples=st.integers(1, SECONDS * RATE))
def test_size_from_header_is_what_is_processed(layout, num_samples):
    """The header's duration gives the number of embeddings that the extractor's mask gives."""
    header = MediaHeader(Modality.AUDIO, "audio/wav", 1, duration_s=num_samples / RATE, sample_rate_hz=RATE)
    try:
        size = layout.size(header, {})
    except InvalidMedia:
        assert num_samples <= 3 * 160
        return
    done = layout.process(sound(num_samples), {})

    assert size == done.size
    assert int(done.features["num_frames"][0]) == size.grid[0]


def test_longer_than_the_window_is_refused(layout):
    """What the tower cannot hear is an error with the limit and the value, not a silent cut."""
    header = MediaHeader(Modality.AUDIO, "audio/wav", 1, duration_s=SECONDS + 1)

    with pytest.raises(BudgetExceeded, match=r"max_audio_duration_s is 2, the request has 3"):
        layout.size(header, {})


def test_picture_is_refused(layout):
    """A model of sound takes no pictures."""
    with pytest.raises(UnsupportedMedia, match="image"):
        layout.size(MediaHeader(Modality.IMAGE, "image/png", 1, 4, 4), {})

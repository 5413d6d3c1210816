"""tiny-image's training pairs: the noise says where things go, and is noise all the same."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.testing.judge import look, verdict
from triptych.testing.prompts import invent_prompt

TOOLS = Path(__file__).parents[2] / "tools/train"


@pytest.fixture(scope="module")
def places():
    sys.path.insert(0, str(TOOLS))
    try:
        import tiny_image_places

        yield tiny_image_places
    finally:
        sys.path.remove(str(TOOLS))


def test_noise_has_the_fields_it_was_drawn_with_and_is_normal(places):
    torch.manual_seed(0)
    fields = torch.randn(64, places.NUM_FIELDS, 6, 9)

    noise = places.noise_with(fields, channels=8)

    assert torch.allclose(places.fields_of(noise), fields, atol=1e-5)
    flat = noise.transpose(0, 1).flatten(1)  # [C, B * h * w]
    spread = 5 / flat.shape[1] ** 0.5
    assert torch.allclose(torch.cov(flat), torch.eye(8), atol=2 * spread)
    assert flat.mean(1).abs().max() < spread


@pytest.mark.parametrize("size_px", [(96, 96), (128, 96), (64, 128)])
def test_every_layout_shows_its_prompt(places, size_px):
    rng, right = random.Random(3), 0
    for seed in range(25):
        prompt = invent_prompt(rng)
        shape = (places.NUM_FIELDS, size_px[1] // places.TOKEN_PX, size_px[0] // places.TOKEN_PX)
        scene = places.lay_out_by(np.random.default_rng(seed).standard_normal(shape), prompt)
        found = verdict(prompt, look(scene.image))
        assert (found.counts, found.relation, found.background) == (True, True, True), str(prompt)
        right += found.is_right
    assert right >= 24


def test_another_noise_is_another_layout_and_the_same_one_the_same(places):
    prompt = invent_prompt(random.Random(5))
    one, other = (np.random.default_rng(seed).standard_normal((places.NUM_FIELDS, 12, 12)) for seed in (1, 2))

    first, again, second = (places.lay_out_by(fields, prompt).objects for fields in (one, one, other))

    assert first == again
    assert first != second

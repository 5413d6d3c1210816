"""tiny-image's training pairs: the noise says where things go, and is noise all the same."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.testing.judge import look, verdict
from triptych.testing.prompts import Group, Prompt, invent_prompt

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


@pytest.mark.parametrize("size_px", [(64, 64), (96, 96), (128, 96), (64, 128)])
def test_every_layout_shows_its_prompt(places, size_px):
    rng, right = random.Random(3), 0
    for seed in range(40):
        prompt = invent_prompt(rng)
        scene = places.lay_out_by(places.draw_fields(seed, size_px), prompt)
        found = verdict(prompt, look(scene.image))
        assert (found.counts, found.relation, found.background) == (True, True, True), str(prompt)
        right += found.is_right
    assert right >= 39  # at 64 pixels the judge may take a star of eight for a blob


def test_a_group_takes_the_cells_where_its_field_is_highest(places):
    """One blue circle and two red squares on 64 px: cells of 32 px, by the mean of their sixteen tokens."""
    prompt = Prompt((Group(1, "blue", "circle"), Group(2, "red", "square")))
    fields = np.zeros((places.NUM_FIELDS, 8, 8))
    fields[0, 4:, 4:] = 1.0  # the circle, below right
    fields[1, 4:, 4:] = 3.0  # taken
    fields[1, :4, 4:] = 2.0
    fields[1, 4:, :4] = 1.0

    objects = places.lay_out_by(fields, prompt).objects

    assert [(thing.colour, thing.x_px, thing.y_px) for thing in objects] == [
        ("blue", 48, 48),
        ("red", 48, 16),
        ("red", 16, 48),
    ]


def test_a_thing_moves_where_its_field_rises_and_stays_in_its_cell(places):
    prompt = Prompt((Group(1, "blue", "circle"),))
    fields = np.zeros((places.NUM_FIELDS, 8, 8))
    fields[0] += np.arange(8)

    (thing,) = places.lay_out_by(fields, prompt).objects

    assert thing.y_px == 32
    assert 32 < thing.x_px <= 64 - thing.radius_px


def test_another_noise_is_another_layout_and_the_same_one_the_same(places):
    prompt = invent_prompt(random.Random(5))
    one, other = (places.draw_fields(seed, (96, 96)) for seed in (1, 2))

    first, again, second = (places.lay_out_by(fields, prompt).objects for fields in (one, one, other))

    assert first == again
    assert first != second

"""The prompts' world and its judge: what was laid out for a prompt is seen as that prompt, and as no other."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image

from triptych.testing.judge import connected_pieces, is_shown, look, verdict
from triptych.testing.prompts import Group, Prompt, invent_prompt, lay_out, say
from triptych.testing.scene_paint import SHAPES

TWO_ABOVE_ONE = Prompt((Group(2, "green", "circle"), Group(1, "red", "square")), "white", "above")


@pytest.mark.parametrize("size_px", [(64, 64), (96, 64), (128, 128), (64, 160)])
def test_judge_sees_what_was_painted(size_px: tuple[int, int]):
    """At least 97 of 100 painted scenes are judged to show their prompt; a pixel or two may deform a small one."""
    rng, right, num = random.Random(11), 0, 0
    while num < 100:
        prompt = invent_prompt(rng)
        try:
            scene = lay_out(rng, prompt, size_px)
        except ValueError:
            continue
        num += 1
        right += is_shown(prompt, scene.image)

    assert right >= 97


@pytest.mark.parametrize("shape", SHAPES)
def test_judge_names_each_shape(shape: str):
    """One of each, by its outline alone."""
    scene = lay_out(random.Random(1), Prompt((Group(1, "blue", shape),)), (96, 96))

    (thing,) = look(scene.image).things

    assert (thing.shape, thing.colour) == (shape, "blue")
    assert thing.x_px == pytest.approx(scene.objects[0].x_px, abs=5)


@pytest.mark.parametrize(
    ("other", "aspect"),
    [
        (Prompt((Group(3, "green", "circle"), Group(1, "red", "square")), "white", "above"), "counts"),
        (Prompt((Group(2, "blue", "circle"), Group(1, "red", "square")), "white", "above"), "colours"),
        (Prompt((Group(2, "green", "heart"), Group(1, "red", "square")), "white", "above"), "shapes"),
        (Prompt((Group(2, "green", "circle"), Group(1, "red", "square")), "pink", "above"), "background"),
        (Prompt((Group(2, "green", "circle"), Group(1, "red", "square")), "white", "below"), "relation"),
    ],
)
def test_judge_names_what_is_wrong(other: Prompt, aspect: str):
    """A picture of one prompt is refused for another, in the respect in which they differ."""
    sight = look(lay_out(random.Random(2), TWO_ABOVE_ONE, (96, 96)).image)

    assert verdict(TWO_ABOVE_ONE, sight).is_right
    assert not verdict(other, sight).is_right
    assert not getattr(verdict(other, sight), aspect)


def test_noise_shows_nothing_right():
    """What an untrained model draws is not taken for a picture."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)

    assert not is_shown(TWO_ABOVE_ONE, Image.fromarray(pixels))


def test_pieces_join_over_sides_only():
    """A diagonal touch does not join; a bend does."""
    mask = np.array([[1, 1, 0, 1], [0, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]], bool)

    labels, num = connected_pieces(mask)

    assert num == 3
    assert labels[0, 0] == labels[1, 1] != labels[2, 0] == labels[2, 3]


def test_prompt_is_worded_plainly_and_in_many_ways():
    """The plain wording is fixed; a generator varies it and keeps its nouns."""
    rng = random.Random(0)

    assert say(TWO_ABOVE_ONE) == "two green circles above a red square on white"
    wordings = {say(TWO_ABOVE_ONE, rng) for _ in range(40)}
    assert len(wordings) > 10
    assert all("two green circles" in wording and "a red square" in wording for wording in wordings)


def test_split_does_not_depend_on_the_order_of_words():
    """The same picture said the other way round is on the same side of the split; about one in twenty is held out."""
    rng = random.Random(4)
    prompts = [invent_prompt(rng) for _ in range(1500)]
    opposite = {"above": "below", "below": "above", "left of": "right of", "right of": "left of", None: None}

    for prompt in prompts:
        turned = Prompt(prompt.groups[::-1], prompt.background, opposite[prompt.relation])
        if len(prompt.groups) == 2:
            assert turned.is_held_out == prompt.is_held_out
    assert 0.03 < np.mean([prompt.is_held_out for prompt in prompts]) < 0.08

"""Drawn scenes are reproducible, hold what they say, and need no torch."""

import random
import subprocess
import sys

import numpy as np
import pytest

from triptych.testing.scene_clips import EVENTS, draw_clip
from triptych.testing.scene_paint import COLOURS, SHAPES
from triptych.testing.scene_pairs import changed
from triptych.testing.scene_questions import questions
from triptych.testing.scenes import Scene, SceneObject, draw_scene, paint


def two_red_circles_and_a_square() -> Scene:
    things = [("circle", "red", 20, 20), ("circle", "red", 60, 20), ("square", "blue", 40, 80)]
    objects = tuple(SceneObject(shape, colour, x, y, 12) for shape, colour, x, y in things)
    return paint(Scene(112, 112, "white", objects))


def test_same_seed_draws_the_same_picture():
    assert np.array_equal(draw_scene(5, num_words=1).image, draw_scene(5, num_words=1).image)


def test_count_follows_colour_and_shape():
    scene = two_red_circles_and_a_square()
    assert (scene.count("red", "circle"), scene.count(shape="square"), scene.count("green")) == (2, 1, 0)


def test_painted_pixels_have_the_named_colour():
    scene = two_red_circles_and_a_square()
    assert [scene.image.getpixel((20, 20)), scene.image.getpixel((100, 100))] == [COLOURS["red"][0], (255, 255, 255)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_drawn_inside_its_radius(shape):
    scene = paint(Scene(64, 64, "white", (SceneObject(shape, "black", 32, 32, 16),)))
    dark_y, dark_x = np.nonzero(np.asarray(scene.image.convert("L")) < 128)
    assert min(dark_x.min(), dark_y.min()) >= 14
    assert max(dark_x.max(), dark_y.max()) <= 50


def test_every_question_has_an_answer():
    rng = random.Random(3)
    asked = [question for seed in range(40) for question in questions(draw_scene(seed), rng, 5)]
    assert len(asked) == 200
    assert all(question.text and question.answer for question in asked)


def test_changed_scene_tells_its_change():
    rng = random.Random(4)
    scene = two_red_circles_and_a_square()
    for _ in range(30):
        change, after, told = changed(scene, rng)
        assert (change == "same") == (after == scene) == (told == "Nothing changed.")


def test_clips_move_what_they_say():
    clips = [draw_clip(seed) for seed in range(30)]
    assert {clip.event for clip in clips} <= set(EVENTS)
    for clip in clips:
        assert (clip.event == "still") == (clip.scenes[0] == clip.scenes[-1])


def test_scenes_import_without_torch():
    modules = "triptych.testing.scene_clips, triptych.testing.scene_questions"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

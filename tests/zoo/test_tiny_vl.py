"""tiny-vl as an ordinary folder: stock transformers loads it, and it answers held-out questions about drawn scenes."""

import random

import pytest
import torch

from triptych.testing.scene_clips import clip_questions, draw_clip
from triptych.testing.scene_pairs import draw_pair, pair_questions
from triptych.testing.scene_questions import questions
from triptych.testing.scenes import draw_scene
from triptych.zoo import folder
from triptych.zoo.reference import Ask, Reference

SEED = 88_000_000  # neither training nor the evaluation draws from it
LEAST_RIGHT = 0.96  # the committed weights reach 0.98; raise it with better ones
LEAST_RIGHT_OF_TWO = 0.96
LEAST_RIGHT_OF_CLIPS = 0.94
PLAIN = ("count", "color", "shape", "exists", "place", "background")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Reference(folder("tiny-vl"))


def share_right(model, pairs):
    answers = model.answers([ask for ask, _ in pairs])
    return sum(given == wanted for given, (_, wanted) in zip(answers, pairs, strict=True)) / len(pairs)


def test_answers_questions_about_pictures(model):
    """Plain questions about scenes that it never saw are answered to the letter."""
    rng = random.Random(SEED)
    pairs = []
    while len(pairs) < 200:
        scene = draw_scene(rng, (112, 112))
        pairs += [(Ask(q.text, [scene.image]), q.answer) for q in questions(scene, rng, 1, PLAIN)]
    assert share_right(model, pairs) >= LEAST_RIGHT


def test_answers_questions_about_two_pictures(model):
    """Which has more, which has one, how many in the second, what changed: chance is right in a third of them."""
    rng = random.Random(SEED)
    pairs = []
    while len(pairs) < 200:
        first, second, change = draw_pair(rng, (112, 112))
        (asked,) = pair_questions(first, second, change, rng)
        pairs.append((Ask(asked.text, [first.image, second.image]), asked.answer))
    assert share_right(model, pairs) >= LEAST_RIGHT_OF_TWO


def test_answers_questions_about_clips(model):
    """What happens, what moves and where to, how many there are at the end, of clips of four to eight frames."""
    rng = random.Random(SEED)
    pairs = []
    while len(pairs) < 50:
        clip = draw_clip(rng, (112, 112), rng.choice((4, 6, 8)))
        (asked,) = clip_questions(clip, rng, 1)
        pairs.append((Ask(asked.text, clip=clip.frames), asked.answer))
    assert share_right(model, pairs) >= LEAST_RIGHT_OF_CLIPS


def test_takes_clips_and_two_pictures(model):
    """Clips and pairs go through the same folder; an odd last frame makes a temporal patch of its own."""
    clip = draw_clip(SEED, (112, 112), 5)
    grid = model.inputs([Ask("What moves?", clip=clip.frames)])["video_grid_thw"]
    assert grid.tolist() == [[3, 8, 8]]
    pictures = [draw_scene(seed, (112, 84)).image for seed in (SEED, SEED + 1)]
    given = model.answers([Ask("What moves?", clip=clip.frames), Ask("What changed?", pictures)], max_new_tokens=8)
    assert len(given) == 2


def test_weights_are_small_enough_to_ship():
    assert (folder("tiny-vl") / "model.safetensors").stat().st_size <= 15_000_000


def test_tokenizer_spells_what_it_reads(model):
    """Capitals and digits are one token each, so that a word is read letter by letter; any text comes back whole."""
    tokenizer = model.tokenizer
    assert tokenizer.tokenize("STOP42") == ["S", "T", "O", "P", "4", "2"]
    text = 'Grüße! {"count": 3}'
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text

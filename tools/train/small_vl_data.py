"""What small-vl's projector is trained on: easy-vqa's pictures and drawn scenes, by number, with questions and truth.

Even numbers are drawn scenes, odd ones easy-vqa's training pictures, so that any first part of the row is a mixture.
Nothing of the easy-vqa package is run: its pictures and questions are read out of the wheel.
"""

from __future__ import annotations

import io
import json
import random
import re
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from triptych.testing.scene_questions import questions
from triptych.testing.scene_words import Question
from triptych.testing.scenes import Scene, invent_scene, paint
from triptych.zoo.wheels import PinnedWheel, check_sha256

EASY_VQA = PinnedWheel(
    package="easy-vqa",
    version="1.0",
    wheel_sha256="fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f",
)
SHAPES = ("circle", "rectangle", "triangle")
SCENE_SEED, HELD_OUT_SEED = 55_000_000, 56_000_000
KINDS = ("count", "total", "color", "shape", "exists", "place", "background")
SIDES_PX = (112, 112, 168, 224)


@dataclass(frozen=True)
class EasyPicture:
    """An easy-vqa picture: one shape of one colour, where both are known from its questions."""

    number: int
    asked: tuple[Question, ...]
    shape: str | None
    colour: str | None


class EasyVqa:
    """Pictures and questions of the wheel, `split` being train or test."""

    def __init__(self, wheel: Path, split: str = "train") -> None:
        check_sha256(wheel, EASY_VQA.wheel_sha256)
        self._archive = zipfile.ZipFile(wheel)
        self._root = f"easy_vqa/data/{split}"
        rows: dict[int, list[Question]] = defaultdict(list)
        for text, answer, number in json.loads(self._archive.read(f"{self._root}/questions.json")):
            rows[number].append(Question(easy_kind(text, answer), text, answer))
        self.pictures = [easy_picture(number, tuple(rows[number])) for number in sorted(rows)]

    def image(self, number: int) -> Image.Image:
        data = self._archive.read(f"{self._root}/images/{number}.png")
        return Image.open(io.BytesIO(data)).convert("RGB")


def easy_kind(text: str, answer: str) -> str:
    if answer in ("yes", "no"):
        thing = "shape" if any(shape in text for shape in SHAPES) else "color"
        return f"easy {thing} yes/no" + (", negated" if re.search(r"\b(not|no)\b", text) else "")
    return "easy shape" if answer in SHAPES else "easy color"


def easy_picture(number: int, asked: tuple[Question, ...]) -> EasyPicture:
    """Shape and colour from the answers, or from the words of a question whose answer is yes, or negated and no."""
    shape, colour = None, None
    for question in asked:
        words = re.findall(r"\w+", question.text)
        if question.kind == "easy shape":
            shape = question.answer
        elif question.kind == "easy color":
            colour = question.answer
        elif (question.answer == "yes") != question.kind.endswith("negated"):
            named = next((word for word in words if word in SHAPES), None)
            shape = named or shape
            if named is None:
                colour = next((word for word in words if word in EASY_COLOURS), colour)
    return EasyPicture(number, asked, shape, colour)


def evened(picture: EasyPicture, question: Question, rng: random.Random) -> Question:
    """Now and then a yes/no question about what is not there becomes one about what is: as they come, 97 of 100 plain
    ones about a colour are to be answered no, and looking is hardly worth the while."""
    is_negated = question.kind.endswith("negated")
    if "yes/no" not in question.kind or (question.answer == "yes") != is_negated or rng.random() < 0.6:
        return question
    for there, words in ((picture.shape, SHAPES), (picture.colour, EASY_COLOURS)):
        for word in words:
            if there and re.search(rf"\b{word}\b", question.text):
                text = re.sub(rf"\b{word}\b", there, question.text)
                return Question(question.kind, text, "no" if is_negated else "yes")
    return question


EASY_COLOURS = ("black", "gray", "red", "blue", "green", "yellow", "teal", "brown")


def scene_of(number: int, seed: int = SCENE_SEED) -> tuple[Scene, random.Random]:
    """The scene of that number, nothing painted yet, and its generator."""
    rng = random.Random(seed + number)
    side_px = rng.choice(SIDES_PX)
    return invent_scene(rng, (side_px, side_px)), rng


def painted(number: int, seed: int = SCENE_SEED) -> Image.Image:
    image = paint(*scene_of(number, seed)).image
    assert image is not None
    return image


def is_plain(answer: str) -> bool:
    return len(answer.split()) <= 3 and not answer.startswith("{")


def scene_asks(scene: Scene, rng: random.Random, num: int) -> list[Question]:
    """Plain questions, answered in a word or two, or by a sentence that there is no such thing."""
    asked = questions(scene, rng, 2 * num, KINDS)
    return [one for one in asked if one.kind == "nothing like that" or is_plain(one.answer)][:num]

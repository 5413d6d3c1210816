"""English for the drawn scenes: plurals, articles, numbers, and how to name one thing so that only it is meant."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ANY_SHAPE = ("object", "shape", "thing")
IN_A_SENTENCE = " Answer in a sentence.| Answer with a sentence.| Use a full sentence.| Reply in one sentence."
AS_JSON = " Answer in JSON.| Reply in JSON.| Answer as JSON.| Return JSON."


@dataclass(frozen=True, slots=True)
class Question:
    """One exchange whose answer is known. `kind` groups the accuracy figures."""

    kind: str
    text: str
    answer: str


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def amount(number: int, noun_phrase: str) -> str:
    """`a red circle`, `three red circles`, `no red circles`."""
    if number == 1:
        return article(noun_phrase)
    return f"{NUMBERS[number] if number else 'no'} {plural(noun_phrase)}"


def join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def noun_phrase(rng: random.Random, colour: str | None, shape: str | None, size: str | None = None) -> str:
    """`big red circle`, `red thing`, `object`: without plural or article."""
    return " ".join(word for word in (size, colour, shape or rng.choice(ANY_SHAPE)) if word)


def pick(rng: random.Random, choices: str, **slots: object) -> str:
    """One of the phrasings between the bars, with its slots filled, spoken a little differently each time."""
    text = rng.choice(choices.split("|")).format(**slots)
    if "color" in text and rng.random() < 0.3:
        text = text.replace("color", "colour")
    if "picture" in text and rng.random() < 0.35:
        text = text.replace("picture", "image")
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    if text.endswith("?") and rng.random() < 0.06:
        text = text[:-1]
    return text


def naming(rng: random.Random, scene, thing) -> str | None:
    """Words that mean this object and no other of the scene, without article; None where there are none."""
    ways: list[tuple[str | None, str | None]] = [(thing.colour, thing.shape)] * 3
    ways += [(None, thing.shape), (thing.colour, None)]
    fitting = [way for way in ways if scene.count(*way) == 1]
    return noun_phrase(rng, *rng.choice(fitting)) if fitting else None


def groups(scene) -> list[tuple[str, int]]:
    """The kinds of object with their counts, in the order of their leftmost one."""
    counts: dict[str, int] = {}
    for thing in left_to_right(scene.objects):
        counts[thing.name] = counts.get(thing.name, 0) + 1
    return list(counts.items())


def leftmost_of_kinds(scene) -> list:
    """The leftmost object of each kind."""
    first: dict[str, object] = {}
    for thing in left_to_right(scene.objects):
        first.setdefault(thing.name, thing)
    return list(first.values())


def in_clear_order(objects: Iterable, short_px: float) -> bool:
    """Whether each lies clearly to the left of the next, by 3% of the picture's short side."""
    places_px = sorted(thing.x_px for thing in objects)
    return all(after - before >= 0.03 * short_px for before, after in itertools.pairwise(places_px))


def left_to_right(objects: Iterable):
    return sorted(objects, key=lambda thing: thing.x_px)

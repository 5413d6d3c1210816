"""Questions about the objects of one drawn picture: how many, which colour, which shape, is there, where, how big.

Each `ask_*` returns a `Question`, or None where the scene leaves no fair question of that kind.
"""

from __future__ import annotations

import json
import random

from triptych.testing.scene_paint import COLOURS, SHAPES
from triptych.testing.scene_words import (
    AS_JSON,
    IN_A_SENTENCE,
    Question,
    amount,
    article,
    naming,
    noun_phrase,
    pick,
    plural,
)


def some_kind(scene, rng: random.Random, present: float = 0.6) -> tuple[str | None, str | None]:
    """A colour, a shape or both to ask about; in `present` of the cases taken from an object that is there."""
    if scene.objects and rng.random() < present:
        thing = rng.choice(scene.objects)
        colour, shape = thing.colour, thing.shape
    else:
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        if scene.objects and rng.random() < 0.5:  # a near miss: right colour or right shape
            thing = rng.choice(scene.objects)
            colour, shape = rng.choice(((thing.colour, shape), (colour, thing.shape)))
    form = rng.random()
    return (colour, shape) if form < 0.5 else (None, shape) if form < 0.75 else (colour, None)


def absence(phrase: str) -> str:
    return f"There is no {phrase} in the picture."


def ask_count(scene, rng):
    kind = some_kind(scene, rng, 0.8)
    phrase = noun_phrase(rng, *kind)
    number = scene.count(*kind)
    text = pick(
        rng,
        "How many {things} are there?|How many {things} are in the picture?|How many {things} do you see?|"
        "How many {things} can you see?|Count the {things}.|What is the number of {things}?|Number of {things}?",
        things=plural(phrase),
    )
    form = rng.random()
    if form < 0.72:
        return Question("count", text, str(number))
    if form < 0.86:
        verb = "is" if number == 1 else "are"
        return Question("count sentence", text + pick(rng, IN_A_SENTENCE), f"There {verb} {amount(number, phrase)}.")
    return Question("count json", text + pick(rng, AS_JSON), json.dumps({"count": number}))


def ask_total(scene, rng):
    text = pick(
        rng,
        "How many {things} are there in total?|How many {things} are there?|How many {things} are in the picture?|"
        "Count all {things}.|Count the {things}.|How many {things} do you see?",
        things=plural(noun_phrase(rng, None, None)),
    )
    return Question("count", text, str(len(scene.objects)))


def ask_colour(scene, rng):
    shape = rng.choice(scene.objects).shape if scene.objects and rng.random() < 0.9 else rng.choice(SHAPES)
    found = scene.matching(shape=shape)
    text = pick(
        rng,
        "What color is the {shape}?|What is the color of the {shape}?|Which color does the {shape} have?|"
        "Tell me the color of the {shape}.|The {shape} is what color?",
        shape=shape,
    )
    if not found:
        return Question("nothing like that", text, absence(shape))
    if len(found) > 1:
        return None
    form = rng.random()
    if form < 0.76:
        return Question("color", text, found[0].colour)
    if form < 0.88:
        return Question("color sentence", text + pick(rng, IN_A_SENTENCE), f"The {shape} is {found[0].colour}.")
    return Question("color json", text + pick(rng, AS_JSON), json.dumps({"color": found[0].colour}))


def ask_shape(scene, rng):
    colour = rng.choice(scene.objects).colour if scene.objects and rng.random() < 0.9 else rng.choice(list(COLOURS))
    found = scene.matching(colour=colour)
    text = pick(
        rng,
        "What shape is the {it}?|What is the {it}?|What is the shape of the {it}?|Which shape is {colour}?|"
        "Which shape does the {it} have?",
        it=noun_phrase(rng, colour, None),
        colour=colour,
    )
    if not found:
        return Question("nothing like that", text, absence(f"{colour} object"))
    if len(found) > 1:
        return None
    return Question("shape", text, found[0].shape)


def ask_exists(scene, rng):
    kind = some_kind(scene, rng, 0.5)
    phrase = noun_phrase(rng, *kind)
    text = pick(
        rng,
        "Is there {it}?|Is there {it} in the picture?|Do you see {it}?|Can you see {it}?|Does the picture show {it}?|"
        "Are there any {them}?|Do you see any {them}?",
        it=article(phrase),
        them=plural(phrase),
    )
    there = scene.count(*kind) > 0
    form = rng.random()
    if form < 0.8:
        return Question("exists", text, "yes" if there else "no")
    if form < 0.9:
        full = f"Yes, there is {article(phrase)}." if there else f"No, there is no {phrase}."
        return Question("exists sentence", text + pick(rng, IN_A_SENTENCE), full)
    return Question("exists json", text + pick(rng, AS_JSON), json.dumps({"answer": "yes" if there else "no"}))


def third(place_px: float, length_px: float, words: tuple[str, str, str]) -> str | None:
    """Which third a place lies in, None near a border."""
    at = place_px / length_px
    return words[0] if at < 0.3 else words[2] if at > 0.7 else words[1] if 0.38 < at < 0.62 else None


def place_words(x_px: float, y_px: float, width_px: int, height_px: int) -> str | None:
    column = third(x_px, width_px, ("left", "center", "right"))
    row = third(y_px, height_px, ("top", "center", "bottom"))
    if column is None or row is None:
        return None
    words = [word for word in (row, column) if word != "center"]
    return " ".join(words) or "center"


def ask_where(scene, rng):
    text = (
        "Where is the {it}?|Where is the {it} in the picture?|In which part of the picture is the {it}?|"
        "Locate the {it}."
    )
    if not scene.objects or rng.random() < 0.1:
        colour, shape = some_kind(scene, rng, 0)
        if scene.count(colour, shape):
            return None
        phrase = noun_phrase(rng, colour, shape)
        return Question("nothing like that", pick(rng, text, it=phrase), absence(phrase))
    thing = rng.choice(scene.objects)
    name = naming(rng, scene, thing)
    place = place_words(thing.x_px, thing.y_px, scene.width_px, scene.height_px)
    if name is None or place is None:
        return None
    if rng.random() < 0.15:
        full = f"The {name} is in the {place}."
        return Question("place sentence", pick(rng, text, it=name) + pick(rng, IN_A_SENTENCE), full)
    return Question("place", pick(rng, text, it=name), place)


def ask_background(scene, rng):
    text = pick(
        rng,
        "What color is the background?|What is the background color?|Which color is the background?|"
        "What color is behind the objects?",
    )
    return Question("background", text, scene.background)


def ask_most(scene, rng):
    if len(scene.objects) < 2:
        return None
    key = rng.choice(("colour", "shape"))
    one, other = rng.sample(list(COLOURS) if key == "colour" else SHAPES, 2)
    if rng.random() < 0.8:
        one = getattr(rng.choice(scene.objects), key)
    if rng.random() < 0.6:
        other = getattr(rng.choice(scene.objects), key)
    first, second = scene.count(**{key: one}), scene.count(**{key: other})
    if one == other:
        return None
    phrases = [plural(noun_phrase(rng, *((name, None) if key == "colour" else (None, name)))) for name in (one, other)]
    text = pick(rng, "Are there more {a} than {b}?|Do you see more {a} than {b}?", a=phrases[0], b=phrases[1])
    return Question("more", text, "yes" if first > second else "no")


def ask_how_big(scene, rng):
    fair = [thing for thing in scene.objects if scene.size_word(thing) != "medium"]
    if not fair:
        return None
    thing = rng.choice(fair)
    name = naming(rng, scene, thing)
    if name is None:
        return None
    text = pick(
        rng, "Is the {it} small or big?|Is the {it} big or small?|What size is the {it}?|How big is the {it}?", it=name
    )
    return Question("size", text, scene.size_word(thing))


def ask_count_size(scene, rng):
    if not scene.objects or any(scene.size_word(thing) == "medium" for thing in scene.objects):
        return None
    size = rng.choice(("small", "big"))
    thing = rng.choice(scene.objects)
    kind = rng.choice(((None, None), (thing.colour, None), (None, thing.shape), (thing.colour, thing.shape)))
    colour, shape = kind
    things = plural(noun_phrase(rng, colour, shape, size))
    text = pick(rng, "How many {things} are there?|Count the {things}.|How many {things} do you see?", things=things)
    return Question("count size", text, str(scene.count(*kind, size)))

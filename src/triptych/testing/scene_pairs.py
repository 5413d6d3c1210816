"""Two drawn pictures compared: the same scene with one thing changed, or two scenes asked about together."""

from __future__ import annotations

import random
from dataclasses import replace

from triptych.testing.scene_about import some_kind
from triptych.testing.scene_paint import COLOURS, colour_rgb, contrast
from triptych.testing.scene_words import Question, article, noun_phrase, pick, plural
from triptych.testing.scenes import draw_scene, is_free, paint

CHANGES = ("same", "color", "gone", "added", "moved")


def draw_pair(rng: random.Random, size_px: tuple[int, int], faces=None):
    """Two painted scenes of one size, and which change makes the second from the first (None: unrelated)."""
    first = draw_scene(rng, size_px, rng.randint(1, 5), faces=faces)
    if rng.random() < 0.5:
        return first, draw_scene(rng, size_px, rng.randint(0, 5), faces=faces), None
    change, second, said = changed(first, rng)
    return first, paint(second, rng), (change, said)


def changed(scene, rng: random.Random):
    """A scene with one change, and the sentence that tells it; falls back to no change where none is fair."""
    alone = [thing for thing in scene.objects if scene.count(thing.colour, thing.shape) == 1]
    change = rng.choice(CHANGES) if alone else "same"
    if change == "same":
        return "same", scene, "Nothing changed."
    thing = rng.choice(alone)
    rest = tuple(other for other in scene.objects if other is not thing)
    if change == "gone":
        return change, replace(scene, objects=rest), f"The {thing.name} is gone."
    if change == "color":
        new = recoloured(scene, thing, rng)
        return change, with_object(scene, thing, new), f"The {thing.name} turned {new.colour}."
    if change == "added":  # told backwards: the first scene is kept whole, the second holds one more
        extra = place_extra(scene, thing, rng)
        if extra is None:
            return "same", scene, "Nothing changed."
        return change, replace(scene, objects=(*scene.objects, extra)), f"{article(extra.name).capitalize()} was added."
    moved = move_away(scene, thing, rest, rng)
    if moved is None:
        return "same", scene, "Nothing changed."
    return change, with_object(scene, thing, moved), f"The {thing.name} moved."


def with_object(scene, old, new):
    return replace(scene, objects=tuple(new if thing is old else thing for thing in scene.objects))


def recoloured(scene, thing, rng: random.Random):
    fitting = [
        name
        for name in COLOURS
        if name not in (thing.colour, scene.background) and contrast(colour_rgb(name), scene.background_rgb) > 90
    ]
    colour = rng.choice(fitting)
    return replace(thing, colour=colour, rgb=colour_rgb(colour, rng))


def free_place(scene, radius_px: float, objects, rng: random.Random) -> tuple[float, float] | None:
    for _ in range(30):
        x_px = rng.uniform(radius_px + 1, scene.width_px - radius_px - 1)
        y_px = rng.uniform(radius_px + 1, scene.height_px - radius_px - 1)
        if is_free(x_px, y_px, radius_px, objects, scene.texts, 1.05):
            return x_px, y_px
    return None


def place_extra(scene, like, rng: random.Random):
    place = free_place(scene, like.radius_px, scene.objects, rng)
    if place is None:
        return None
    extra = recoloured(scene, like, rng)
    return None if scene.count(extra.colour, extra.shape) else replace(extra, x_px=place[0], y_px=place[1])


def move_away(scene, thing, rest, rng: random.Random):
    place = free_place(scene, thing.radius_px, rest, rng)
    if place is None:
        return None
    far_px = 0.3 * min(scene.width_px, scene.height_px)
    is_far = abs(place[0] - thing.x_px) > far_px or abs(place[1] - thing.y_px) > far_px
    return replace(thing, x_px=place[0], y_px=place[1]) if is_far else None


def pair_questions(first, second, change, rng: random.Random, num: int = 1) -> list[Question]:
    """Questions about two pictures shown one after the other."""
    asked: list[Question] = []
    while len(asked) < num:
        if change is not None and rng.random() < 0.6:
            asked.append(ask_difference(change, rng))
        else:
            asked.append(rng.choice((ask_which_has_more, ask_in_which, ask_count_in))(first, second, rng))
    return asked


def ask_difference(change: tuple[str, str], rng: random.Random) -> Question:
    if rng.random() < 0.4:
        text = pick(rng, "Are the two pictures the same?|Do both pictures show the same?|Are the pictures equal?")
        return Question("pair same", text, "yes" if change[0] == "same" else "no")
    text = pick(
        rng, "What is different in the second picture?|What changed?|What changed from the first picture to the second?"
    )
    return Question("pair difference", text, change[1])


def ask_which_has_more(first, second, rng: random.Random) -> Question:
    kind = (None, None) if rng.random() < 0.3 else some_kind(rng.choice((first, second)), rng, 0.9)
    counts = first.count(*kind), second.count(*kind)
    text = pick(
        rng,
        "Which picture has more {t}?|In which picture are there more {t}?|"
        "Which has more {t}, the first or the second picture?",
        t=plural(noun_phrase(rng, *kind)),
    )
    answer = "both the same" if counts[0] == counts[1] else "the first" if counts[0] > counts[1] else "the second"
    return Question("pair more", text, answer)


def ask_in_which(first, second, rng: random.Random) -> Question:
    kind = some_kind(rng.choice((first, second)), rng, 0.8)
    there = first.count(*kind) > 0, second.count(*kind) > 0
    text = pick(rng, "Which picture has {it}?|In which picture is there {it}?", it=article(noun_phrase(rng, *kind)))
    answer = {(True, True): "both", (True, False): "the first", (False, True): "the second", (False, False): "neither"}[
        there
    ]
    return Question("pair which", text, answer)


def ask_count_in(first, second, rng: random.Random) -> Question:
    word, scene = rng.choice((("first", first), ("second", second)))
    kind = (None, None) if rng.random() < 0.4 else some_kind(scene, rng, 0.8)
    things = plural(noun_phrase(rng, *kind))
    text = pick(rng, "How many {t} are in the {w} picture?|Count the {t} in the {w} picture.", t=things, w=word)
    return Question("pair count", text, str(scene.count(*kind)))

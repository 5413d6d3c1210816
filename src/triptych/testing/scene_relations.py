"""Questions that hold two objects of a scene against one another: left, right, above, below, bigger, outermost."""

from __future__ import annotations

import json
import random

from triptych.testing.scene_words import Question, article, naming, pick

SIDES = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}
SIDE_WORDS = {
    "left": "to the left of|left of|on the left of",
    "right": "to the right of|right of|on the right of",
    "above": "above|over",
    "below": "below|under",
}


def shift_px(side: str, thing, other) -> float:
    """How far `thing` lies to that side of `other`."""
    dx, dy = SIDES[side]
    return dx * (thing.x_px - other.x_px) + dy * (thing.y_px - other.y_px)


def two_named(scene, rng: random.Random):
    """Two objects that can be named without doubt, as (object, name) pairs, or None."""
    named = [(thing, name) for thing in scene.objects if (name := naming(rng, scene, thing))]
    return rng.sample(named, 2) if len(named) > 1 else None


def main_side(scene, thing, other) -> str | None:
    """The side on which `thing` lies of `other`, None where two sides would both be fair."""
    shifts = sorted(((shift_px(side, thing, other), side) for side in SIDES), reverse=True)
    margin_px = 0.08 * min(scene.width_px, scene.height_px)
    return shifts[0][1] if shifts[0][0] > 1.4 * shifts[1][0] + margin_px else None


def ask_relation(scene, rng):
    pair = two_named(scene, rng)
    side = pair and main_side(scene, pair[0][0], pair[1][0])
    if not side:
        return None
    (_, one), (_, other) = pair
    text = pick(
        rng,
        "Where is the {a} relative to the {b}?|Where is the {a} compared to the {b}?|"
        "On which side of the {b} is the {a}?|Where is the {a} as seen from the {b}?|"
        "Is the {a} left, right, above or below the {b}?",
        a=one,
        b=other,
    )
    if rng.random() < 0.12:
        words = SIDE_WORDS[side].split("|")[0]
        return Question("relation sentence", text + " Answer in a sentence.", f"The {one} is {words} the {other}.")
    return Question("relation", text, side)


def ask_relation_yes(scene, rng):
    pair = two_named(scene, rng)
    if not pair:
        return None
    (thing, one), (base, other) = pair
    side = rng.choice(list(SIDES))
    gap_px = shift_px(side, thing, base)
    if abs(gap_px) < 0.08 * min(scene.width_px, scene.height_px):
        return None
    text = pick(
        rng,
        "Is the {a} {side} the {b}?|Is the {a} {side} the {b} in the picture?|Does the {a} lie {side} the {b}?",
        a=one,
        b=other,
        side=rng.choice(SIDE_WORDS[side].split("|")),
    )
    answer = "yes" if gap_px > 0 else "no"
    if rng.random() < 0.08:
        return Question("relation json", text + " Answer in JSON.", json.dumps({"answer": answer}))
    return Question("relation yes/no", text, answer)


def ask_neighbour(scene, rng):
    """What is on that side of a thing: asked where exactly one object is, and nothing is nearly so."""
    pair = two_named(scene, rng)
    if not pair or len(scene.objects) > 4:
        return None
    (base, name), side = pair[0], rng.choice(list(SIDES))
    gaps = [(shift_px(side, thing, base), thing) for thing in scene.objects if thing is not base]
    margin_px = 0.08 * min(scene.width_px, scene.height_px)
    found = [thing for gap_px, thing in gaps if gap_px > margin_px]
    if len(found) > 1 or any(abs(gap_px) <= margin_px for gap_px, _ in gaps):
        return None
    words = rng.choice(SIDE_WORDS[side].split("|"))
    text = pick(
        rng,
        "What is {side} the {b}?|Which object is {side} the {b}?|What do you see {side} the {b}?",
        b=name,
        side=words,
    )
    return Question("neighbor", text, article(found[0].name) if found else "nothing")


EXTREMES = {
    "left": "leftmost|furthest left|on the far left",
    "right": "rightmost|furthest right|on the far right",
    "above": "topmost|highest|at the top",
    "below": "lowest|at the bottom|furthest down",
}


def ask_extreme(scene, rng):
    if not scene.objects:
        return None
    side = rng.choice(list(SIDES))
    dx, dy = SIDES[side]
    ranked = sorted(scene.objects, key=lambda thing: dx * thing.x_px + dy * thing.y_px, reverse=True)
    if len(ranked) > 1 and shift_px(side, ranked[0], ranked[1]) < 0.06 * min(scene.width_px, scene.height_px):
        return None
    words = rng.choice(EXTREMES[side].split("|"))
    text = pick(
        rng, "Which object is {words}?|What is the object that is {words}?|Which shape is {words}?", words=words
    )
    if rng.random() < 0.15:
        fields = {"color": ranked[0].colour, "shape": ranked[0].shape}
        return Question("extreme json", text + pick(rng, " Answer in JSON.| Reply in JSON."), json.dumps(fields))
    return Question("extreme", text, article(ranked[0].name))


def ask_bigger(scene, rng):
    pair = two_named(scene, rng)
    if not pair:
        return None
    (one, first), (other, second) = pair
    if not (one.radius_px > 1.3 * other.radius_px or other.radius_px > 1.3 * one.radius_px):
        return None
    word = rng.choice(("bigger", "larger", "smaller"))
    wins = (one.radius_px > other.radius_px) == (word != "smaller")
    if rng.random() < 0.5:
        text = pick(
            rng,
            "Which is {word}, the {a} or the {b}?|What is {word}: the {a} or the {b}?",
            word=word,
            a=first,
            b=second,
        )
        return Question("bigger", text, f"the {first if wins else second}")
    text = pick(rng, "Is the {a} {word} than the {b}?", word=word, a=first, b=second)
    return Question("bigger yes/no", text, "yes" if wins else "no")


def ask_biggest(scene, rng):
    if len(scene.objects) < 2:
        return None
    word = rng.choice(("biggest", "largest", "smallest"))
    ranked = sorted(scene.objects, key=lambda thing: thing.radius_px, reverse=word != "smallest")
    large, less = sorted((ranked[0].radius_px, ranked[1].radius_px), reverse=True)
    if large < 1.25 * less:
        return None
    text = pick(rng, "What is the {word} object?|Which object is the {word}?|What is the {word} shape?", word=word)
    return Question("biggest", text, article(ranked[0].name))

"""Lists in other orders than from left to right: asked in training only, so that what is topmost, lowest, biggest or
smallest is looked for as often as what is leftmost."""

from __future__ import annotations

import itertools
import math
import random

from triptych.testing.scene_words import Question, article, left_to_right, pick

ORDERS = {  # by which of a thing's numbers, ascending
    "right to left": lambda thing: -thing.x_px,
    "top to bottom": lambda thing: thing.y_px,
    "bottom to top": lambda thing: -thing.y_px,
    "big to small": lambda thing: -math.log(thing.radius_px),
    "small to big": lambda thing: math.log(thing.radius_px),
}


def ask_order(scene, rng: random.Random) -> Question | None:
    """None where two things follow one another too closely, by 3% of the picture's short side or 15% of a radius."""
    order = rng.choice(list(ORDERS))
    things = in_order(f"list {order}", scene.objects)
    values = [ORDERS[order](thing) for thing in things]
    least = 0.14 if "big" in order else 0.03 * min(scene.width_px, scene.height_px)
    if len(things) < 2 or any(after - before < least for before, after in itertools.pairwise(values)):
        return None
    text = pick(rng, "List the objects from {order}.|Name the objects from {order}.", order=order)
    return Question(f"list {order}", text, ", ".join(article(thing.name) for thing in things))


def in_order(kind: str, things) -> list:
    """The things of a scene as a list of that kind names them: from left to right unless it says otherwise."""
    key = ORDERS.get(kind.removeprefix("list "))
    return sorted(things, key=key) if key else left_to_right(things)

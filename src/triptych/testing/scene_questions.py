"""Questions about one drawn picture, with their answers: what `tiny-vl` is trained and judged on."""

from __future__ import annotations

import random

from triptych.testing import scene_about, scene_reading, scene_relations
from triptych.testing.scene_words import Question

ASKERS = {
    "count": (scene_about.ask_count, 5.0),
    "total": (scene_about.ask_total, 1.5),
    "color": (scene_about.ask_colour, 3.0),
    "shape": (scene_about.ask_shape, 2.5),
    "exists": (scene_about.ask_exists, 3.5),
    "place": (scene_about.ask_where, 3.0),
    "background": (scene_about.ask_background, 0.6),
    "more": (scene_about.ask_most, 1.2),
    "list": (scene_reading.ask_list, 2.0),
    "text": (scene_reading.ask_text, 3.5),
    "text color": (scene_reading.ask_text_colour, 0.8),
    "size": (scene_about.ask_how_big, 1.2),
    "count size": (scene_about.ask_count_size, 1.0),
    "relation": (scene_relations.ask_relation, 3.0),
    "relation yes": (scene_relations.ask_relation_yes, 2.5),
    "neighbour": (scene_relations.ask_neighbour, 1.5),
    "extreme": (scene_relations.ask_extreme, 2.0),
    "bigger": (scene_relations.ask_bigger, 1.5),
    "biggest": (scene_relations.ask_biggest, 1.2),
}


def questions(scene, rng: random.Random, num: int = 1, kinds: tuple[str, ...] | None = None) -> list[Question]:
    """`num` questions about the scene, of the given kinds, or of any, each kind as likely as its weight."""
    names = kinds or tuple(ASKERS)
    weights = [ASKERS[name][1] for name in names]
    asked: list[Question] = []
    for _ in range(40 * num):
        question = ASKERS[rng.choices(names, weights)[0]][0](scene, rng)
        if question is not None:
            asked.append(question)
        if len(asked) == num:
            break
    return asked

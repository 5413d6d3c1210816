"""Questions whose answer goes through the whole picture: lists, descriptions, and the text that is written in it."""

from __future__ import annotations

import json

from triptych.testing.scene_words import (
    AS_JSON,
    IN_A_SENTENCE,
    Question,
    amount,
    article,
    groups,
    in_clear_order,
    join,
    left_to_right,
    leftmost_of_kinds,
    pick,
)


def ask_list(scene, rng):
    """Of a scene whose things are clearly one left of the other; a description needs that of their kinds only."""
    short_px = min(scene.width_px, scene.height_px)
    names = [article(thing.name) for thing in left_to_right(scene.objects)]
    form = rng.random()
    if not in_clear_order(scene.objects if form < 0.72 else leftmost_of_kinds(scene), short_px):
        return None
    if form < 0.55:
        text = pick(
            rng,
            "List the objects from left to right.|Name the objects from left to right.|"
            "What objects are there, from left to right?",
        )
        return Question("list", text, ", ".join(names) or "nothing")
    if form < 0.72:
        things = [{"color": thing.colour, "shape": thing.shape} for thing in left_to_right(scene.objects)]
        text = pick(rng, "List the objects from left to right.|Name the objects from left to right.|List all objects.")
        return Question("list json", text + pick(rng, AS_JSON), json.dumps({"objects": things}))
    text = pick(
        rng,
        "Describe the picture.|What is in the picture?|What do you see?|What does the picture show?|"
        "Describe this picture.|Write a caption.",
    )
    return Question("describe", text, describe(scene))


def describe(scene) -> str:
    """`There are two green circles and a red square on a white background. The text says STOP.`"""
    kinds = groups(scene)
    things = join([amount(number, name) for name, number in kinds]) if kinds else "nothing"
    verb = "are" if kinds and kinds[0][1] > 1 else "is"
    said = f" The text says {' '.join(words_in_order(scene))}." if scene.texts else ""
    return f"There {verb} {things} on {article(scene.background)} background." + said


def words_in_order(scene) -> list[str]:
    return [text.text for text in sorted(scene.texts, key=lambda text: text.y_px)]


def ask_text(scene, rng):
    words = words_in_order(scene)
    form = rng.random()
    if form < 0.12:
        text = pick(
            rng, "Is there any text?|Is there any text in the picture?|Does the picture contain text?|Is there a word?"
        )
        return Question("text exists", text, "yes" if words else "no")
    single = len(words) == 1 and rng.random() < 0.5
    if single:
        noun = "number" if words[0].isdigit() else "word"
        text = pick(
            rng, "What {noun} is written?|Which {noun} is it?|Read the {noun}.|What {noun} do you see?", noun=noun
        )
    else:
        text = pick(
            rng,
            "What does it say?|Read the text.|What does the text say?|What is written in the picture?|What is written?",
        )
    if not words:
        return Question("nothing like that", text, "There is no text in the picture.") if form < 0.4 else None
    if form > 0.88:
        return Question("text json", text + pick(rng, AS_JSON), json.dumps({"text": " ".join(words)}))
    if form > 0.78:
        return Question("text sentence", text + pick(rng, IN_A_SENTENCE), f"The text says {' '.join(words)}.")
    return Question("text", text, " ".join(words))


def ask_text_colour(scene, rng):
    if len(scene.texts) != 1:
        return None
    written = scene.texts[0]
    noun = rng.choice(("text", "number" if written.text.isdigit() else "word"))
    return Question(
        "text color", pick(rng, "What color is the {n}?|Which color does the {n} have?", n=noun), written.colour
    )

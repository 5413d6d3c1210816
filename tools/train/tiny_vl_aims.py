"""Where an answer should look: the visual tokens that hold what the next answer token names or spells.

An aim is a position that predicts part of a thing's name (its article and the comma before it included), or one
character of a written word. Some attention heads are told to put their weight there (`tiny_vl_look.py`).
"""

from __future__ import annotations

import re

import numpy as np
from tiny_vl_targets import COLOUR_ID, SHAPE_ID, slot

from triptych.testing.scene_reading import words_in_order
from triptych.testing.scene_words import ANY_SHAPE, left_to_right, plural

NOUNS = {plural(name): name for name in (*SHAPE_ID, *ANY_SHAPE)} | {name: name for name in (*SHAPE_ID, *ANY_SHAPE)}
NOUN_PATTERN = "|".join(sorted(NOUNS, key=len, reverse=True))
MENTION = re.compile(rf"\b(?:(small|big) )?(?:({'|'.join(COLOUR_ID)}) )?({NOUN_PATTERN})\b")
JSON_MENTION = re.compile(rf'"color": "(?P<size>)({"|".join(COLOUR_ID)})", "shape": "({NOUN_PATTERN})')
NAMING_KINDS = {"list", "list json", "describe", "extreme", "extreme json", "neighbor", "bigger", "biggest"}
NAMING_KINDS |= {"clip event", "clip mover", "pair difference"}
TO_THE_END = {"clip event", "pair difference"}  # what happens to a thing is to be seen where the thing is
ABOUT_ONE = {"place", "size", "clip direction", "clip color"}  # of the one thing that the question names


def aims(rows, pictures, gh: int, gw: int) -> tuple[np.ndarray, ...]:
    """Row [M] and token [M] of each aim; then aim [K] and position in its row [K] of the visual tokens it may look at.

    `pictures`: for each row the scenes of its pictures, or of its clip's temporal patches.
    """
    where, pairs = [], []
    for index, (row, scenes) in enumerate(zip(rows, pictures, strict=True)):
        for question, first, spans in row.told:
            for start, end, things in targets(question, scenes):
                at = {
                    row.visual[picture * gh * gw + slot(x_px, y_px, gh, gw, 2)[0]] for picture, (x_px, y_px) in things
                }
                for token, (begins, ends) in enumerate(spans):
                    if at and begins < end and ends > start and begins < ends:
                        pairs += [(len(where), position) for position in at]
                        where.append((index, first + token - 1))
    return (*np.array(where, np.int64).reshape(-1, 2).T, *np.array(pairs, np.int64).reshape(-1, 2).T)


def noun_aims(rows, scenes, gh: int, gw: int) -> tuple[np.ndarray, ...]:
    """Nouns of rows with one picture: row, token [M]; noun and position in its row [K] of each thing meant; place [M]
    of the token before the picture."""
    where, pairs, before = [], [], []
    for index, (row, scene) in enumerate(zip(rows, scenes, strict=True)):
        for token, *named in row.mentions:
            pairs += [
                (len(where), row.visual[slot(x_px, y_px, gh, gw, 2)[0]]) for _, (x_px, y_px) in meant([scene], *named)
            ]
            where.append((index, token))
            before.append(row.visual[0] - 1)
    pairs = np.array(pairs, np.int64).reshape(-1, 2).T
    return (*np.array(where, np.int64).reshape(-1, 2).T, *pairs, np.array(before, np.int64))


def targets(question, scenes):
    """(start, end, [(picture, centre in pixels), ...]) for each part of the answer that is to be looked up."""
    found = list(characters(question, scenes[0])) if len(scenes) == 1 else []
    if question.kind in NAMING_KINDS:
        found += named(question, scenes)
    elif question.kind in ABOUT_ONE:
        mention = MENTION.search(question.text)
        things = mention and meant(scenes, *mention.groups())
        if things and all(scene.count(mention[2], shape_of(mention[3])) <= 1 for scene in scenes):
            found.append((0, len(question.answer), things))
    return found


def shape_of(noun) -> str | None:
    """None for a noun that stands for any shape."""
    return None if NOUNS[noun] in ANY_SHAPE else NOUNS[noun]


def meant(scenes, size, colour, noun):
    return [
        (picture, thing.centre_px)
        for picture, scene in enumerate(scenes)
        for thing in scene.matching(colour, shape_of(noun), size or None)
    ]


def named(question, scenes):
    """Each name in the answer, with what leads to it. In a list, the i-th is the i-th thing from the left."""
    pattern = JSON_MENTION if question.kind.endswith("json") else MENTION
    in_order = left_to_right(scenes[0].objects) if question.kind.startswith("list") else None
    start = 0
    for index, mention in enumerate(pattern.finditer(question.answer)):
        things = [(0, in_order[index].centre_px)] if in_order else meant(scenes, *mention.groups())
        end = len(question.answer) if question.kind in TO_THE_END else mention.end()
        yield start, end, things
        start = end


def characters(question, scene):
    """Each character of the words that the answer spells."""
    spelled = " ".join(words_in_order(scene))
    if not spelled or spelled not in question.answer or question.kind == "text color":
        return
    start = question.answer.rindex(spelled)
    for text in sorted(scene.texts, key=lambda text: text.y_px):
        for place, at in enumerate(text.centres_px()):
            yield start + place, start + place + 1, [(0, at)]
        start += len(text.text) + 1

"""Where an answer should look: the visual tokens that hold what the next answer token names or spells.

An aim is a position that predicts part of a thing's name (its article and the comma before it included), or one
character of a written word. Some attention heads are told to put their weight there (`tiny_vl_look.py`). Where the
answer is that there is nothing, or no more, they are to look at the token before the picture. What has its centre at a
token's edge may be looked for on either side of it.
"""

from __future__ import annotations

import re

import numpy as np
from tiny_vl_orders import ORDERS, in_order
from tiny_vl_targets import COLOUR_ID, SHAPE_ID, tokens_near

from triptych.testing.scene_reading import words_in_order
from triptych.testing.scene_words import ANY_SHAPE, leftmost_of_kinds, plural

NOUNS = {plural(name): name for name in (*SHAPE_ID, *ANY_SHAPE)} | {name: name for name in (*SHAPE_ID, *ANY_SHAPE)}
NOUN_PATTERN = "|".join(sorted(NOUNS, key=len, reverse=True))
MENTION = re.compile(rf"\b(?:(small|big) )?(?:({'|'.join(COLOUR_ID)}) )?({NOUN_PATTERN})\b")
JSON_MENTION = re.compile(rf'"color": "(?P<size>)({"|".join(COLOUR_ID)})", "shape": "({NOUN_PATTERN})')
NAMING_KINDS = {"list", "list json", "describe", "extreme", "extreme json", "neighbor", "bigger", "biggest"}
CHANGE_KINDS = {"clip event", "clip mover", "pair difference"}  # name what changes; what happens to it may follow
CHANGE_ONLY = {"clip direction", "clip yes/no", "pair same"}
NAMING_KINDS |= CHANGE_KINDS | {f"list {order}" for order in ORDERS}
ABOUT_ONE = {"place", "size", "clip color"}  # of the one thing that the question names
ABOUT_ALL = {"list", "describe", "extreme", "biggest"}  # whose noun means nothing in particular
NOTHING = (0, None)


def aims(rows, pictures, gh: int, gw: int) -> tuple[np.ndarray, ...]:
    """Row [M] and token [M] of each aim; then aim [K] and position in its row [K] of the visual tokens it may look at.

    `pictures`: for each row the scenes of its pictures, or of its clip's temporal patches.
    """
    where, pairs = [], []
    for index, (row, scenes) in enumerate(zip(rows, pictures, strict=True)):
        for question, first, spans, _ in row.told:
            for start, end, things in targets(question, scenes):
                at = set().union(*(looked_at(row, picture, centre_px, gh, gw) for picture, centre_px in things))
                for token in tokens_within(spans, len(question.answer), start, end) if at else ():
                    pairs += [(len(where), position) for position in at]
                    where.append((index, first + token - 1))
    return (*np.array(where, np.int64).reshape(-1, 2).T, *np.array(pairs, np.int64).reshape(-1, 2).T)


def tokens_within(spans, length: int, start: int, end: int):
    """Of an answer's tokens, the end of its `length` characters included, those that lie in part between the two."""
    for token, (begins, ends) in enumerate((*spans, (length, length + 1))):
        if begins < end and ends > start and begins < ends:
            yield token


def asked_aims(rows) -> tuple[np.ndarray, ...]:
    """As `aims`: every token of an answer looks at the noun that it is about, of two at the second."""
    where, at = [], []
    for index, row in enumerate(rows):
        for question, first, spans, noun in row.told:
            if noun is not None and question.kind.split()[0] not in ABOUT_ALL:
                where += [(index, first + token - 1) for token in range(len(spans) + 1)]
                at += [noun] * (len(spans) + 1)
    return (*np.array(where, np.int64).reshape(-1, 2).T, np.arange(len(at)), np.array(at, np.int64))


def looked_at(row, picture: int, centre_px, gh: int, gw: int) -> set[int]:
    """Positions in its row of the visual tokens at that place, or of the token before the first picture."""
    if centre_px is None:
        return {row.visual[0] - 1}
    return {row.visual[picture * gh * gw + token] for token in tokens_near(*centre_px, gh, gw)}


def noun_aims(rows, pictures, gh: int, gw: int) -> tuple[np.ndarray, ...]:
    """Row, token [M] of each noun; noun, end (0: the first picture, 1: the last) of each thing meant there [K], and up
    to four positions in its row [K, 4] where it may be, the rest -1; place [M] of the token before the picture."""
    mentioned = (
        (index, row, scenes, token, named)
        for index, (row, scenes) in enumerate(zip(rows, pictures, strict=True))
        for token, *named in row.mentions
    )
    return equal_shares(mentioned, gh, gw)


def kind_aims(rows, pictures, gh: int, gw: int) -> tuple[np.ndarray, ...]:
    """As `noun_aims`: where a description says the next kind and its number it looks at all that are of it."""
    described = (
        (index, row, scenes, first + token - 1, named)
        for index, (row, scenes) in enumerate(zip(rows, pictures, strict=True))
        for question, first, spans, _ in row.told
        if question.kind == "describe"
        for start, end, named in kinds_said(question.answer)
        for token in tokens_within(spans, len(question.answer), start, end)
    )
    return equal_shares(described, gh, gw)


def kinds_said(description: str):
    """(start, end, what is named there) of each kind in turn; after the last one nothing is."""
    start = 0
    for mention in MENTION.finditer(description):
        yield start, mention.end(), mention.groups()
        start = mention.end()
    yield start, start + 1, None


def equal_shares(asking, gh: int, gw: int) -> tuple[np.ndarray, ...]:
    """What `noun_aims` describes, of (row's index, row, scenes, token, size with colour and noun) each; None for
    nothing."""
    where, found, before = [], [], []
    for index, row, scenes, token, named in asking:
        for end, picture in enumerate((0, len(scenes) - 1)):
            for _, centre_px in meant(scenes[picture : picture + 1], *named) if named else ():
                at = sorted(looked_at(row, picture, centre_px, gh, gw))
                found.append((len(where), end, *at, *[-1] * (4 - len(at))))
        where.append((index, token))
        before.append(row.visual[0] - 1)
    table = np.array(found, np.int64).reshape(-1, 6)
    things = (table[:, 0], table[:, 1], table[:, 2:])
    return (*np.array(where, np.int64).reshape(-1, 2).T, *things, np.array(before, np.int64))


def targets(question, scenes):
    """(start, end, [(picture, centre in pixels), ...]) for each part of the answer that is to be looked up."""
    found = list(characters(question, scenes[0])) if len(scenes) == 1 else []
    if question.kind in NAMING_KINDS:
        found += named(question, scenes)
    elif question.kind in CHANGE_ONLY:
        found.append((0, len(question.answer), changed(scenes) or [NOTHING]))
    elif question.kind == "text color":
        found.append((0, len(question.answer), [(0, at) for text in scenes[0].texts for at in text.centres_px()]))
    elif question.kind in ABOUT_ONE:
        mention = MENTION.search(question.text)
        things = mention and meant(scenes, *mention.groups())
        if things and all(scene.count(mention[2], shape_of(mention[3])) <= 1 for scene in scenes):
            if question.kind == "clip color":  # at the end, or at the start
                things = things[-1:] if "end" in question.text else things[:1]
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


def changed(scenes):
    """Where the last picture shows what has changed since the first: where a thing is now, or where it was."""
    first, last = scenes[0].objects, scenes[-1].objects
    things = [thing for thing in last if thing not in first] or [thing for thing in first if thing not in last]
    return [(len(scenes) - 1, thing.centre_px) for thing in things]


def named(question, scenes):
    """Each name in the answer, with what leads to it. In a list, the i-th is the i-th thing in its order; in a
    description it is the leftmost of the i-th kind."""
    if question.answer.lower().startswith("nothing"):
        yield 0, len(question.answer), [NOTHING]
        return
    pattern = JSON_MENTION if question.kind.endswith("json") else MENTION
    listed = in_order(question.kind, scenes[0].objects) if question.kind.startswith("list") else None
    if question.kind == "describe":
        listed = leftmost_of_kinds(scenes[0])
    start = 0
    for index, mention in enumerate(pattern.finditer(question.answer)):
        things = [(0, listed[index].centre_px)] if listed else meant(scenes, *mention.groups())
        if question.kind in CHANGE_KINDS:
            things += changed(scenes)
        yield start, mention.end(), things
        start = mention.end()
    if question.kind in CHANGE_KINDS:
        yield start, len(question.answer), changed(scenes)
    elif listed:
        yield start, start + 1, [NOTHING]


def characters(question, scene):
    """Each character of the words that the answer spells."""
    spelled = " ".join(words_in_order(scene))
    if not spelled or spelled not in question.answer or question.kind == "text color":
        return
    start = question.answer.rindex(spelled)
    for text in sorted(scene.texts, key=lambda text: text.y_px):
        for place, at in enumerate(text.centres_px()):
            yield start + place - (place == 0), start + place + 1, [(0, at)]
        start += len(text.text) + 1
    yield start - 1, start, [NOTHING]

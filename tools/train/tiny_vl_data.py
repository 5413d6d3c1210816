"""Batches for tiny-vl: drawn scenes, their questions as packed token sequences, and dense targets.

One sequence holds a picture once and many questions about it. Each question is a segment that sees the picture and
itself only, at the positions it would have alone, so that one encoded picture teaches many single-turn answers.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tiny_vl_aims import MENTION, NOUNS, aims, asked_aims, kind_aims, noun_aims
from tiny_vl_changes import Story, events_of, shifts_of, stood_there
from tiny_vl_model import SPECIAL_IDS
from tiny_vl_orders import ask_order
from tiny_vl_targets import COLOUR_ID, MOST_MENTIONED, SHAPE_ID, stack_targets
from tokenizers import Tokenizer

from triptych.testing.scene_clips import clip_questions, draw_clip, frames_array
from triptych.testing.scene_pairs import draw_pair, pair_questions
from triptych.testing.scene_questions import ASKERS, questions
from triptych.testing.scene_words import ANY_SHAPE
from triptych.testing.scenes import draw_scene, random_size_px

START, END = SPECIAL_IDS["<|im_start|>"], SPECIAL_IDS["<|im_end|>"]
VISION_START, VISION_END = SPECIAL_IDS["<|vision_start|>"], SPECIAL_IDS["<|vision_end|>"]
IMAGE_PAD, VIDEO_PAD = SPECIAL_IDS["<|image_pad|>"], SPECIAL_IDS["<|video_pad|>"]
SYSTEM = "You are a helpful assistant."


@dataclass
class Batch:
    """Arrays of one training step; every picture has the same size, every sequence the same number of visual tokens."""

    kind: str
    frames: np.ndarray  # [B*n, F, H, W, 3] uint8
    ids: np.ndarray  # [B, L]
    positions: np.ndarray  # [3, B, L]
    segments: np.ndarray  # [B, L] 0 is shared, -1 is padding
    weights: np.ndarray  # [B, L] loss weight of predicting this token from the one before
    targets: tuple[np.ndarray, ...]
    asked: list[tuple[str, int, int, int]] = field(default_factory=list)  # kind, row, first and last+1 answer token
    mentions: tuple[np.ndarray, ...] = ()  # row, token; how many; colour, shape [M], place and size [M, 3] if one is
    between: tuple[np.ndarray, ...] = ()  # row, token of the second of two nouns; how its thing differs [P, 3]
    aims: tuple[np.ndarray, ...] = ()  # row, token [M]; aim, position in the row [K] of what it may look at
    asked_aims: tuple[np.ndarray, ...] = ()  # as `aims`: an answer and the noun it is about
    kind_aims: tuple[np.ndarray, ...] = ()  # as `noun_aims`: where a description says how many there are of a kind
    noun_aims: tuple[np.ndarray, ...] = ()  # row, token [M]; noun, end [K], positions [K, 4] of what it means; sink [M]
    events: np.ndarray | None = None  # [B, n-1, G] what happened there since the row's first picture
    stood: tuple[np.ndarray, ...] = ()  # row, later picture, token; colour, shape [C] of what stood there at first
    shifts: tuple[np.ndarray, ...] = ()  # row, later picture, token [S]; how far what is there has moved [S, 2]
    two_mentions: tuple[np.ndarray, ...] = ()  # row, token; how many are meant in the first scene [M], in the last [M]


class Words:
    """The tokenizer, with what it said before remembered."""

    def __init__(self, folder: Path):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.ids = functools.lru_cache(200_000)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        )
        self.user = (START, *self.ids("user\n"))
        self.answer = (END, *self.ids("\n"), START, *self.ids("assistant\n"))
        self.again = (*self.ids("\n"), START, *self.ids("user\n"))
        self.system = (START, *self.ids("system\n" + SYSTEM), END, *self.ids("\n"))

        @functools.lru_cache(200_000)
        def mentions(text: str) -> list[tuple[int, tuple[str | None, ...]]]:
            """The last token of each noun that means things in the picture, with its size, colour and shape."""
            ends = [end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets]
            return [
                (next(i for i, end in enumerate(ends) if end >= found.end()), found.groups())
                for found in MENTION.finditer(text)
            ]

        self.mentions = mentions
        self.spans = functools.lru_cache(200_000)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).offsets)
        )


class Sequence:
    """Builds one row: tokens, three-axis positions, segments, loss weights."""

    def __init__(self):
        self.ids, self.positions, self.segments, self.weights = [], [], [], []
        self.next_position, self.segment = 0, 0
        self.asked, self.mentions, self.told, self.visual = [], [], [], []

    def text(self, ids, weight: float = 0.0) -> None:
        for token in ids:
            self.ids.append(token)
            self.positions.append((self.next_position,) * 3)
            self.segments.append(self.segment)
            self.weights.append(weight)
            self.next_position += 1

    def vision(self, num_steps: int, gh: int, gw: int, interval: int, pad_id: int) -> None:
        self.text((VISION_START,))
        at = self.next_position
        for step in range(num_steps):
            for row in range(gh):
                for column in range(gw):
                    self.positions.append((at + step * interval, at + row, at + column))
        count = num_steps * gh * gw
        self.visual += range(len(self.ids), len(self.ids) + count)
        self.ids += [pad_id] * count
        self.segments += [self.segment] * count
        self.weights += [0.0] * count
        self.next_position = at + max(gh, gw)
        self.text((VISION_END,))

    def mention(self, words: Words, text: str, start: int) -> None:
        self.mentions += [(start + token, *named) for token, named in words.mentions(text)]

    def exchange(self, words: Words, question, before: tuple[int, ...] = ()) -> None:
        answer = (*words.ids(question.answer), END)
        start = len(self.ids) + len(before)
        self.mention(words, question.text, start)
        nouns = [start + token for token, _ in words.mentions(question.text)]
        self.text((*before, *words.ids(question.text), *words.answer))
        self.asked.append((question.kind, len(self.ids), len(self.ids) + len(answer)))
        self.told.append((question, len(self.ids), words.spans(question.answer), nouns[-1] if nouns else None))
        self.mention(words, question.answer, len(self.ids))
        self.text(answer, len(answer) ** -0.5)


def question_tokens(words: Words, question) -> int:
    return len(words.ids(question.text)) + len(words.ids(question.answer)) + 12


def build(words: Words, rng: random.Random, asked, visions, budget_tokens: int) -> Sequence:
    """A row: pictures first then independent questions, or one conversation of several turns."""
    row = Sequence()
    if rng.random() < 0.08:
        row.text(words.system)
    row.text(words.user)
    conversation = rng.random() < 0.25 and bool(asked)
    if conversation and len(visions) == 1 and rng.random() < 0.5:  # the question stands before the picture
        first, *asked = asked
        row.text(words.ids(first.text))
        row.vision(*visions[0])
        row.exchange(words, type(first)(first.kind, "", first.answer))
    else:
        for vision in visions:
            row.vision(*vision)
        if conversation:
            first, *asked = asked
            row.exchange(words, first)
    start, shared_position = len(row.ids), row.next_position
    for question in asked:
        if len(row.ids) - start + question_tokens(words, question) > budget_tokens:
            continue
        if conversation:
            row.exchange(words, question, words.again)
        else:
            row.segment, row.next_position = row.segment + 1, shared_position
            row.exchange(words, question)
    return row


def ground(rows: list[Sequence], scenes) -> tuple[np.ndarray, ...]:
    """What each mention means in its row's scene: how many; colour, shape, place and size where it is one."""
    found: list[tuple] = []
    for index, (row, scene) in enumerate(zip(rows, scenes, strict=True)):
        for token, size, colour, noun in row.mentions:
            shape = NOUNS[noun]
            meant = scene.matching(colour, None if shape in ANY_SHAPE else shape, size)
            one = meant[0] if len(meant) == 1 else None
            short_px = min(scene.width_px, scene.height_px)
            place = (-1.0, -1.0, -1.0)
            if one:
                place = (one.x_px / scene.width_px, one.y_px / scene.height_px, 4 * one.radius_px / short_px)
            ids = (COLOUR_ID[one.colour], SHAPE_ID[one.shape] - 1) if one else (-100, -100)
            found.append((index, token, min(len(meant), MOST_MENTIONED), *ids, *place))
    table = np.array(found, np.float64).reshape(-1, 8)
    return (*(table[:, column].astype(np.int64) for column in range(5)), table[:, 5:].astype(np.float32))


def ground_between(rows: list[Sequence], scenes) -> tuple[np.ndarray, ...]:
    """Of two nouns of one sentence that mean one thing each: row and token of the second; how much further right, down
    and (log2, halved) how much bigger its thing is [P, 3]."""
    found = []
    for index, (row, scene) in enumerate(zip(rows, scenes, strict=True)):
        before = None
        for token, size, colour, noun in row.mentions:
            meant = scene.matching(colour, None if NOUNS[noun] in ANY_SHAPE else NOUNS[noun], size)
            one = (token, meant[0]) if len(meant) == 1 else None
            if one and before and token - before[0] < 12 and row.segments[token] == row.segments[before[0]]:
                a, b = before[1], meant[0]
                shift = (b.x_px - a.x_px) / scene.width_px, (b.y_px - a.y_px) / scene.height_px
                found.append((index, token, *shift, math.log2(b.radius_px / a.radius_px) / 2))
            before = one
    table = np.array(found, np.float64).reshape(-1, 5)
    return (*table[:, :2].astype(np.int64).T, table[:, 2:].astype(np.float32))


def ground_in_two(rows: list[Sequence], ends) -> tuple[np.ndarray, ...]:
    """How many things each mention means in its row's first scene and in its last."""
    found = [
        (
            index,
            token,
            *(
                min(scene.count(colour, None if (shape := NOUNS[noun]) in ANY_SHAPE else shape), MOST_MENTIONED)
                for scene in scenes
            ),
        )
        for index, (row, scenes) in enumerate(zip(rows, ends, strict=True))
        for token, _, colour, noun in row.mentions
    ]
    return tuple(np.array(found, np.int64).reshape(-1, 4).T)


def stack(kind: str, rows: list[Sequence], frames, pictures, stories: list[Story] | None = None) -> Batch:
    """`pictures`: the scenes of each row. `stories`: of rows with several, what happened to what."""
    longest = -(-max(len(row.ids) for row in rows) // 8) * 8
    ids = np.zeros((len(rows), longest), np.int64)
    positions = np.zeros((3, len(rows), longest), np.int64)
    segments = np.full((len(rows), longest), -1, np.int32)
    weights = np.zeros((len(rows), longest), np.float32)
    asked = []
    for index, row in enumerate(rows):
        size = len(row.ids)
        ids[index, :size], segments[index, :size], weights[index, :size] = row.ids, row.segments, row.weights
        positions[:, index, :size] = np.asarray(row.positions).T
        asked += [(name, index, first, last) for name, first, last in row.asked]
    targets = stack_targets([scene for scenes in pictures for scene in scenes])
    gh, gw = frames.shape[2] // 28, frames.shape[3] // 28
    batch = Batch(kind, frames, ids, positions, segments, weights, targets, asked)
    batch.aims, batch.noun_aims = aims(rows, pictures, gh, gw), noun_aims(rows, pictures, gh, gw)
    batch.asked_aims, batch.kind_aims = asked_aims(rows), kind_aims(rows, pictures, gh, gw)
    if stories is None:
        batch.mentions = ground(rows, [scenes[0] for scenes in pictures])
        batch.between = ground_between(rows, [scenes[0] for scenes in pictures])
    else:
        batch.two_mentions = ground_in_two(rows, [story.ends for story in stories])
        batch.events = events_of(stories, *targets[:2], targets[4])
        batch.stood = stood_there(batch.events, *targets[:2])
        batch.shifts = shifts_of(stories, pictures, gh, gw)
    return batch


def still_batch(
    words,
    rng,
    gh: int,
    gw: int,
    num_rows: int,
    budget_tokens: int,
    faces=None,
    kinds=None,
    num_words=(0, 0, 0, 1, 1, 2),
) -> Batch:
    rows, scenes = [], []
    for _ in range(num_rows):
        num_objects = rng.choice(CROWDED) if kinds is ALL else None
        scene = draw_scene(rng, (gw * 28, gh * 28), num_objects, rng.choice(num_words), faces=faces)
        asked = questions(scene, rng, budget_tokens // (11 if kinds else 16), kinds)
        if kinds is ALL and rng.random() < 0.5:
            asked[:0] = [question for _ in range(3) if (question := ask_order(scene, rng))][:1]
        if kinds is ALL and rng.random() < 0.5:
            listed = questions(scene, rng, 6, ("list",))
            asked[:0] = [question for question in listed if question.kind == "describe"][:1]
        scenes.append(scene)
        rows.append(build(words, rng, asked, [(1, gh, gw, 1, IMAGE_PAD)], budget_tokens))
    frames = np.stack([np.asarray(scene.image) for scene in scenes])[:, None]
    return stack("still", rows, frames, [[scene] for scene in scenes])


def pair_batch(words, rng, gh: int, gw: int, num_rows: int, budget_tokens: int, faces=None) -> Batch:
    rows, pictures, stories = [], [], []
    for _ in range(num_rows):
        first, second, change = draw_pair(rng, (gw * 28, gh * 28), faces)
        asked = pair_questions(first, second, change, rng, budget_tokens // 20)
        pictures.append([first, second])
        stories.append(Story((first, second), change[0] if change else "other"))
        rows.append(build(words, rng, asked, [(1, gh, gw, 1, IMAGE_PAD)] * 2, budget_tokens))
    frames = np.stack([np.asarray(scene.image) for scenes in pictures for scene in scenes])[:, None]
    return stack("pair", rows, frames, pictures, stories)


def clip_batch(words, rng, gh: int, gw: int, num_rows: int, budget_tokens: int, num_frames: int) -> Batch:
    rows, pictures, frames, stories = [], [], [], []
    for _ in range(num_rows):
        clip = draw_clip(rng, (gw * 28, gh * 28), num_frames)
        asked = clip_questions(clip, rng, budget_tokens // 20)
        pictures.append(clip.scenes[1::2])
        stories.append(Story((clip.scenes[0], clip.scenes[-1]), clip.event))
        frames.append(frames_array(clip).reshape(num_frames // 2, 2, gh * 28, gw * 28, 3))
        vision = (num_frames // 2, gh, gw, rng.choice((1, 2, 2, 2, 4)), VIDEO_PAD)
        rows.append(build(words, rng, asked, [vision], budget_tokens))
    return stack("clip", rows, np.concatenate(frames), pictures, stories)


FIRST = ("list",) * 4 + ("count", "color", "shape", "exists", "place", "text", "background")
PLAIN = ("count", "total", "color", "shape", "exists", "place", "background", "size", "list")
WEAK = {  # kinds asked oftener than their weight says, and how many times more
    **dict.fromkeys(("relation", "place", "count", "total", "size", "text color"), 1),
    **dict.fromkeys(("neighbour", "extreme", "biggest"), 2),
    **dict.fromkeys(("text", "bigger", "count size", "list"), 3),
}
ALL = (*ASKERS, *(name for name, times in WEAK.items() for _ in range(times)))
WRITTEN = (0, 0, 1, 1, 1, 2)
CROWDED = (None,) * 8 + (5, 6, 7, 8)  # objects: more of the many than are asked about
SMALL = ((3, 3), (3, 4), (4, 3), (4, 4), (4, 4), (4, 5), (5, 4))
LARGEST = (18, 18, 24, 32)  # tokens to a side of a large picture, at most


def next_batch(words, rng: random.Random, step: int, faces=None) -> Batch:
    """The curriculum: small pictures and lists, plain questions, everything, then more of the large and the long, then
    sizes as they are asked about, few clips and pairs."""
    if step < 900:
        gh, gw = rng.choice(SMALL)
        if step < 600:
            return still_batch(words, rng, gh, gw, 40, 72, faces, FIRST)
        return still_batch(words, rng, gh, gw, 30, 140, faces, PLAIN, (0, 0, 0, 0, 0, 1))
    if step >= 11_800 and rng.random() < 0.4:
        return sized_batch(words, rng, faces)
    draw = rng.random()
    if draw < 0.17:
        gh, gw = rng.choice(SMALL)
        num_frames = rng.choice((4, 4, 6, 8))
        return clip_batch(words, rng, gh, gw, max(8, 1200 // (gh * gw * num_frames)), 100, num_frames)
    if draw < 0.28:
        gh, gw = rng.choice(SMALL)
        return pair_batch(words, rng, gh, gw, 220 // (gh * gw), 100, faces)
    if step >= 1500 and draw < 0.4:
        gh, gw = rng.choice(((9, 14), (9, 14), (12, 30)))
        gh, gw = rng.randint(9, gh), rng.randint(9, gw)
        gh, gw = rng.sample((gh, gw), 2)
        return still_batch(words, rng, gh, gw, max(1, 400 // (gh * gw)), 240, faces, ALL, WRITTEN)
    longest = rng.choice((3, 4, 4, 5, 6) if step < 1500 else (4, 4, 5, 6, 8, 10))
    gh, gw = rng.randint(2 if longest > 4 else 3, longest), rng.randint(2 if longest > 4 else 3, longest)
    num_rows, budget_tokens = min(24, max(4, 340 // (gh * gw))), 110 if gh * gw < 40 else 160
    return still_batch(words, rng, gh, gw, num_rows, budget_tokens, faces, ALL, WRITTEN)


def sized_batch(words, rng: random.Random, faces=None) -> Batch:
    """Pictures of any size that is asked about, nine in twenty of large ones; many questions about each."""
    if rng.random() < 0.45:
        longest = rng.choice(LARGEST)
        gh, gw = rng.randint(12, longest), rng.randint(12, longest)
        return still_batch(words, rng, gh, gw, max(1, 450 // (gh * gw)), 320, faces, ALL, WRITTEN)
    width_px, height_px = random_size_px(rng)
    gh, gw = height_px // 28, width_px // 28
    num_rows, budget_tokens = min(20, max(4, 360 // (gh * gw))), 120 if gh * gw < 30 else 260
    return still_batch(words, rng, gh, gw, num_rows, budget_tokens, faces, ALL, WRITTEN)


def held_out(words, seed: int = 10_000_019) -> list[Batch]:
    """The sample that training is watched by: never drawn in training, whose seeds are smaller."""
    rng = random.Random(seed)
    return [
        still_batch(words, rng, 4, 4, 48, 100),
        still_batch(words, rng, 4, 6, 24, 100),
        still_batch(words, rng, 8, 7, 12, 140),
        pair_batch(words, rng, 4, 4, 16, 80),
        clip_batch(words, rng, 4, 4, 16, 80, 6),
    ]

"""Dense targets of a drawn scene: per merged visual token, what has its centre in which part of it."""

from __future__ import annotations

import string

import numpy as np
from tokenizers import Tokenizer

from triptych.testing.scene_paint import COLOURS, SHAPES
from triptych.testing.scene_words import left_to_right, leftmost_of_kinds, plural
from triptych.testing.scenes import BACKGROUNDS

CHARS = string.ascii_uppercase + string.digits
SHAPE_ID = {name: index + 1 for index, name in enumerate(SHAPES)}
COLOUR_ID = {name: index for index, name in enumerate(COLOURS)}
CHAR_ID = {char: index + 1 for index, char in enumerate(CHARS)}
NUM_SHAPES, NUM_COLOURS, NUM_CHARS = len(SHAPES) + 1, len(COLOURS), len(CHARS) + 1
TOKEN_PX = 28
NEAR_PX = 3  # a centre that close to a token's edge may as well be looked for beyond it
MOST_MENTIONED = 8  # things that one noun means, at most: more count as this many
MOST_CHARS = 6  # of a word: where a character stands in it, up to this
MOST_RANKED = 8  # things in their order from the left
NUM_EXTREMES = 6  # leftmost, rightmost, topmost, lowest, biggest, smallest


def dense_targets(scene) -> tuple[np.ndarray, ...]:
    """Shape and colour [G, 4] by 14-pixel patch, character [G, 8] by 7 by 14 pixels, background [G]; box [G, 4, 4]:
    x and y from the patch's centre in patches, radius in patches and over a quarter of the picture's short side, -9
    where nothing is; order [G, 8]: the how-manieth of its word a character is; rank [G, 4]: the how-manieth from the
    left a thing is; extreme [G, 4, 6]: is it the outermost, biggest, smallest (-1: hard to say)? Then of characters
    colour [G, 8], and the first, second ... [G, 6] of a word, wherever in the token it is. Then of things again: the
    how-manieth kind from the left it is the leftmost of [G, 4]."""
    gh, gw = scene.height_px // TOKEN_PX, scene.width_px // TOKEN_PX
    shape = np.zeros((gh * gw, 4), np.int64)
    colour = np.full((gh * gw, 4), -100, np.int64)
    char = np.zeros((gh * gw, 8), np.int64)
    box = np.full((gh * gw, 4, 4), -9.0, np.float32)
    order = np.full((gh * gw, 8), -100, np.int64)
    rank = np.full((gh * gw, 4), -100, np.int64)
    extreme = np.full((gh * gw, 4, NUM_EXTREMES), -1.0, np.float32)
    written = np.full((gh * gw, 8), -100, np.int64)
    spelled = np.zeros((gh * gw, MOST_CHARS), np.int64)
    kind = np.full((gh * gw, 4), -100, np.int64)
    short_px = min(scene.width_px, scene.height_px)
    in_order = left_to_right(scene.objects)
    for index, (thing, is_extreme) in enumerate(zip(in_order, extremes(in_order, short_px), strict=True)):
        token, part = slot(thing.x_px, thing.y_px, gh, gw, 2)
        rank[token, part], extreme[token, part] = min(index, MOST_RANKED - 1), is_extreme
        x, y = thing.x_px / 14 % 1 - 0.5, thing.y_px / 14 % 1 - 0.5
        box[token, part] = x, y, thing.radius_px / 14, 4 * thing.radius_px / short_px
        shape[token, part], colour[token, part] = SHAPE_ID[thing.shape], COLOUR_ID[thing.colour]
    for index, thing in enumerate(leftmost_of_kinds(scene)):
        token, part = slot(thing.x_px, thing.y_px, gh, gw, 2)
        kind[token, part] = min(index, MOST_RANKED - 1)
    for text in scene.texts:
        for place, (letter, (x_px, y_px)) in enumerate(zip(text.text, text.centres_px(), strict=True)):
            token, part = slot(x_px, y_px, gh, gw, 4)
            char[token, part], order[token, part] = CHAR_ID[letter], min(place, MOST_CHARS - 1)
            written[token, part] = COLOUR_ID[text.colour]
            spelled[token, min(place, MOST_CHARS - 1)] = CHAR_ID[letter]
    background = np.full(gh * gw, BACKGROUNDS.index(scene.background))
    return shape, colour, char, background, box, order, rank, extreme, written, spelled, kind


def extremes(things, short_px: int) -> np.ndarray:
    """[N, 6] 1 for what is furthest that way or biggest or smallest, 0 for the rest, -1 where another is nearly so."""
    if not things:
        return np.zeros((0, NUM_EXTREMES))
    x, y, r = np.array([(thing.x_px, thing.y_px, thing.radius_px) for thing in things]).T
    behind = np.stack([x - x.min(), x.max() - x, y - y.min(), y.max() - y, r.max() - r, r - r.min()])
    margin = np.array([[0.03 * short_px]] * 4 + [[0.1 * r.max()], [0.1 * r.min()]])
    near = behind < margin
    return np.where(near, np.where(near.sum(1, keepdims=True) == 1, 1, -1), 0).T


def stack_targets(scenes) -> tuple[np.ndarray, ...]:
    return tuple(np.stack(part) for part in zip(*(dense_targets(scene) for scene in scenes), strict=True))


def slot(x_px: float, y_px: float, gh: int, gw: int, columns: int) -> tuple[int, int]:
    """The merged token a point lies in, and which of its two rows and `columns` columns."""
    x, y = min(max(x_px, 0), gw * TOKEN_PX - 1), min(max(y_px, 0), gh * TOKEN_PX - 1)
    token = int(y // TOKEN_PX) * gw + int(x // TOKEN_PX)
    return token, int(y % TOKEN_PX // 14) * columns + int(x % TOKEN_PX * columns // TOKEN_PX)


def tokens_near(x_px: float, y_px: float, gh: int, gw: int) -> set[int]:
    """The merged tokens that hold a point or have it at their edge: one, two or four."""
    return {slot(x_px + dx, y_px + dy, gh, gw, 2)[0] for dx in (-NEAR_PX, NEAR_PX) for dy in (-NEAR_PX, NEAR_PX)}


def class_words(tokenizer: Tokenizer) -> np.ndarray:
    """[shapes + colours, 4] the single tokens that mean each, singular and plural, -1 where there are fewer."""
    rows = []
    for name in (*SHAPES, *COLOURS):
        spoken = (name, " " + name, " " + plural(name), plural(name))
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in spoken]
        rows.append([word[0] if len(word) == 1 else -1 for word in ids])
    return np.array(rows)

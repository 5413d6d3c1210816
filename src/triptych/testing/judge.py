"""Measures what a picture of drawn shapes shows: areas of colour, connected pieces, their outlines. No model, no torch.

`look` lists what is there, `is_shown` compares that with a `Prompt`. Made for clean pictures of separate flat shapes on
a flat ground, from 48 pixels up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from PIL import Image

from triptych.testing.prompts import Prompt
from triptych.testing.scene_paint import COLOURS, SHAPES, paint_object
from triptych.testing.scenes import SceneObject

MIN_AREA = 0.006  # of the picture: what is smaller is a speck
SPECK_AREA = 0.0015  # what is smaller still is no fault
MIN_CONTRAST = 60.0  # distance in RGB from the ground at which a pixel is something
MIN_LIKENESS = 0.7  # overlap with the outline of the shape, over the union
_MASK_SIDE = 32


@dataclass(frozen=True, slots=True)
class Thing:
    """One connected piece. Place in pixels; `likeness` is that of its outline to `shape`'s, 0 to 1."""

    colour: str
    shape: str
    x_px: float
    y_px: float
    area: float
    likeness: float


@dataclass(frozen=True, slots=True)
class Sight:
    """What is in a picture."""

    background: str
    things: tuple[Thing, ...]
    num_specks: int = 0

    def count(self, colour: str | None = None, shape: str | None = None) -> int:
        return sum(colour in (None, thing.colour) and shape in (None, thing.shape) for thing in self.things)

    def __str__(self) -> str:
        named = Counter(f"{thing.colour} {thing.shape}" for thing in self.things)
        return ", ".join(f"{num} {name}" for name, num in named.items()) + f" on {self.background}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which parts of a prompt a picture has right."""

    counts: bool  # as many things as asked for
    colours: bool  # and of those colours
    shapes: bool  # and of those shapes, each in its colour
    background: bool
    relation: bool

    @property
    def is_right(self) -> bool:
        return self.counts and self.colours and self.shapes and self.background and self.relation


def is_shown(prompt: Prompt, picture: Image.Image | npt.NDArray[np.uint8]) -> bool:
    return verdict(prompt, look(picture)).is_right


def verdict(prompt: Prompt, sight: Sight) -> Verdict:
    asked = {(group.colour, group.shape): group.count for group in prompt.groups}
    colours: Counter[str] = Counter()
    for group in prompt.groups:
        colours[group.colour] += group.count
    shown = Counter((thing.colour, thing.shape) for thing in sight.things)
    counts = len(sight.things) == prompt.num_objects and not sight.num_specks
    return Verdict(
        counts=counts,
        colours=counts and colours == Counter(thing.colour for thing in sight.things),
        shapes=counts and shown == asked,
        background=sight.background == prompt.background,
        relation=_has_relation(prompt, sight),
    )


def _has_relation(prompt: Prompt, sight: Sight) -> bool:
    """Whether every thing of the first group lies on its side of every thing of the second, by centres."""
    if prompt.relation is None:
        return True
    first, other = (
        [thing for thing in sight.things if (thing.colour, thing.shape) == (group.colour, group.shape)]
        for group in prompt.groups
    )
    axis = "y_px" if prompt.relation in ("above", "below") else "x_px"
    if prompt.relation in ("below", "right of"):
        first, other = other, first
    if not first or not other:
        return False
    return max(getattr(thing, axis) for thing in first) < min(getattr(thing, axis) for thing in other)


def look(picture: Image.Image | npt.NDArray[np.uint8]) -> Sight:
    """[H, W, 3] uint8, or a Pillow image."""
    pixels = np.asarray(picture.convert("RGB") if isinstance(picture, Image.Image) else picture)
    names = _nearest_colour(pixels)
    ground = int(np.bincount(names.ravel(), minlength=len(COLOURS)).argmax())
    ground_rgb = np.median(pixels[names == ground], axis=0)
    something = np.linalg.norm(pixels - ground_rgb, axis=-1) > MIN_CONTRAST
    labels, num = connected_pieces(something)
    things, num_specks = [], 0
    for label in range(num):
        mask = labels == label
        area = float(mask.mean())
        if area >= MIN_AREA:
            things.append(_thing(mask, names, area))
        elif area >= SPECK_AREA:
            num_specks += 1
    return Sight(list(COLOURS)[ground], tuple(things), num_specks)


def _nearest_colour(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """[H, W] index into `COLOURS`, by the distance to the nearest of a name's centres."""
    nearest = [
        np.min([np.linalg.norm(pixels - np.array(centre, np.float32), axis=-1) for centre in centres], axis=0)
        for centres in COLOURS.values()
    ]
    return np.argmin(nearest, axis=0)


def connected_pieces(mask: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], int]:
    """[H, W] label of each set pixel, -1 elsewhere, with pieces joined over sides; and how many there are."""
    height, width = mask.shape
    labels = np.where(mask, np.arange(height * width).reshape(height, width), height * width)
    while True:
        lowest = np.pad(labels, 1, constant_values=height * width)
        around = np.minimum.reduce([lowest[:-2, 1:-1], lowest[2:, 1:-1], lowest[1:-1, :-2], lowest[1:-1, 2:], labels])
        around = np.where(mask, around, height * width)
        flat = np.append(around.ravel(), height * width)
        jumped = np.where(mask, flat[around], height * width)  # a label's own label is as low or lower
        if np.array_equal(jumped, labels):
            break
        labels = jumped
    roots, numbered = np.unique(labels[mask], return_inverse=True)
    out = np.full(mask.shape, -1)
    out[mask] = numbered
    return out, len(roots)


def _thing(mask: npt.NDArray[np.bool_], names: npt.NDArray[np.intp], area: float) -> Thing:
    inside = _eroded(mask)
    colour = int(np.bincount(names[inside if inside.any() else mask], minlength=len(COLOURS)).argmax())
    rows, columns = np.nonzero(mask)
    cut = mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    shape, likeness = _best_shape(cut)
    return Thing(list(COLOURS)[colour], shape, float(columns.mean()), float(rows.mean()), area, likeness)


def _eroded(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    padded = np.pad(mask, 1)
    return padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:] & mask


def _best_shape(cut: npt.NDArray[np.bool_]) -> tuple[str, float]:
    """The shape whose outline overlaps best, in the same box; "blob" where none does, or the box is no shape's."""
    best, likeness = "blob", 0.0
    one = _square(cut)
    for shape in SHAPES:
        outline_aspect, other = _outline(shape)
        if not 0.7 < cut.shape[1] / cut.shape[0] / outline_aspect < 1.45:
            continue
        overlap = float(np.minimum(one, other).sum() / np.maximum(one, other).sum())
        if overlap > likeness:
            best, likeness = shape, overlap
    return (best, likeness) if likeness >= MIN_LIKENESS else ("blob", likeness)


def _square(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    image = Image.fromarray((mask * 255).astype(np.uint8)).resize((_MASK_SIDE, _MASK_SIDE), Image.Resampling.BOX)
    return np.asarray(image) / 255


@cache
def _outline(shape: str) -> tuple[float, npt.NDArray[np.float64]]:
    """Width over height, and the mask of its own box as a square."""
    image = Image.new("RGB", (101, 101))
    paint_object(image, SceneObject(shape, "white", 50, 50, 45, (255, 255, 255)))
    mask = np.asarray(image)[..., 0] > 127
    rows, columns = np.nonzero(mask)
    cut = mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    return cut.shape[1] / cut.shape[0], _square(cut)

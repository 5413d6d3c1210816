"""Where things go, read from the noise: what makes the way from a noise to its picture one and not many.

With noise and picture drawn apart, a noise may become any layout of its prompt, and what a denoiser of three million
parameters is asked at the beginning is the mean of all. Here the noise of a training pair decides. The picture is
parted into cells, about as many as things are asked for; two fields are means over half of the noise's channels each.
The first group takes the cells where the first field is highest on average, the second group those of the second
field, and where in its cell a thing stands is how the field rises there. All of that is sums of noise and a few
comparisons. Any noise has its layout, so noise stays noise, and drawing is as ever.

Couplings of noise and data that are not independent: Pooladian and others, "Multisample Flow Matching", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from triptych.testing.prompts import Prompt, largest_radius_px
from triptych.testing.scene_paint import colour_rgb
from triptych.testing.scenes import Scene, SceneObject, paint

NUM_FIELDS = 2
TOKEN_PX = 8
SPARE_CELLS = 2  # at most: where many stay empty, the last chosen and the first left out are close
_BEFORE = {"above": (1, 0), "below": (1, 1), "left of": (0, 0), "right of": (0, 1)}  # axis, group that comes first

Floats = npt.NDArray[np.float64]


def fields_of(noise: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] to [B, F, h, w]: means over neighbouring channels, deviation 1 for noise of deviation 1."""
    grouped = noise.unflatten(1, (NUM_FIELDS, -1))
    return grouped.mean(2) * grouped.shape[2] ** 0.5


def noise_with(fields: torch.Tensor, channels: int) -> torch.Tensor:
    """[B, F, h, w] to new noise [B, C, h, w] that has those fields; all else in it is drawn."""
    num, _, height, width = fields.shape
    grouped = torch.randn(num, NUM_FIELDS, channels // NUM_FIELDS, height, width)
    grouped += (fields / grouped.shape[2] ** 0.5 - grouped.mean(2))[:, :, None]
    return grouped.flatten(1, 2)


def draw_fields(seed: int, size_px: tuple[int, int]) -> Floats:
    """[F, h, w] of a normal distribution."""
    return np.random.default_rng(seed).standard_normal((NUM_FIELDS, size_px[1] // TOKEN_PX, size_px[0] // TOKEN_PX))


def lay_out_by(fields: Floats, prompt: Prompt) -> Scene:
    """A painted scene of the fields' size, [F, h, w] in tokens."""
    size_px = (fields.shape[2] * TOKEN_PX, fields.shape[1] * TOKEN_PX)
    grid = choose_grid(prompt, size_px)
    radius_px = min(_wanted_radius_px(prompt, size_px), _radius_in(min(grid.cell_px(size_px))))
    taken: set[tuple[int, int]] = set()
    objects = []
    for index, group in enumerate(prompt.groups):
        views = {cell: _View.of(fields[index], cell, grid) for cell in grid.cells_of(index) if cell not in taken}
        chosen = sorted(views, key=lambda cell: views[cell].level, reverse=True)[: group.count]
        taken.update(chosen)
        for cell in chosen:
            place = (
                side_px * (number + 0.5) + _between(slope) * max(0.0, 0.5 * side_px - _room_px(radius_px))
                for number, side_px, slope in zip(cell, grid.cell_px(size_px), views[cell].slopes, strict=True)
            )
            objects.append(SceneObject(group.shape, group.colour, *place, radius_px, colour_rgb(group.colour)))
    rgb = (255, 255, 255) if prompt.background == "white" else colour_rgb(prompt.background)
    return paint(Scene(*size_px, prompt.background, tuple(objects), background_rgb=rgb))


@dataclass(frozen=True, slots=True)
class Grid:
    """So many columns and rows of cells; with `cut`, the group that comes first has those before it along `axis`."""

    counts: tuple[int, int]
    axis: int = 0
    cut: int | None = None
    earlier: int = 0

    def cells_of(self, group: int) -> list[tuple[int, int]]:
        """(column, row) of the cells in which that group may stand."""
        cells = [(column, row) for row in range(self.counts[1]) for column in range(self.counts[0])]
        if self.cut is None:
            return cells
        return [cell for cell in cells if (cell[self.axis] < self.cut) == (group == self.earlier)]

    def cell_px(self, size_px: tuple[int, int]) -> tuple[float, float]:
        return size_px[0] / self.counts[0], size_px[1] / self.counts[1]


def choose_grid(prompt: Prompt, size_px: tuple[int, int]) -> Grid:
    """The one with the most room for a thing, as far as that is of use, and then with the most cells."""
    if prompt.num_objects == 1:
        return Grid((1, 1))
    enough_px = 2 * _room_px(_wanted_radius_px(prompt, size_px))

    def worth(grid: Grid) -> tuple[float, int]:
        return min(*grid.cell_px(size_px), enough_px), grid.counts[0] * grid.counts[1]

    return max(_grids(prompt), key=worth)


def _grids(prompt: Prompt) -> Iterator[Grid]:
    """All with room for the prompt and few cells to spare."""
    most = prompt.num_objects + SPARE_CELLS
    for columns in range(1, most + 1):
        for rows in range(1, most // columns + 1):
            if prompt.relation is None:
                if columns * rows >= prompt.num_objects:
                    yield Grid((columns, rows))
                continue
            axis, earlier = _BEFORE[prompt.relation]
            for cut in range(1, (columns, rows)[axis]):
                grid = Grid((columns, rows), axis, cut, earlier)
                if all(len(grid.cells_of(index)) >= group.count for index, group in enumerate(prompt.groups)):
                    yield grid


@dataclass(frozen=True, slots=True)
class _View:
    """What a field is like in a cell: its level there, and how it rises across and down; each of deviation 1."""

    level: float
    slopes: tuple[float, float]

    @classmethod
    def of(cls, field: Floats, cell: tuple[int, int], grid: Grid) -> _View:
        height, width = field.shape
        across, rise_across = _weights(width, cell[0], grid.counts[0])
        down, rise_down = _weights(height, cell[1], grid.counts[1])
        return cls(_normal(field, across, down), (_normal(field, rise_across, down), _normal(field, across, rise_down)))


def _weights(num: int, number: int, count: int) -> tuple[Floats, Floats]:
    """Share of each of `num` tokens that lies in that one of `count` cells, and that times its way from the middle."""
    edges = num * number / count, num * (number + 1) / count
    tokens = np.arange(num)
    shares = np.clip(np.minimum(tokens + 1, edges[1]) - np.maximum(tokens, edges[0]), 0, 1)
    return shares, shares * (tokens + 0.5 - sum(edges) / 2)


def _normal(field: Floats, across: Floats, down: Floats) -> float:
    return float(down @ field @ across / (np.linalg.norm(down) * np.linalg.norm(across)))


def _between(normal: float) -> float:
    """A normal variable to one that lies evenly between -1 and 1."""
    return math.erf(normal / math.sqrt(2))


def _wanted_radius_px(prompt: Prompt, size_px: tuple[int, int]) -> float:
    return 0.95 * largest_radius_px(prompt.num_objects, size_px)


def _room_px(radius_px: float) -> float:
    """From a thing's centre to the edge of its cell."""
    return 1.12 * radius_px + 1


def _radius_in(cell_px: float) -> float:
    return (0.5 * cell_px - 1) / 1.12

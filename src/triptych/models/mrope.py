"""Multi-axis rotary positions (time, height, width) of the Qwen-VL kinds, in numpy, as in the stock `get_rope_index`.

Text advances all three axes by one a token. A picture's tokens share one start and spread over its grid; the text after
it goes on from the start plus the longer side of the grid. M-RoPE: Wang et al. 2024, arXiv:2409.12191.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class GridRun:
    """Prompt tokens [start, start + t * h * w) of one grid, already merged. `interval`: time positions a step."""

    start: int
    grid: tuple[int, int, int]
    interval: float = 1.0


@lru_cache(64)
def grid_positions(grid: tuple[int, int, int], interval: float) -> npt.NDArray[np.int32]:
    """[3, t * h * w] relative to a run's first position; not to be written to."""
    t, h, w = grid
    time = (np.arange(t, dtype=np.float32) * np.float32(interval)).astype(np.int32)
    axes = np.meshgrid(time, np.arange(h, dtype=np.int32), np.arange(w, dtype=np.int32), indexing="ij")
    positions = np.stack([axis.reshape(-1) for axis in axes])
    positions.flags.writeable = False
    return positions


def rope_positions(num_tokens: int, runs: Sequence[GridRun]) -> tuple[npt.NDArray[np.int32], int]:
    """Positions [3, T] of a prompt, and what to add to a generated token's index to get its position."""
    positions = np.empty((3, num_tokens), dtype=np.int32)
    index = position = 0
    for run in runs:
        text = run.start - index
        positions[:, index : run.start] = np.arange(position, position + text, dtype=np.int32)
        position += text
        t, h, w = run.grid
        index = run.start + t * h * w
        positions[:, run.start : index] = grid_positions(run.grid, run.interval) + position
        position += max(h, w)
    positions[:, index:] = np.arange(position, position + num_tokens - index, dtype=np.int32)
    highest = int(positions.max()) if num_tokens else -1
    return positions, highest + 1 - num_tokens

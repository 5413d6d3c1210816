"""TeaCache's polynomial: from how much the first block's modulated input changes to how much the blocks' output does.

Both changes are relative L1 from one step to the next, of every branch by itself, over pictures drawn without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from triptych.core.errors import InvalidRequest
from triptych.generate.branch_cache import TeaBranch, relative_l1
from triptych.generate.cache_setting import TEACACHE, CacheSetting
from triptych.generate.evaluate import draw_one
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Row
from triptych.generate.request import GenerateRequest

DEGREE = 4


class TeaFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`coefficients`, highest power first; `r_squared` of the fit over `num_points` step changes."""

    coefficients: tuple[float, ...]
    r_squared: float
    num_points: int


class _Recorder(TeaBranch):
    """Never skips; notes (change of the input, change of the output) of each step."""

    def __init__(self, timesteps: list[float]) -> None:
        super().__init__(CacheSetting(cache=TEACACHE, threshold=0.0, coefficients=(1.0, 0.0)), timesteps)
        self.points: list[tuple[float, float]] = []
        self._out: torch.Tensor | None = None
        self._next_out: torch.Tensor | None = None

    def decide(self, signal: torch.Tensor) -> bool:
        super().decide(signal)
        return False

    def keep(self, out: torch.Tensor, base: torch.Tensor) -> None:
        super().keep(out, base)
        self._next_out = out

    def settle(self) -> None:
        signals, outs = (self._next_signal, self._signal), (self._next_out, self._out)
        if signals[0] is not None and signals[1] is not None and outs[0] is not None and outs[1] is not None:
            self.points.append((relative_l1(signals[0], signals[1]), relative_l1(outs[0], outs[1])))
        self._out = self._next_out
        super().settle()


def fit_teacache(kind: Kind, requests: Sequence[GenerateRequest]) -> TeaFit:
    """Draws every request once. Raises InvalidRequest where there are too few steps to fit."""
    points: list[tuple[float, float]] = []
    for request in requests:
        recorders: list[_Recorder] = []

        def make(row: Row, recorders: list[_Recorder] = recorders) -> tuple[_Recorder, ...]:
            recorders += [_Recorder([float(timestep) for timestep in row.timesteps]) for _ in row.branches]
            return tuple(recorders)

        draw_one(kind, request, make)
        points += [point for recorder in recorders for point in recorder.points]
    return fit_points(points)


def fit_points(points: Sequence[tuple[float, float]]) -> TeaFit:
    """Least squares of degree 4."""
    if len(points) < 2 * (DEGREE + 1):
        raise InvalidRequest(f"{len(points)} step changes are too few to fit a polynomial of degree {DEGREE}")
    changes, outs = np.array(points, np.float64).T
    fitted = np.polynomial.Polynomial.fit(changes, outs, DEGREE)  # on a scaled axis: well conditioned
    unexplained = float(((fitted(changes) - outs) ** 2).sum())
    total = float(((outs - outs.mean()) ** 2).sum())
    coefficients = np.zeros(DEGREE + 1)
    plain = fitted.convert().coef  # trailing zeros are cut off
    coefficients[: len(plain)] = plain
    r_squared = 1.0 - unexplained / total if total > 0 else 1.0
    return TeaFit(tuple(float(value) for value in coefficients[::-1]), r_squared, len(points))

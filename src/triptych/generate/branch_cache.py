"""One branch of one row: whether its next step may be skipped, and what the blocks would have added.

Every decision is taken on the state before the step and counted by `settle`, once the step is through: a forward that
fails is tried again and decides the same.
"""

from __future__ import annotations

from collections import deque
from math import ceil

import torch

from triptych.generate.cache_setting import FIRST_BLOCK, CacheSetting
from triptych.generate.kinds.row import Row


class BranchCache:
    """The first step, those of the warm-up and the last always compute. Residuals are [1, ...], as the blocks' hidden
    states."""

    def __init__(self, setting: CacheSetting, timesteps: list[float]) -> None:
        self.setting = setting
        self.num_hits = 0
        self.num_refused = 0  # steps that could have been skipped, but for the threshold
        self._timesteps = timesteps
        self._first_skippable = max(1, ceil(setting.warm_up_share * len(timesteps)))
        self._step = 0
        self._num_consecutive = 0
        self._known: deque[tuple[float, torch.Tensor]] = deque(maxlen=setting.order + 1)  # newest last
        self._computed: torch.Tensor | None = None  # residual of this step, until it is settled

    def at(self, step: int) -> BranchCache:
        self._step = step
        return self

    @property
    def may_skip(self) -> bool:
        is_inside = self._first_skippable <= self._step < len(self._timesteps) - 1
        return is_inside and bool(self._known) and self._num_consecutive < self.setting.max_consecutive_hits

    def forecast(self) -> torch.Tensor:
        """What the skipped blocks would have added: the last residual, or the line through the last two."""
        when, residual = self._known[-1]
        if len(self._known) < 2:
            return residual
        before, older = self._known[0]
        if when == before:  # a schedule may round two steps to one timestep
            return residual
        return residual + (residual - older) * ((self._timesteps[self._step] - when) / (when - before))

    def hit(self) -> torch.Tensor:
        """The step is skipped: what to add."""
        self._computed = None
        return self.forecast()

    def keep(self, out: torch.Tensor, base: torch.Tensor) -> None:
        """The step is computed: the last block gave `out`, and `base` is what went into the blocks
        that a hit would skip."""
        self._computed = out - base

    def settle(self) -> None:
        """The step is through: count it."""
        if self._computed is None:
            self.num_hits += 1
            self._num_consecutive += 1
            return
        self.num_refused += self.may_skip
        self._known.append((self._timesteps[self._step], self._computed))
        self._num_consecutive = 0
        self._computed = None


class FirstBlockBranch(BranchCache):
    """Skips while the first block's residual is within `threshold` (relative L1) of the last computed step's."""

    def __init__(self, setting: CacheSetting, timesteps: list[float]) -> None:
        super().__init__(setting, timesteps)
        self._head: torch.Tensor | None = None  # the first block's residual at the last computed step
        self._next_head: torch.Tensor | None = None

    def decide(self, head_residual: torch.Tensor) -> bool:
        """Whether this step is skipped."""
        is_near = self._head is not None and relative_l1(head_residual, self._head) < self.setting.threshold
        if is_near and self.may_skip:
            return True
        self._next_head = head_residual
        return False

    def settle(self) -> None:
        if self._computed is not None:
            self._head = self._next_head
        super().settle()


class TeaBranch(BranchCache):
    """TeaCache (arXiv 2411.19108): skips while the summed change of the first block's modulated input, rescaled by the
    polynomial, stays below `threshold`. The change is from step to step, skipped ones too. The polynomial is cut at 0
    from below, since a fit may dip under it."""

    def __init__(self, setting: CacheSetting, timesteps: list[float]) -> None:
        super().__init__(setting, timesteps)
        self._signal: torch.Tensor | None = None
        self._next_signal: torch.Tensor | None = None
        self._sum = 0.0
        self._next_sum = 0.0

    def decide(self, signal: torch.Tensor) -> bool:
        """Whether this step is skipped."""
        self._next_signal = signal
        if self._signal is None or not self.may_skip:
            return False
        self._next_sum = self._sum + rescale(self.setting.coefficients, relative_l1(signal, self._signal))
        return self._next_sum < self.setting.threshold

    def settle(self) -> None:
        self._signal = self._next_signal
        self._sum = 0.0 if self._computed is not None else self._next_sum
        super().settle()


def relative_l1(now: torch.Tensor, before: torch.Tensor) -> float:
    return float((now - before).abs().mean() / before.abs().mean())


def rescale(coefficients: tuple[float, ...], change: float) -> float:
    """The polynomial, highest power first, at least 0."""
    value = 0.0
    for coefficient in coefficients:
        value = value * change + coefficient
    return max(0.0, value)


def new_caches(row: Row, setting: CacheSetting) -> tuple[BranchCache, ...]:
    """One a branch of the row."""
    make = FirstBlockBranch if setting.cache == FIRST_BLOCK else TeaBranch
    timesteps = [float(timestep) for timestep in row.timesteps]
    return tuple(make(setting, timesteps) for _ in row.branches)

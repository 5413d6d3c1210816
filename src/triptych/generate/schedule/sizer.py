"""How many branches of one shape are worth running together: the knee of time over tokens, as measured.

Batches are counted on a ladder of powers of two. A rung is open while each rung below it paid: while doubling the batch
raised the branches done in a millisecond by at least `min_gain`. Below the knee batching is free throughput, above it
each row only waits for the others.
"""

from __future__ import annotations

from collections.abc import Mapping

SMOOTHING = 0.25
REPROBE_STEPS = 256  # a rung that once looked slow is tried again after so many measured steps of its shape


class BatchSizer:
    """Owns the measured step times, in ms by shape and rung. One thread (the step loop).

    `max_step_tokens` bounds the memory of one step whatever was measured; a single row is always allowed.
    """

    def __init__(self, *, max_step_tokens: int = 1 << 18, max_branches: int = 256, min_gain: float = 1.08) -> None:
        self._max_step_tokens = max_step_tokens
        self._max_branches = max_branches
        self._min_gain = min_gain
        self._ms: dict[str, dict[int, float]] = {}
        self._num_observed: dict[str, int] = {}
        self._limits: dict[str, int] = {}

    def observe(self, shape: str, num_branches: int, step_ms: float) -> None:
        """Record one step. Only batches that fill their rung count: others would make it look slow or fast."""
        rung = _rung(num_branches)
        if rung != num_branches or step_ms <= 0:
            return
        rungs = self._ms.setdefault(shape, {})
        known = rungs.get(rung)
        rungs[rung] = step_ms if known is None else min(step_ms, known + SMOOTHING * (step_ms - known))
        self._num_observed[shape] = self._num_observed.get(shape, 0) + 1
        if self._num_observed[shape] % REPROBE_STEPS == 0:
            knee = self._open_rung(rungs)
            self._ms[shape] = {known_rung: ms for known_rung, ms in rungs.items() if known_rung <= knee}

    def max_branches(self, shape: str, branch_tokens: int) -> int:
        """Branches of `shape` that one step may hold; at least 1. Grows by one rung past the last one measured."""
        ceiling = min(self._max_branches, self._max_step_tokens // branch_tokens, self._limits.get(shape, 1 << 30))
        return min(self._open_rung(self._ms.get(shape, {})), max(1, ceiling))

    def limit(self, shape: str, max_branches: int) -> None:
        """A batch of this shape ran out of memory: never plan more than `max_branches` of it again."""
        self._limits[shape] = max(1, min(max_branches, self._limits.get(shape, max_branches)))

    def knee(self, shape: str) -> int:
        """The largest batch measured that still paid; 1 where nothing was measured."""
        return self._knee(self._ms.get(shape, {}))

    def _knee(self, rungs: Mapping[int, float]) -> int:
        measured = sorted(rungs)
        knee = measured[0] if measured else 1
        for rung in measured[1:]:
            if rung / rungs[rung] < self._min_gain * knee / rungs[knee]:
                break
            knee = rung
        return knee

    def _open_rung(self, rungs: Mapping[int, float]) -> int:
        """One rung past the knee while nothing larger was measured to be slow."""
        knee = self._knee(rungs)
        return knee if any(rung > knee for rung in rungs) else knee * 2

    def restore(self, table: Mapping[str, Mapping[int, float]]) -> None:
        """Begin with what an earlier run measured. A rung that is none, or took no time, is left out."""
        for shape, rungs in table.items():
            sound = {rung: ms for rung, ms in rungs.items() if rung >= 1 and _rung(rung) == rung and 0 < ms < 1e9}
            if sound:
                self._ms[shape] = sound

    def is_measured(self, shape: str, num_branches: int) -> bool:
        return num_branches in self._ms.get(shape, {})

    def table(self) -> dict[str, dict[int, float]]:
        """Step time in ms by shape and number of branches, as measured so far."""
        return {shape: dict(sorted(rungs.items())) for shape, rungs in self._ms.items()}


def _rung(num_branches: int) -> int:
    return 1 << (num_branches.bit_length() - 1)

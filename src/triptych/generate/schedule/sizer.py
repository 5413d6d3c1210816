"""How many branches of one shape are worth running together, and in which way: the knee of time over tokens, measured.

Batches are counted on a ladder of powers of two. The knee is the smallest rung whose branches done in a millisecond
come within `min_gain` of the best measured: below it batching is free throughput, above it each row only waits for the
others. The ladder is climbed while the rung above the best one is not measured.

A shape that was never run borrows from the measured shape of nearest size, by tokens, and is measured as it is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from triptych.generate.schedule.way import ONE_WORKER, Way

SMOOTHING = 0.25
REPROBE_STEPS = 256  # what once looked slow is tried again after so many measured steps of its shape
EXPLORE_STEPS = 32  # a shape with a neighbour to borrow from tries other ways only after so many measured steps
NUM_TRIES = 2  # the first step of a way pays for allocations
HOPELESS = 1.5  # a way so many times slower than the best is not tried on the next rung
MAX_BORROWED_RUNGS = 4  # a small shape does not borrow more than so many times the knee of a larger one


class ShapeTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ms`: step time by number of branches and way."""

    branch_tokens: int
    ms: dict[int, dict[str, float]]


StepTable = dict[str, ShapeTimes]


@dataclass(slots=True)
class _Shape:
    branch_tokens: int
    ms: dict[int, dict[Way, float]] = field(default_factory=dict)
    num_tries: dict[tuple[int, Way], int] = field(default_factory=dict)
    num_observed: int = 0

    def best_ms(self) -> dict[int, float]:
        return {rung: min(by_way.values()) for rung, by_way in sorted(self.ms.items()) if by_way}


class BatchSizer:
    """Owns the measured step times, in ms by shape, rung and way. One thread (the step loop).

    `max_step_tokens` bounds the memory of one step whatever was measured; a single row is always allowed. `ways`: the
    first one runs where nothing says otherwise.
    """

    def __init__(
        self,
        *,
        max_step_tokens: int = 1 << 18,
        max_branches: int = 256,
        min_gain: float = 1.08,
        ways: Sequence[Way] = (ONE_WORKER,),
    ) -> None:
        self.ways = tuple(ways)
        self._max_step_tokens = max_step_tokens
        self._max_branches = max_branches
        self._min_gain = min_gain
        self._shapes: dict[str, _Shape] = {}
        self._limits: dict[str, int] = {}

    def observe(self, shape: str, num_branches: int, branch_tokens: int, way: Way, step_ms: float) -> None:
        """Record one step. Only batches that fill their rung count: others would make it look slow or fast."""
        rung = _rung(num_branches)
        if rung != num_branches or step_ms <= 0:
            return
        here = self._shapes.setdefault(shape, _Shape(branch_tokens))
        by_way = here.ms.setdefault(rung, {})
        known = by_way.get(way)
        by_way[way] = step_ms if known is None else min(step_ms, known + SMOOTHING * (step_ms - known))
        here.num_tries[rung, way] = here.num_tries.get((rung, way), 0) + 1
        here.num_observed += 1
        if here.num_observed % REPROBE_STEPS == 0:
            self._forget_slow(here, rung)

    def _forget_slow(self, here: _Shape, rung: int) -> None:
        """Drop what is above the knee, and the slower ways of `rung`: the machine may have been busy then."""
        knee = self._knee(here.best_ms())
        here.ms = {known: by_way for known, by_way in here.ms.items() if known <= knee}
        by_way = here.ms.get(rung, {})
        fastest = min(by_way, key=lambda way: by_way[way], default=None)
        for way in list(by_way):
            if way != fastest:
                del by_way[way], here.num_tries[rung, way]

    def max_branches(self, shape: str, branch_tokens: int) -> int:
        """Branches of `shape` that one step may hold; at least 1. Grows by one rung past the best one measured."""
        ceiling = min(self._max_branches, self._max_step_tokens // branch_tokens, self._limits.get(shape, 1 << 30))
        here = self._shapes.get(shape)
        rungs = here.best_ms() if here else {}
        following = 2 * _best_rung(rungs)
        if following in rungs:
            return min(self._knee(rungs), max(1, ceiling))
        return min(max(following, self._borrowed_knee(shape, branch_tokens)), max(1, ceiling))

    def way(self, shape: str, num_branches: int, branch_tokens: int) -> Way:
        """How to run a step of so many branches: the fastest way measured, or one to measure."""
        rung = _rung(num_branches)
        usable = [way for way in self.ways if way.num_workers <= num_branches] or [self.ways[0]]
        here = self._shapes.get(shape)
        known = {way: ms for way, ms in here.ms.get(rung, {}).items() if way in usable} if here else {}
        guess = self._guess(shape, rung, branch_tokens, usable)
        is_exploring = here is not None and (here.num_observed >= EXPLORE_STEPS or not self._neighbour(shape, 1))
        if guess is None or (known and is_exploring):
            for way in usable:
                if self.is_worth_trying(shape, rung, way):
                    return way
        return min(known, key=lambda way: known[way]) if known else guess or usable[0]

    def is_worth_trying(self, shape: str, rung: int, way: Way) -> bool:
        """Whether this way was not yet measured here, and is not hopeless by what the rung below says."""
        here = self._shapes.get(shape)
        if here is None:
            return True
        below = here.ms.get(rung // 2, {})
        is_hopeless = way in below and below[way] > HOPELESS * min(below.values())
        num_tries = here.num_tries.get((rung, way), NUM_TRIES if way in here.ms.get(rung, {}) else 0)
        return num_tries < NUM_TRIES and not is_hopeless

    def _guess(self, shape: str, rung: int, branch_tokens: int, usable: Sequence[Way]) -> Way | None:
        """The way that is fastest at the measured batch of nearest size, of this shape or of its neighbour."""
        source = self._shapes.get(shape) or self._neighbour(shape, branch_tokens)
        if source is None:
            return None
        size_tokens = rung * branch_tokens
        for known in sorted(source.ms, key=lambda known: _ratio(known * source.branch_tokens, size_tokens)):
            fitting = {way: ms for way, ms in source.ms[known].items() if way in usable}
            if fitting:
                return min(fitting, key=lambda way: fitting[way])
        return None

    def _neighbour(self, shape: str, branch_tokens: int) -> _Shape | None:
        others = [found for name, found in self._shapes.items() if name != shape and found.ms]
        return min(others, key=lambda found: _ratio(found.branch_tokens, branch_tokens), default=None)

    def _borrowed_knee(self, shape: str, branch_tokens: int) -> int:
        """The neighbour's knee, at as many tokens."""
        neighbour = self._neighbour(shape, branch_tokens)
        if neighbour is None:
            return 1
        knee = self._knee(neighbour.best_ms())
        return _rung(max(1, min(knee * neighbour.branch_tokens // branch_tokens, MAX_BORROWED_RUNGS * knee)))

    def limit(self, shape: str, max_branches: int) -> None:
        """A batch of this shape ran out of memory: never plan more than `max_branches` of it again."""
        self._limits[shape] = max(1, min(max_branches, self._limits.get(shape, max_branches)))

    def knee(self, shape: str) -> int:
        """The smallest batch measured that is near the best; 1 where nothing was measured."""
        here = self._shapes.get(shape)
        return self._knee(here.best_ms()) if here else 1

    def _knee(self, rungs: Mapping[int, float]) -> int:
        best = max((rung / ms for rung, ms in rungs.items()), default=0.0)
        return next((rung for rung, ms in sorted(rungs.items()) if rung / ms * self._min_gain >= best), 1)

    def restore(self, table: Mapping[str, ShapeTimes]) -> None:
        """Begin with what an earlier run measured. A rung or way that is none, or took no time, is left out."""
        for shape, times in table.items():
            sound = {rung: self._sound_ways(by_way) for rung, by_way in times.ms.items() if rung >= 1}
            sound = {rung: by_way for rung, by_way in sound.items() if by_way and _rung(rung) == rung}
            if sound and times.branch_tokens >= 1:
                self._shapes[shape] = _Shape(times.branch_tokens, sound)

    def _sound_ways(self, by_way: Mapping[str, float]) -> dict[Way, float]:
        parsed = {Way.parse(text): ms for text, ms in by_way.items()}
        return {way: ms for way, ms in parsed.items() if way in self.ways and way is not None and 0 < ms < 1e9}

    def table(self) -> StepTable:
        """Step time in ms by shape, number of branches and way, as measured so far."""
        return {
            shape: ShapeTimes(
                here.branch_tokens,
                {rung: {str(way): ms for way, ms in by_way.items()} for rung, by_way in sorted(here.ms.items())},
            )
            for shape, here in self._shapes.items()
        }


def _rung(num_branches: int) -> int:
    return 1 << (num_branches.bit_length() - 1)


def _best_rung(rungs: Mapping[int, float]) -> int:
    """The one that does most branches in a millisecond; 1 where none was measured."""
    return max(rungs, key=lambda rung: (rung / rungs[rung], -rung), default=1)


def _ratio(one: int, other: int) -> float:
    """How far apart two sizes are; 1 where they are equal."""
    return max(one, other) / min(one, other)

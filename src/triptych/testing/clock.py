"""A clock that only moves when told."""

from __future__ import annotations


class FakeClock:
    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not run backwards"
        self._now_s += seconds

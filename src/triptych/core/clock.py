"""The clock as a parameter. Pure rooms never read the time; they are handed a `Clock` or a value in seconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds. Comparable between processes of one machine, never a date."""
        ...


class MonotonicClock:
    """The machine's monotonic clock (CLOCK_MONOTONIC: shared by all processes of one boot)."""

    def now_s(self) -> float:
        return time.monotonic()

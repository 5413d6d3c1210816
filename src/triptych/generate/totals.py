"""Counters of one engine since its start. Written by its threads, read by anyone."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection

from triptych.core.errors import Conflict, Overloaded
from triptych.core.events import FinishReason
from triptych.generate.events import GenerateFinal
from triptych.generate.request import GenerateRequest

QUEUE_FULL = "generate_refused_queue_full"


class Totals:
    """Steps, pictures, frames, pixels, refusals by reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._recent_s: deque[float] = deque(maxlen=64)

    def step(self, num_rows: int, step_ms: float) -> None:
        with self._lock:
            self._counts["engine_steps"] += 1
            self._counts["engine_busy_ms"] += step_ms  # type: ignore[assignment]
            self._counts["generate_row_steps"] += num_rows

    def end(self, request: GenerateRequest, final: GenerateFinal) -> None:
        with self._lock:
            self._counts[f"generate_{final.reason}"] += 1
            if final.reason is FinishReason.STOP:
                self._counts["generated_pictures"] += 1
                self._counts["generated_frames"] += request.num_frames
                self._counts["generated_pixels"] += request.num_pixels * request.num_frames
                self._recent_s.append(sum(final.stage_ms.values()) / 1e3)
            hits, lookups = (int(final.counters.get(name, 0)) for name in ("cache_hits", "cache_lookups"))
            self._counts["step_cache_hits"] += hits
            self._counts["step_cache_misses"] += lookups - hits

    def check_room(self, request_id: str, open_ids: Collection[str], max_waiting: int) -> None:
        """Raises Conflict for an id that is open, Overloaded where as many are open as may be: it says when to come
        back, and is counted."""
        if request_id in open_ids:
            raise Conflict(f"a request with id {request_id!r} is already running")
        if len(open_ids) >= max_waiting:
            with self._lock:
                self._counts[QUEUE_FULL] += 1
            retry_after_s = self.mean_total_s() or 1.0
            raise Overloaded(f"{len(open_ids)} pictures are waiting already", retry_after_s=retry_after_s)

    def refused(self) -> dict[str, float]:
        """Of `stats` what `check_room` counted."""
        return {QUEUE_FULL: float(self._counts[QUEUE_FULL])} if QUEUE_FULL in self._counts else {}

    def mean_total_s(self) -> float:
        """Mean time of recent requests from arrival to the end; 0 before the first."""
        return sum(self._recent_s) / len(self._recent_s) if self._recent_s else 0.0

    def stats(self) -> dict[str, float]:
        with self._lock:
            return {name: float(value) for name, value in self._counts.items()}

"""The bounded decode pool: threads beside the event loop, cheap work first, dear work sliced so that it blocks nobody.

Jobs are ordered by arrival plus a multiple of their estimated cost: a small picture overtakes a film, and a film that
has waited long enough overtakes small pictures. A job that is a generator gives way at its yields, and ends there when
it is cancelled. With two workers or more, one is always kept for short jobs.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

from triptych.core.clock import Clock
from triptych.core.errors import BudgetExceeded, Cancelled, Overloaded
from triptych.transfer.futures import settle

R = TypeVar("R")
Work = Callable[[], "R | Generator[None, None, R]"]

AGEING = 10.0  # a job of cost c is overtaken by shorter ones for up to AGEING * c seconds
LONG_JOB_S = 0.25
SLICE_S = 0.01


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a job ended."""

    result: Any = None
    error: BaseException | None = None


class _Job(Generic[R]):
    def __init__(self, work: Work[R], rank_s: float, cost_s: float, max_s: float, number: int) -> None:
        self.work = work
        self.max_s = max_s
        self.busy_s = 0.0
        self.queued_s = 0.0
        self.rank = (rank_s, number)
        self.is_long = cost_s >= LONG_JOB_S
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[R] = self.loop.create_future()
        self.steps: Generator[None, None, R] | None = None
        self.is_cancelled = False

    def __lt__(self, other: _Job[Any]) -> bool:
        return self.rank < other.rank


class DecodePool:
    """Owner of `num_workers` threads and a queue of at most `max_waiting` jobs. `run` is called on an event loop."""

    def __init__(self, num_workers: int, max_waiting: int, clock: Clock) -> None:
        self.num_workers = num_workers
        self.max_waiting = max_waiting
        self._clock = clock
        self._numbers = count()
        self._changed = threading.Condition()
        self._short: list[_Job[Any]] = []
        self._long: list[_Job[Any]] = []
        self._num_busy = 0
        self._num_long_busy = 0
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self.num_done = 0
        self.busy_s = 0.0
        self.wait_s = 0.0

    def start(self) -> None:
        for number in range(self.num_workers):
            thread = threading.Thread(target=self._work, name=f"media-decode-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Cancel everything and wait for the threads: as long as the longest step of a job."""
        with self._changed:
            self._is_closed = True
            waiting = self._short + self._long
            self._short.clear()
            self._long.clear()
            self._changed.notify_all()
        for job in waiting:
            job.is_cancelled = True
            _tell(job, _Outcome(error=Cancelled("the media pool is closing")))
        for thread in self._threads:
            thread.join()

    async def run(self, work: Work[R], *, cost_s: float = 0.0, max_s: float = math.inf) -> R:
        """The result of `work()`, or of the generator that it returns. Raises what it raises, Overloaded when the queue
        is full, BudgetExceeded (`max_decode_s`) at the yield after `max_s` of work. Cancelling the caller takes the job
        from the queue, or ends it at its next yield."""
        job: _Job[R] = _Job(work, self._clock.now_s() + AGEING * cost_s, cost_s, max_s, next(self._numbers))
        with self._changed:
            if self._is_closed or not self._threads:
                raise Cancelled("the media pool is not running")
            if self.num_waiting >= self.max_waiting:
                raise Overloaded(f"decode_queue of {self.max_waiting} items is full")
            self._queue(job)
            self._changed.notify()
        try:
            return await job.future
        finally:
            job.is_cancelled = True

    @property
    def num_waiting(self) -> int:
        return len(self._short) + len(self._long)

    @property
    def num_busy(self) -> int:
        return self._num_busy

    def _queue(self, job: _Job[Any]) -> None:
        job.queued_s = self._clock.now_s()
        heapq.heappush(self._long if job.is_long else self._short, job)

    def _work(self) -> None:
        """One worker: take, run a slice, put back or end. What a job cost is counted before its caller hears of it."""
        while (job := self._take()) is not None:
            started_s = self._clock.now_s()
            outcome = self._step(job)
            with self._changed:
                self._num_busy -= 1
                self._num_long_busy -= job.is_long
                self.wait_s += started_s - job.queued_s
                self.busy_s += self._clock.now_s() - started_s
                self.num_done += outcome is not None
                if outcome is None:
                    self._queue(job)
                self._changed.notify_all()
            if outcome is not None:
                _tell(job, outcome)

    def _take(self) -> _Job[Any] | None:
        with self._changed:
            while not self._is_closed:
                job = self._pop()
                if job is not None:
                    self._num_busy += 1
                    self._num_long_busy += job.is_long
                    return job
                self._changed.wait()
        return None

    def _pop(self) -> _Job[Any] | None:
        """The first by rank; a long one only where that leaves a worker for the short."""
        may_long = self._num_long_busy < max(1, self.num_workers - 1)
        if self._long and may_long and (not self._short or self._long[0] < self._short[0]):
            return heapq.heappop(self._long)
        return heapq.heappop(self._short) if self._short else None

    def _step(self, job: _Job[Any]) -> _Outcome | None:
        """Run until the job ends, or until another one should have the worker (None)."""
        try:
            if job.is_cancelled or self._is_closed:
                raise Cancelled("nobody waits for this any more")
            if job.steps is None:
                result = job.work()
                if not isinstance(result, Generator):
                    return _Outcome(result)
                job.steps = result
            started_s = self._clock.now_s()
            while not job.is_cancelled and not self._is_closed:
                next(job.steps)
                slice_s = self._clock.now_s() - started_s
                if job.busy_s + slice_s > job.max_s:
                    raise BudgetExceeded("max_decode_s", allowed=job.max_s, requested=job.busy_s + slice_s)
                if slice_s >= SLICE_S and self._has_waiting():
                    job.busy_s += slice_s
                    return None
            raise Cancelled("nobody waits for this any more")
        except StopIteration as stop:
            return _Outcome(stop.value)
        except BaseException as error:  # whatever a codec did, it reaches the one who asked, and the worker lives on
            if job.steps is not None:
                job.steps.close()
            return _Outcome(error=error)

    def _has_waiting(self) -> bool:
        with self._changed:
            return self.num_waiting > 0


def _tell(job: _Job[Any], outcome: _Outcome) -> None:
    try:
        job.loop.call_soon_threadsafe(settle, job.future, outcome.result, outcome.error)
    except RuntimeError:  # the loop is closed: nobody waits
        pass

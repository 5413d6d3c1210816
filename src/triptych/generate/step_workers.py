"""Threads that run parts of one step side by side, each on its own cores.

Products of small models are too short to share between cores: the threads wait for one another at the end of every
one. Half of the branches for each core, with one meeting a step, loses nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from triptych.generate.schedule import Way
from triptych.models.cpu_threads import on_cores

T = TypeVar("T")


class StepWorkers:
    """Owns `num_workers` - 1 threads; the caller's is the first worker. Used by one thread at a time."""

    def __init__(self, num_workers: int) -> None:
        self._pool = ThreadPoolExecutor(num_workers - 1, "generate-step") if num_workers > 1 else None

    def run(self, parts: Sequence[Callable[[], T]], way: Way) -> list[T]:
        """What the parts give, in order. When one raises, the others are waited for, and the first error is raised."""
        others: list[Future[T]] = []
        if self._pool is not None:
            others = [self._pool.submit(_run, part, way.num_threads) for part in parts[1:]]
        try:
            with on_cores(way.num_threads):
                results = [part() for part in (parts[:1] if others else parts)]
        finally:
            wait(others)
        return results + [future.result() for future in others]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


@torch.inference_mode()
def _run(part: Callable[[], T], num_threads: int) -> T:
    with on_cores(num_threads):
        return part()

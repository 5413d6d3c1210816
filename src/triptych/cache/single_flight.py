"""The same thing asked for twice at the same moment is done once. One event loop; keeps nothing after the work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    def __init__(self, task: asyncio.Task[V]) -> None:
        self.task = task
        self.num_waiters = 0


class SingleFlight(Generic[K, V]):
    """Owner of the work in flight, by key.

    The work runs in a task of its own, so that it does not matter who came first: it goes on while anyone waits, and is
    cancelled when the last one leaves. Every waiter gets the same result object, or the same exception object: neither
    may be written to.
    """

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}
        self._tasks: set[asyncio.Task[V]] = set()
        self.num_started = 0
        self.num_joined = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._tasks)

    async def run(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        """The result of `work()`, or of the same key's work that is already under way. Raises what the work raises."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._start(key, work)
        else:
            self.num_joined += 1
        flight.num_waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiters -= 1
            if flight.num_waiters == 0 and not flight.task.done():
                self._forget(key, flight)
                flight.task.cancel()

    async def close(self) -> None:
        """Cancel what is in flight and wait until it has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: K, work: Callable[[], Awaitable[V]]) -> _Flight[V]:
        task: asyncio.Task[V] = asyncio.ensure_future(_awaited(work))
        flight = _Flight(task)
        self._flights[key] = flight
        self._tasks.add(task)
        self.num_started += 1
        task.add_done_callback(lambda _: self._land(key, flight))
        return flight

    def _land(self, key: K, flight: _Flight[V]) -> None:
        self._tasks.discard(flight.task)
        self._forget(key, flight)
        if not flight.task.cancelled():
            flight.task.exception()  # retrieved, so that a failure nobody waits for any more makes no noise

    def _forget(self, key: K, flight: _Flight[Any]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


async def _awaited(work: Callable[[], Awaitable[V]]) -> V:
    return await work()

"""How much decoded media may be held at a time, between its decoder and its processor. One event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SMALL_SHARE = 4  # a quarter of the room is for small items alone: they never wait behind a film
SMALL_PART = 16  # an item is small up to this part of the room


class ByteGate:
    """At most `capacity_bytes` inside, first come first served among the large and among the small. An item larger than
    the room has it to itself."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < SMALL_PART:
            raise ValueError(f"capacity_bytes must be at least {SMALL_PART}, got {capacity_bytes}")
        self._max_small_bytes = capacity_bytes // SMALL_PART
        self._small = _Lane(capacity_bytes // SMALL_SHARE)
        self._large = _Lane(capacity_bytes - capacity_bytes // SMALL_SHARE)

    @property
    def num_bytes(self) -> int:
        return self._small.num_bytes + self._large.num_bytes

    @property
    def num_waiting(self) -> int:
        return len(self._small.waiting) + len(self._large.waiting)

    @asynccontextmanager
    async def inside(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for room, and give it back at the end, however that comes."""
        lane = self._small if num_bytes <= self._max_small_bytes else self._large
        num_bytes = min(num_bytes, lane.capacity_bytes)
        await lane.enter(num_bytes)
        try:
            yield
        finally:
            lane.leave(num_bytes)


class _Lane:
    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, num_bytes: int) -> None:
        if not self.waiting and self.num_bytes + num_bytes <= self.capacity_bytes:
            self.num_bytes += num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(num_bytes)
            else:
                self.waiting.remove((num_bytes, turn))
                self._admit()
            raise

    def leave(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while self.waiting and self.num_bytes + self.waiting[0][0] <= self.capacity_bytes:
            num_bytes, turn = self.waiting.popleft()
            if not turn.done():
                self.num_bytes += num_bytes
                turn.set_result(None)

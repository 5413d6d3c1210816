"""One call's pictures on their way: their events in order, for any number of followers, early or late.

Whoever follows gets every event from the first one on, so that a repeated call (same idempotency key) joins a running
one or replays a finished one. When the last follower leaves before the end, the work is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.core.errors import Cancelled, InternalError, TriptychError
from triptych.core.events import FinishReason
from triptych.generate.events import GenerateEvent, GenerateFinal
from triptych.generate.request import GenerateRequest, ModelTraits


class GenerateHandle(Protocol):
    """An engine, as its callers see it. See `engine.GenerateEngine`."""

    @property
    def traits(self) -> ModelTraits: ...

    def submit(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]: ...

    def cancel(self, request_id: str) -> None: ...

    async def stats(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Indexed:
    """An event of picture `index` of the call."""

    index: int
    event: GenerateEvent


class Run:
    """Owned by the event loop that made it. Raises Overloaded at construction when one of the pictures is refused; the
    others are then cancelled: a call is served whole or not at all."""

    def __init__(self, engine: GenerateHandle, requests: Sequence[GenerateRequest]) -> None:
        self.requests = tuple(requests)
        self.is_done = False
        self._engine = engine
        self._history: list[Indexed] = []
        self._news = asyncio.Event()
        self._num_followers = 0
        streams = _submit_all(engine, requests)
        self._task = asyncio.create_task(self._pump(streams))

    @property
    def num_bytes(self) -> int:
        """Of the pixels held in the history."""
        arrays = (getattr(entry.event, name, None) for entry in self._history for name in ("frames", "pixels"))
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def has_failed(self) -> bool:
        return any(error_of(entry.event) is not None for entry in self._history)

    async def follow(self) -> AsyncGenerator[Indexed, None]:
        """Every event, from the first. Close the generator to leave."""
        self._num_followers += 1
        position = 0
        try:
            while True:
                news = self._news
                while position < len(self._history):
                    yield self._history[position]
                    position += 1
                if self.is_done:
                    return
                if news is self._news:
                    await news.wait()
        finally:
            self._num_followers -= 1
            if self._num_followers == 0 and not self.is_done:
                self.cancel()

    def cancel(self) -> None:
        for request in self.requests:
            self._engine.cancel(request.request_id)

    async def _pump(self, streams: Sequence[AsyncIterator[GenerateEvent]]) -> None:
        try:
            await asyncio.gather(*(self._read(index, stream) for index, stream in enumerate(streams)))
        finally:
            self.is_done = True
            self._announce()

    async def _read(self, index: int, stream: AsyncIterator[GenerateEvent]) -> None:
        async for event in stream:
            self._history.append(Indexed(index, event))
            self._announce()

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def finals_of(events: AsyncIterator[Indexed]) -> dict[int, GenerateFinal]:
    """Wait for every picture. Raises the first error, Cancelled included."""
    finals: dict[int, GenerateFinal] = {}
    async for entry in events:
        error = error_of(entry.event)
        if error is not None:
            raise error
        if isinstance(entry.event, GenerateFinal):
            finals[entry.index] = entry.event
    return finals


def error_of(event: GenerateEvent) -> TriptychError | None:
    if not isinstance(event, GenerateFinal) or event.reason is FinishReason.STOP:
        return None
    if event.reason is FinishReason.CANCELLED:
        return Cancelled("cancelled")
    return event.error or InternalError("the picture failed")


def _submit_all(engine: GenerateHandle, requests: Sequence[GenerateRequest]) -> list[AsyncIterator[GenerateEvent]]:
    streams: list[AsyncIterator[GenerateEvent]] = []
    try:
        for request in requests:
            streams.append(engine.submit(request))
    except TriptychError:
        for request in requests[: len(streams)]:
            engine.cancel(request.request_id)
        raise
    return streams

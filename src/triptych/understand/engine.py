"""The way in to an engine: `EngineHandle`, and the engine in this process on a thread of its own.

`remote.py` has the same handle over an engine in another process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from triptych.core.clock import Clock, MonotonicClock
from triptych.core.config import EngineConfig
from triptych.core.errors import InternalError
from triptych.core.events import Event, FinalEvent, FinishReason
from triptych.core.prepared import PreparedRequest
from triptych.models.base import ModelInfo, ServedModel
from triptych.understand.build import build_core
from triptych.understand.core import EngineCore
from triptych.understand.grammar import GrammarCompiler


class EngineHandle(Protocol):
    """What the front holds. `submit` yields TokenEvents and then exactly one FinalEvent, whatever happens."""

    info: ModelInfo

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def submit(self, request: PreparedRequest) -> AsyncIterator[Event]:
        """Closing the iterator early cancels the request."""
        ...

    def cancel(self, request_id: str) -> None: ...

    async def stats(self) -> dict[str, float]: ...

    async def flush(self, cache: str) -> int: ...


class EventStreams:
    """One queue a request, on the event loop's side. Shared by every handle."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Event]] = {}

    def open(self, request_id: str) -> None:
        assert request_id not in self._queues, "request ids are unique"
        self._queues[request_id] = asyncio.Queue()

    def dispatch(self, events: list[Event]) -> None:
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)

    def fail_all(self, message: str) -> None:
        """The engine is gone: every open request gets its final event from here."""
        self.dispatch(
            [
                FinalEvent(request_id, FinishReason.ERROR, InternalError.code, message)
                for request_id in list(self._queues)
            ]
        )

    async def follow(self, request_id: str, cancel: Callable[[str], None]) -> AsyncIterator[Event]:
        """Yields up to and with the FinalEvent; leaving earlier calls `cancel`."""
        queue = self._queues[request_id]
        is_over = False
        try:
            while not is_over:
                event = await queue.get()
                is_over = isinstance(event, FinalEvent)
                yield event
        finally:
            del self._queues[request_id]
            if not is_over:
                cancel(request_id)


Command = Callable[[EngineCore], Any]


class InProcessEngine:
    """An `EngineHandle` whose core runs on a thread of this process. Start and use it on one event loop."""

    def __init__(
        self,
        served: ServedModel,
        config: EngineConfig,
        *,
        load_tokenizer: Callable[[], Any],
        clock: Clock | None = None,
    ) -> None:
        self.info = served.info
        self._streams = EventStreams()
        self._mail: SimpleQueue[Command] = SimpleQueue()
        self._outbox: list[Event] = []
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

        def grammar() -> GrammarCompiler:
            return GrammarCompiler(load_tokenizer(), served.info.vocab_size, served.info.eos_token_ids)

        self._core = build_core(
            served, config, grammar=grammar, clock=clock or MonotonicClock(), emit=self._outbox.append
        )

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="triptych-engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Cancels what runs, and returns when the thread has ended."""

        def stop(core: EngineCore) -> None:
            core.cancel_all()
            self._is_closing = True

        if self._thread is not None:
            self._mail.put(stop)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def submit(self, request: PreparedRequest) -> AsyncIterator[Event]:
        self._streams.open(request.request_id)
        self._mail.put(lambda core: core.submit(request))
        async for event in self._streams.follow(request.request_id, self.cancel):
            yield event

    def cancel(self, request_id: str) -> None:
        self._mail.put(lambda core: core.cancel(request_id))

    async def stats(self) -> dict[str, float]:
        return await self._ask(lambda core: core.stats())

    async def flush(self, cache: str) -> int:
        return await self._ask(lambda core: core.flush(cache))

    async def _ask(self, question: Command) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def ask(core: EngineCore) -> None:
            try:
                result, error = question(core), None
            except Exception as caught:  # it belongs to whoever asked
                result, error = None, caught
            loop.call_soon_threadsafe(_resolve, answer, result, error)

        self._mail.put(ask)
        return await answer

    # the engine's thread

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                while not self._is_closing:
                    self._receive()
                    if self._core.has_work:
                        self._core.step(self._has_mail)
                    self._send()
            except BaseException:
                self._on_loop(self._streams.fail_all, "the engine stopped")
                raise

    def _has_mail(self) -> bool:
        return not self._mail.empty()

    def _receive(self) -> None:
        """All mail that is there; waits for some when there is nothing to do."""
        if not self._core.has_work:
            self._mail.get()(self._core)
        while True:
            try:
                command = self._mail.get_nowait()
            except Empty:
                return
            command(self._core)

    def _send(self) -> None:
        if self._outbox:
            events, self._outbox[:] = list(self._outbox), []
            self._on_loop(self._streams.dispatch, events)

    def _on_loop(self, function: Callable[[Any], None], argument: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)

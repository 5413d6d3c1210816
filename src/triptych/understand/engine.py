"""The way in to an engine: `EngineHandle`, and the engine in this process on a thread of its own.

`remote.py` has the same handle over an engine in another process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from triptych.core.clock import Clock, MonotonicClock
from triptych.core.config import EngineConfig
from triptych.core.errors import InternalError
from triptych.core.events import EmbeddingEvent, EngineEvent, Event, FinalEvent, FinishReason
from triptych.core.prepared import PreparedRequest
from triptych.models.base import ModelInfo, ServedModel
from triptych.transfer.futures import settle
from triptych.understand.build import build_core
from triptych.understand.core import EngineCore
from triptych.understand.grammar import GrammarCompiler
from triptych.understand.loop import Command, EngineLoop


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


async def embedding_of(engine: EngineHandle, request: PreparedRequest) -> npt.NDArray[np.float32]:
    """[D], of length one. Raises the leaf that ended the request."""
    vector: list[float] = []
    async for event in engine.submit(replace(request, wants_embedding=True)):
        if isinstance(event, EmbeddingEvent):
            vector = event.vector
        elif isinstance(event, FinalEvent) and event.reason is not FinishReason.STOP:
            raise event.error()
    return np.asarray(vector, dtype=np.float32)


class EventStreams:
    """One queue a request, on the event loop's side. Shared by every handle. `lost` says why the engine is gone."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def open(self, request_id: str) -> None:
        assert request_id not in self._queues, "request ids are unique"
        self._queues[request_id] = asyncio.Queue()
        self._is_empty.clear()
        if self.lost is not None:
            self.fail_all(self.lost)

    def dispatch(self, events: list[Event]) -> None:
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)

    async def wait_empty(self, timeout_s: float) -> None:
        """Until every stream is over and read, or the time is up."""
        try:
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        except TimeoutError:
            pass  # the caller ends what is left

    def fail_all(self, message: str) -> None:
        """The engine is gone: every open request, and every later one, gets its final event from here."""
        self.lost = message
        self.dispatch(
            [
                FinalEvent(request_id, FinishReason.ERROR, InternalError.code, message)
                for request_id in list(self._queues)
            ]
        )

    async def follow(self, request_id: str, cancel: Callable[[str], None]) -> AsyncGenerator[Event]:
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
            if not self._queues:
                self._is_empty.set()
            if not is_over:
                cancel(request_id)


class ThreadMailbox:
    """Commands from the event loop's thread; events back to it."""

    def __init__(self, dispatch: Callable[[list[Event]], None]) -> None:
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._dispatch = dispatch
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def post(self, command: Command) -> None:
        self._commands.put(command)

    def receive(self, *, wait: bool) -> Iterable[Command]:
        if wait:
            yield self._commands.get()
        while True:
            try:
                yield self._commands.get_nowait()
            except Empty:
                return

    def has_mail(self) -> bool:
        return not self._commands.empty()

    def send(self, events: list[EngineEvent]) -> None:
        """Nothing is withheld from an engine in this process, and what it holds is no news."""
        self.call(self._dispatch, [event for event in events if isinstance(event, Event)])

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """On the event loop, from the engine's thread; nothing once the event loop is closed."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


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
        self._mailbox = ThreadMailbox(self._streams.dispatch)
        self._thread: threading.Thread | None = None
        self._loop = EngineLoop(
            lambda emit: build_core(
                served,
                config,
                grammar=lambda: GrammarCompiler(load_tokenizer(), served.info.vocab_size, served.info.eos_token_ids),
                clock=clock or MonotonicClock(),
                emit=emit,
            ),
            self._mailbox,
        )

    async def start(self) -> None:
        self._mailbox.bind(asyncio.get_running_loop())
        self._thread = threading.Thread(target=self._run, name="triptych-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException:
            self._mailbox.call(self._streams.fail_all, "the engine stopped")
            raise

    async def close(self) -> None:
        """Cancels what runs, and returns when the thread has ended."""
        if self._thread is not None:
            self._mailbox.post(lambda core: self._loop.stop())
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._streams.fail_all("the engine stopped")

    async def submit(self, request: PreparedRequest) -> AsyncGenerator[Event]:
        self._streams.open(request.request_id)
        if self._streams.lost is None:
            self._mailbox.post(lambda core: core.submit(request))
        async with aclosing(self._streams.follow(request.request_id, self.cancel)) as events:
            async for event in events:
                yield event

    def cancel(self, request_id: str) -> None:
        self._mailbox.post(lambda core: core.cancel(request_id))

    async def stats(self) -> dict[str, float]:
        answer: dict[str, float] = await self._ask(lambda core: core.stats())
        return answer

    async def flush(self, cache: str) -> int:
        answer: int = await self._ask(lambda core: core.flush(cache))
        return answer

    async def forget(self) -> None:
        """See `EngineCore.forget`."""
        await self._ask(lambda core: core.forget())

    async def _ask(self, question: Command) -> Any:
        if self._streams.lost is not None:
            raise InternalError(self._streams.lost)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def ask(core: EngineCore) -> None:
            try:
                self._mailbox.call(settle, answer, question(core), None)
            except Exception as error:  # it belongs to whoever asked
                self._mailbox.call(settle, answer, None, error)

        self._mailbox.post(ask)
        return await answer

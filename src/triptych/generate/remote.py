"""A diffusion engine in another process: `RemoteGenerateEngine` is the front's handle, `serve_engine` the process's
main loop. `wire.py` says what a message is. Losing the process ends every open request with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import zmq.asyncio

from triptych.core.errors import InternalError, TriptychError
from triptych.core.events import FinishReason
from triptych.generate.engine import GenerateEngine
from triptych.generate.events import GenerateEvent, GenerateFinal
from triptych.generate.request import GenerateRequest, ModelTraits
from triptych.generate.totals import Totals
from triptych.generate.wire import Events, Ready, Submit, ToEngine, ToFront, pack, read_to_engine, read_to_front
from triptych.transfer.channel import Channel, connected
from triptych.transfer.messages import Answer, Ask, Cancel

CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Open:
    """Accepted, and its final event has not come."""

    request: GenerateRequest
    events: asyncio.Queue[GenerateEvent] = field(default_factory=asyncio.Queue)


class RemoteGenerateEngine:
    """A `GenerateHandle`, owned by one event loop. Binds `address` (ipc://...) at once, so that the process can be
    started after. It is the engine's only client: it counts what is open, and refuses by itself. `lost` is to be called
    by whoever watches the process."""

    traits: ModelTraits

    def __init__(self, address: str, *, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._channel = Channel(address, read_to_front, self._take)
        self._open: dict[str, _Open] = {}
        self._totals = Totals()

    async def start(self) -> None:
        """Returns when the model is loaded. Raises InternalError if the process is lost before."""
        await self._channel.start()

    async def begin(self) -> None:
        """Let the engine measure its step times, and take requests."""
        await self._channel.ask("begin")

    async def close(self) -> None:
        """Cancels what is open; final events come from the engine, or from here if it is slow."""
        if self._channel.lost is None:
            with contextlib.suppress(TimeoutError, TriptychError):
                await asyncio.wait_for(self._channel.ask("close"), CLOSE_TIMEOUT_S)
        self.lost("the engine stopped")
        await self._channel.close()

    def lost(self, why: str) -> None:
        """The process is gone: end every request and every question."""
        self._channel.fail(why)
        for request_id in list(self._open):
            self._deliver(GenerateFinal(request_id, FinishReason.ERROR, error=InternalError(why)))

    def submit(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """Accept at once; raises Overloaded, Conflict, or InternalError when the process is gone. Closing the iterator
        early cancels the request."""
        if self._channel.lost is not None:
            raise InternalError(self._channel.lost)
        self._totals.check_room(request.request_id, self._open, self._max_waiting)
        self._channel.send(pack(Submit(request)))
        self._open[request.request_id] = opened = _Open(request)
        return self._follow(opened)

    async def _follow(self, opened: _Open) -> AsyncIterator[GenerateEvent]:
        try:
            while True:
                event = await opened.events.get()
                yield event
                if isinstance(event, GenerateFinal):
                    return
        finally:
            if self._open.get(opened.request.request_id) is opened:
                self.cancel(opened.request.request_id)

    def cancel(self, request_id: str) -> None:
        """Unknown and ended ids are ignored."""
        if request_id in self._open:
            self._channel.send(pack(Cancel(request_id)))

    async def stats(self) -> dict[str, float]:
        answer: dict[str, float] = await self._channel.ask("stats")
        return answer | self._totals.refused()

    def _take(self, message: ToFront) -> None:
        match message:
            case Events(events):
                for event in events:
                    self._deliver(event)
            case Ready(traits):
                self.traits = traits
                self._channel.ready()

    def _deliver(self, event: GenerateEvent) -> None:
        """A request that has ended gets nothing more."""
        opened = self._open.get(event.request_id)
        if opened is None:
            return
        if isinstance(event, GenerateFinal):
            del self._open[event.request_id]
            self._totals.end(opened.request, event)
        opened.events.put_nowait(event)


class _Server:
    """The process's side: its event loop talks to the socket, the engine's own threads draw."""

    def __init__(self, socket: zmq.asyncio.Socket, engine: GenerateEngine) -> None:
        self._socket = socket
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._outbox: list[GenerateEvent] = []
        self._lock = threading.Lock()
        self._answers: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()

    async def run(self) -> bool:
        """Until it is closed; False when the step loop has stopped by itself."""
        self._send(Ready(self._engine.traits))
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._is_over.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a mistake in `_receive` ends the process
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine.has_stopped:
            await self._engine.close()
            self._flush()
        return not self._engine.has_stopped

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            self._handle(read_to_engine([frame.buffer for frame in frames]))

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                self._submit(request)
            case Cancel(request_id):
                self._engine.cancel(request_id)
            case Ask():
                answer = asyncio.create_task(self._answer(message))
                self._answers.add(answer)
                answer.add_done_callback(self._answers.discard)

    def _submit(self, request: GenerateRequest) -> None:
        try:
            self._engine.accept(request, self._put)
        except TriptychError as error:
            self._put(GenerateFinal(request.request_id, FinishReason.ERROR, error=error))

    async def _answer(self, question: Ask) -> None:
        try:
            result = await self._result(question.what)
        except TriptychError as error:
            self._send(Answer(question.ask_id, None, error.code, error.message))
        except Exception as error:
            self._send(Answer(question.ask_id, None, InternalError.code, f"{type(error).__name__} in the engine"))
            raise
        else:
            self._send(Answer(question.ask_id, result))

    async def _result(self, what: str) -> dict[str, float] | None:
        match what:
            case "begin":
                await self._engine.start()
            case "stats":
                return await self._engine.stats()
            case "close":
                await self._engine.close()
                self._flush()  # the final events come before the answer
                self._is_over.set()
            case _:
                raise InternalError(f"no question {what!r}")
        return None

    def _put(self, event: GenerateEvent) -> None:
        """From any thread. What the rows of one step say goes as one message."""
        with self._lock:
            self._outbox.append(event)
            is_first = len(self._outbox) == 1
        if is_first:
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            events, self._outbox = self._outbox, []
        if events:
            self._send(Events(events))
        if self._engine.has_stopped:
            self._is_over.set()

    def _send(self, message: ToFront) -> None:
        if not self._socket.closed:
            self._socket.send_multipart(pack(message), copy=False)


async def serve_engine(address: str, engine: GenerateEngine) -> bool:
    """The process's main: connect, say Ready, serve until it is asked to close. False when the step loop has stopped by
    itself: every request got its final event, and a new process is needed."""
    with connected(address, zmq.asyncio.Context()) as socket:
        return await _Server(socket, engine).run()

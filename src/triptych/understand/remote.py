"""An engine in another process: `RemoteEngine` is the front's handle, `serve_engine` the process's main loop.

Control goes over one ZeroMQ socket pair (ipc), large arrays through shared memory beside it; `wire.py` says what a
message is. Losing the process ends every open stream with an error.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from queue import SimpleQueue
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from triptych.core.errors import InternalError, TriptychError, from_wire
from triptych.core.events import Event, FinalEvent, FinishReason
from triptych.core.prepared import PreparedRequest
from triptych.models.base import KvSpec, ModelInfo
from triptych.transfer.shared_memory import SharedReceiver, SharedSender, Shipment
from triptych.understand.core import EngineCore
from triptych.understand.engine import EventStreams, resolve
from triptych.understand.loop import Command, EngineLoop
from triptych.understand.wire import (
    MIN_SHARED_BYTES,
    Answer,
    Ask,
    Cancel,
    Events,
    Ready,
    Released,
    Stop,
    Submit,
    no_slots,
    pack,
    pack_request,
    read_to_engine,
    read_to_front,
    unpack_request,
)


class RemoteEngine:
    """An `EngineHandle`. Binds `address` (ipc://...) at once, so that the process can be started after; `start` returns
    when the engine has loaded its model. `lost` is to be called by whoever watches the process."""

    info: ModelInfo

    def __init__(self, address: str, shared: SharedSender | None = None) -> None:
        """`shared` is this handle's from now on: closed with it, or when the process is lost."""
        self._shared = shared
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._streams = EventStreams()
        self._ask_ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()

    async def start(self) -> None:
        """Raises InternalError if the process is lost before it is ready."""
        self._reader = asyncio.create_task(self._read())
        await self._is_ready.wait()
        if self._streams.lost is not None:
            raise InternalError(self._streams.lost)

    async def close(self) -> None:
        """Tells the engine to stop; its streams get their final events from it, or from here if it is slow."""
        if self._streams.lost is None:
            await self._socket.send(pack(Stop()))
            await self._streams.wait_empty(timeout_s=5.0)
        self._streams.fail_all("the engine stopped")
        if self._reader is not None:
            self._reader.cancel()
        if self._shared is not None:
            self._shared.close()
        self._socket.close()
        self._context.term()

    def lost(self, why: str) -> None:
        """The process is gone: end every stream and every question."""
        self._streams.fail_all(why)
        self._is_ready.set()
        if self._shared is not None:
            self._shared.close()
        for answer in self._answers.values():
            resolve(answer, None, InternalError(why))

    async def submit(self, request: PreparedRequest) -> AsyncGenerator[Event]:
        shipment = Shipment(self._shared, MIN_SHARED_BYTES) if self._shared is not None else None
        frames = await _packed(request, shipment)
        self._streams.open(request.request_id)
        if self._streams.lost is None:
            self._socket.send_multipart(frames, copy=False)  # SNDHWM is 0: nothing to wait for
        async with aclosing(self._streams.follow(request.request_id, self.cancel)) as events:
            async for event in events:
                yield event

    def cancel(self, request_id: str) -> None:
        if self._streams.lost is None and not self._socket.closed:
            self._socket.send(pack(Cancel(request_id)))

    async def stats(self) -> dict[str, float]:
        answer: dict[str, float] = await self._ask("stats")
        return answer if self._shared is None else answer | self._shared.stats()

    async def flush(self, cache: str) -> int:
        answer: int = await self._ask("flush", cache)
        return answer

    async def forget(self) -> None:
        """See `EngineCore.forget`."""
        await self._ask("forget")

    async def _ask(self, what: str, argument: str = "") -> Any:
        if self._streams.lost is not None:
            raise InternalError(self._streams.lost)
        ask_id = next(self._ask_ids)
        self._answers[ask_id] = answer = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send(pack(Ask(ask_id, what, argument)))
            return await answer
        finally:
            del self._answers[ask_id]

    async def _read(self) -> None:
        while True:
            message = read_to_front(await self._socket.recv())
            match message:
                case Events(events):
                    self._streams.dispatch(events)
                case Answer(ask_id, result, error_code, error_message):
                    error = from_wire(error_code, error_message) if error_code else None
                    if ask_id in self._answers:
                        resolve(self._answers[ask_id], result, error)
                case Released(slot_ids):
                    assert self._shared is not None
                    for slot_id in slot_ids:
                        self._shared.release(slot_id)
                case Ready(info):
                    self.info = info_from_wire(info)
                    self._is_ready.set()


async def _packed(request: PreparedRequest, shipment: Shipment | None) -> list[bytes | memoryview]:
    """Frames; what is large is copied into shared memory, off the event loop, and taken back if the caller goes."""
    if shipment is None or request.num_media_bytes < shipment.min_bytes:
        return pack_request(request)
    copying = asyncio.get_running_loop().run_in_executor(None, pack_request, request, shipment.place)
    try:
        return await asyncio.shield(copying)
    except BaseException:
        copying.add_done_callback(lambda done: shipment.undo())
        raise


def info_to_wire(info: ModelInfo) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(info, builtin_types=(bytes,))
    return {**fields, "extra": {}}


def info_from_wire(fields: dict[str, Any]) -> ModelInfo:
    kv = tuple(KvSpec(**spec) for spec in fields["kv"])
    return ModelInfo(**{**fields, "kv": kv, "eos_token_ids": tuple(fields["eos_token_ids"])})


class SocketMailbox:
    """The engine process's side of the socket pair."""

    def __init__(self, socket: zmq.Socket[bytes], stop: Callable[[], None], shared_fd: int | None = None) -> None:
        self._socket = socket
        self._stop = stop
        self._released: SimpleQueue[int] = SimpleQueue()
        self._open_slot = no_slots if shared_fd is None else SharedReceiver(shared_fd, self._released.put).open

    def has_mail(self) -> bool:
        return self._socket.poll(0) != 0

    def receive(self, *, wait: bool) -> Iterable[Command]:
        self._give_back()
        if wait:
            self._socket.poll()
        while self.has_mail():
            frames = self._socket.recv_multipart(copy=False)
            yield self._command(frames)

    def send(self, events: list[Event]) -> None:
        self._socket.send(pack(Events(events)))

    def _give_back(self) -> None:
        slot_ids = []
        while not self._released.empty():
            slot_ids.append(self._released.get())
        if slot_ids:
            self._socket.send(pack(Released(slot_ids)))

    def _command(self, frames: list[zmq.Frame]) -> Command:
        message = read_to_engine(frames[0].bytes)
        match message:
            case Submit():
                return self._submit(message, [frame.buffer for frame in frames])
            case Cancel(request_id):
                return lambda core: core.cancel(request_id)
            case Ask():
                return lambda core: self._socket.send(pack(_answer(core, message)))
            case Stop():
                return lambda core: self._stop()

    def _submit(self, message: Submit, buffers: list[Any]) -> Command:
        try:
            request = unpack_request(message, buffers, self._open_slot)
        except TriptychError as error:  # this request alone ends
            final = FinalEvent(message.request_id, FinishReason.ERROR, error.code, error.message)
            return lambda core: self.send([final])
        return lambda core: core.submit(request)


def _answer(core: EngineCore, question: Ask) -> Answer:
    try:
        match question.what:
            case "stats":
                return Answer(question.ask_id, core.stats())
            case "flush":
                return Answer(question.ask_id, core.flush(question.argument))
            case "forget":
                core.forget()
                return Answer(question.ask_id)
        raise InternalError(f"no question {question.what!r}")
    except TriptychError as error:
        return Answer(question.ask_id, None, error.code, error.message)


def serve_engine(
    address: str,
    info: ModelInfo,
    build: Callable[[Callable[[Event], None]], EngineCore],
    shared_fd: int | None = None,
) -> None:
    """The engine process's main: connect, say Ready, loop until Stop. `shared_fd` is the inherited shared memory."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    try:
        loop: EngineLoop = EngineLoop(build, SocketMailbox(socket, lambda: loop.stop(), shared_fd))
        socket.send(pack(Ready(info_to_wire(info))))
        loop.run()
    finally:
        socket.close(linger=2000)
        context.term()

"""An engine in another process: `RemoteEngine` is the front's handle, `serve_engine` the process's main loop.

Control goes over one ZeroMQ socket pair (ipc), large arrays through shared memory beside it; `wire.py` says what a
message is. Losing the process ends every open stream with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec
import zmq

from triptych.core.errors import InternalError, TriptychError
from triptych.core.events import EmbeddingsDropped, EngineEvent, Event, FeaturesWanted, FinalEvent, FinishReason
from triptych.core.prepared import PreparedRequest
from triptych.models.base import KvSpec, ModelInfo
from triptych.transfer.channel import Channel, connected
from triptych.transfer.frames import Frame, no_slots
from triptych.transfer.messages import Answer, Ask, Cancel, Stop, pack
from triptych.transfer.shared_memory import SharedReceiver, SharedSender, Shipment
from triptych.understand.core import EngineCore
from triptych.understand.engine import EventStreams
from triptych.understand.loop import Command, EngineLoop
from triptych.understand.wire import (
    MIN_SHARED_BYTES,
    Events,
    Ready,
    Released,
    Submit,
    Supply,
    ToFront,
    pack_request,
    pack_supply,
    read_to_engine,
    read_to_front,
    unpack_request,
    unpack_supply,
)
from triptych.understand.withhold import HeldEmbeddings


class RemoteEngine:
    """An `EngineHandle`. Binds `address` (ipc://...) at once, so that the process can be started after; `start` returns
    when the engine has loaded its model. `lost` is to be called by whoever watches the process."""

    info: ModelInfo

    def __init__(self, address: str, shared: SharedSender | None = None) -> None:
        """`shared` is this handle's from now on: closed with it, or when the process is lost."""
        self._shared = shared
        self._channel = Channel(address, lambda frames: read_to_front(frames[0]), self._take)
        self._streams = EventStreams()
        self._held = HeldEmbeddings()
        self._submitted: dict[str, PreparedRequest] = {}  # whole, until their streams end
        self._supplies: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises InternalError if the process is lost before it is ready."""
        await self._channel.start()

    async def close(self) -> None:
        """Tells the engine to stop; its streams get their final events from it, or from here if it is slow."""
        if self._streams.lost is None:
            self._channel.send([pack(Stop())])
            await self._streams.wait_empty(timeout_s=5.0)
        self._streams.fail_all("the engine stopped")
        for task in self._supplies:
            task.cancel()
        if self._shared is not None:
            self._shared.close()
        await self._channel.close()

    def lost(self, why: str) -> None:
        """The process is gone: end every stream and every question."""
        self._streams.fail_all(why)
        self._channel.fail(why)
        if self._shared is not None:
            self._shared.close()

    async def submit(self, request: PreparedRequest) -> AsyncGenerator[Event]:
        light = self._held.lighten(request)
        frames = await self._packed(light.num_media_bytes, partial(pack_request, light))
        self._streams.open(request.request_id)
        self._submitted[request.request_id] = request
        try:
            self._channel.send(frames)
            async with aclosing(self._streams.follow(request.request_id, self.cancel)) as events:
                async for event in events:
                    yield event
        finally:
            del self._submitted[request.request_id]

    async def _supply(self, wanted: FeaturesWanted) -> None:
        """Items that the engine lacks after all. A request whose stream has ended is cancelled there too."""
        request = self._submitted.get(wanted.request_id)
        if request is None:
            return
        items = {index: request.items[index] for index in wanted.item_indices}
        self._held.asked(items.values())
        num_bytes = sum(item.num_bytes for item in items.values())
        try:
            self._channel.send(await self._packed(num_bytes, partial(pack_supply, wanted.request_id, items)))
        except Exception as error:  # no memory, say: this request alone ends, here and there
            message = f"its features cannot be sent: {type(error).__name__}"
            final = FinalEvent(wanted.request_id, FinishReason.ERROR, InternalError.code, message)
            self._streams.dispatch([final])
            self.cancel(wanted.request_id)

    async def _packed(self, num_bytes: int, pack_into: Callable[..., list[Any]]) -> list[Frame]:
        """Frames; what is large is copied into shared memory, off the event loop, and taken back if the caller goes."""
        if self._shared is None or num_bytes < MIN_SHARED_BYTES:
            return pack_into()
        shipment = Shipment(self._shared, MIN_SHARED_BYTES)
        copying = asyncio.get_running_loop().run_in_executor(None, pack_into, shipment.place)
        try:
            return await asyncio.shield(copying)
        except BaseException:
            copying.add_done_callback(lambda done: shipment.undo())
            raise

    def cancel(self, request_id: str) -> None:
        self._channel.send([pack(Cancel(request_id))])

    async def stats(self) -> dict[str, float]:
        answer: dict[str, float] = await self._channel.ask("stats")
        return answer | self._held.stats() | (self._shared.stats() if self._shared is not None else {})

    async def flush(self, cache: str) -> int:
        answer: int = await self._channel.ask("flush", cache)
        return answer

    async def forget(self) -> None:
        """See `EngineCore.forget`."""
        await self._channel.ask("forget")

    def _take(self, message: ToFront) -> None:
        match message:
            case Events(events):
                for event in events:
                    self._take_event(event)
            case Released(slot_ids):
                assert self._shared is not None
                for slot_id in slot_ids:
                    self._shared.release(slot_id)
            case Ready(info):
                self.info = info_from_wire(info)
                self._channel.ready()

    def _take_event(self, event: EngineEvent) -> None:
        match event:
            case FeaturesWanted():
                supply = asyncio.create_task(self._supply(event))
                self._supplies.add(supply)
                supply.add_done_callback(self._supplies.discard)
            case EmbeddingsDropped(keys):
                self._held.drop(keys)
            case _:
                self._streams.dispatch([event])


def info_to_wire(info: ModelInfo) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(info, builtin_types=(bytes,))
    return fields


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

    def send(self, events: list[EngineEvent]) -> None:
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
            case Supply():
                return self._supply(message, [frame.buffer for frame in frames])
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

    def _supply(self, message: Supply, buffers: list[Any]) -> Command:
        try:
            items = unpack_supply(message, buffers, self._open_slot)
        except TriptychError as error:
            fault = error
            return lambda core: core.fail(message.request_id, fault)
        return lambda core: core.supply(message.request_id, items)


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
    build: Callable[[Callable[[EngineEvent], None]], EngineCore],
    shared_fd: int | None = None,
) -> None:
    """The engine process's main: connect, say Ready, loop until Stop. `shared_fd` is the inherited shared memory."""
    with connected(address, zmq.Context()) as socket:
        loop: EngineLoop = EngineLoop(build, SocketMailbox(socket, lambda: loop.stop(), shared_fd))
        socket.send(pack(Ready(info_to_wire(info))))
        loop.run()

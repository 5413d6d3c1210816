"""One ZeroMQ socket pair (ipc) between the front and an engine process: the front's end, and how the process connects.

Nothing is limited here: who sends counts what it has open.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq
import zmq.asyncio

from triptych.core.errors import InternalError, from_wire
from triptych.transfer.frames import Frame
from triptych.transfer.futures import settle
from triptych.transfer.messages import Answer, Ask, pack

LOGGER = logging.getLogger("triptych.transfer")

Read = Callable[[Sequence[memoryview]], Any]


class Channel:
    """The front's end, owned by one event loop. Binds `address` (ipc://...) at once, so that the process can be started
    after. `read` makes a message of its frames; `take` gets every message but the answers to `ask`.

    `lost` says why the process is gone: nothing is sent from then on, and every question fails."""

    def __init__(self, address: str, read: Read, take: Callable[[Any], None]) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._read_message = read
        self._take = take
        self._ask_ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()
        self.lost: str | None = None

    async def start(self) -> None:
        """Returns when `ready` was called. Raises InternalError if the process is lost before."""
        self._reader = asyncio.create_task(self._read())
        await self._is_ready.wait()
        if self.lost is not None:
            raise InternalError(self.lost)

    def ready(self) -> None:
        """The process has said that it is."""
        self._is_ready.set()

    def fail(self, why: str) -> None:
        """The process is gone: end every question."""
        self.lost = why
        self._is_ready.set()
        for answer in self._answers.values():
            settle(answer, None, InternalError(why))

    async def close(self) -> None:
        self.fail(self.lost or "the engine stopped")
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()
        self._context.term()

    def send(self, frames: Sequence[Frame]) -> None:
        """At once: SNDHWM is 0, so there is nothing to wait for. Frames are not copied."""
        if self.lost is None and not self._socket.closed:
            self._socket.send_multipart(frames, copy=False)

    async def ask(self, what: str, argument: str = "") -> Any:
        """Raises what the engine raised, or InternalError when it is lost."""
        if self.lost is not None:
            raise InternalError(self.lost)
        ask_id = next(self._ask_ids)
        self._answers[ask_id] = answer = asyncio.get_running_loop().create_future()
        try:
            self.send([pack(Ask(ask_id, what, argument))])
            return await answer
        finally:
            del self._answers[ask_id]

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                self._handle([frame.buffer for frame in frames])
            except Exception:  # a mistake of ours: what comes after it is still read
                LOGGER.exception("a message of an engine was lost")

    def _handle(self, frames: Sequence[memoryview]) -> None:
        message = self._read_message(frames)
        if isinstance(message, Answer):
            self._settle(message)
        else:
            self._take(message)

    def _settle(self, answer: Answer) -> None:
        error = from_wire(answer.error_code, answer.error_message) if answer.error_code else None
        if answer.ask_id in self._answers:
            settle(self._answers[answer.ask_id], answer.result, error)


@contextmanager
def connected(address: str, context: zmq.Context[Any]) -> Iterator[Any]:
    """The process's end: a socket of `context`, which is ended with it; what was sent is still delivered."""
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close(linger=2000)
        context.term()

"""Server-sent events: frames, and a response that writes them as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from triptych.core.errors import InternalError, TriptychError
from triptych.http.status import error_json

DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


def frame(payload: Any) -> bytes:
    return b"data: " + _ENCODER.encode(payload) + b"\n\n"


def last_words(error: TriptychError) -> bytes:
    """The end of a stream that failed on the way."""
    return b"data: " + error_json(error) + b"\n\n" + DONE


class EventStream:
    """An ASGI response. Whoever makes it has awaited the first frame, so that an early failure still gets its status.

    A failure on the way is a last `{"error": ...}` frame: the status line is gone by then. `failure` keeps it for the
    record. `source`, from which `frames` reads, is closed with it, also when nothing was read.
    """

    def __init__(
        self, frames: AsyncGenerator[bytes], headers: Mapping[str, str], *, source: AsyncGenerator[Any] | None = None
    ) -> None:
        self._frames = frames
        self._source = source
        self.headers = dict(headers)
        self.failure: TriptychError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self.headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await self._write(send)
        finally:
            await self._frames.aclose()
            if self._source is not None:
                await self._source.aclose()

    async def _write(self, send: Send) -> None:
        try:
            async for data in self._frames:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            self.failure = error if isinstance(error, TriptychError) else InternalError("the server failed")
            await send({"type": "http.response.body", "body": last_words(self.failure), "more_body": False})
            if self.failure is not error:
                raise
        else:
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

"""One connection of a download: a GET at a time, on asyncio's streams and h11's reading of HTTP/1.1 (RFC 9112).

No more of a client than that: who may be connected to is `transport.py`'s business, which connection is used
`connections.py`'s, redirects, retries and limits `fetch.py`'s.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import h11

from triptych.core.config import FetchConfig

KEEP_ALIVE_S = 15.0
BUFFER_BYTES = 256 * 1024  # the socket is not read while twice this waits
_READ_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 100 * 1024

Header = tuple[bytes, bytes]


class TooLate(Exception):
    """A connect, read or write took longer than its deadline."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response's head; names are in lower case."""

    status: int
    headers: Sequence[Header]

    def header(self, name: bytes) -> bytes:
        """The first value, or nothing."""
        return next((value for key, value in self.headers if key == name), b"")


class _Reader(asyncio.StreamReader):
    """Knows how much came in: what comes on an idle connection is no answer to anything."""

    num_fed_bytes = 0

    def feed_data(self, data: Any) -> None:
        self.num_fed_bytes += len(data)
        super().feed_data(data)


class Connection:
    """Raises TooLate, OSError (ssl.SSLError among them) and h11.ProtocolError; after any of them only `close` is of
    use."""

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter, config: FetchConfig) -> None:
        self._reader = reader
        self._writer = writer
        self._config = config
        self._state = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._num_read_bytes = 0
        self._idle_since_s = time.monotonic()

    @classmethod
    async def open(
        cls, address: str, port: int, config: FetchConfig, *, timeout_s: float, tls: ssl.SSLContext | None, host: str
    ) -> Connection:
        """To an address, not a name; with `tls`, safe for `host`."""
        loop = asyncio.get_running_loop()
        reader = _Reader(limit=BUFFER_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            async with asyncio.timeout(timeout_s):
                transport, _ = await loop.create_connection(
                    lambda: protocol, address, port, ssl=tls, server_hostname=host if tls is not None else None
                )
        except TimeoutError:
            raise TooLate from None
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop), config)

    async def get(self, target: bytes, headers: Sequence[Header]) -> Response:
        """Send a request, read the answer's head."""
        request = self._state.send(h11.Request(method=b"GET", target=target, headers=list(headers)))
        end = self._state.send(h11.EndOfMessage())
        assert request is not None
        try:
            async with asyncio.timeout(self._config.read_timeout_s):
                self._writer.write(request + (end or b""))
                await self._writer.drain()
        except TimeoutError:
            raise TooLate from None
        while not isinstance(event := await self._next_event(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("no response")
        return Response(event.status_code, event.headers)

    async def body(self) -> AsyncIterator[bytes]:
        """The answer's body, as it comes."""
        while not isinstance(event := await self._next_event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise h11.RemoteProtocolError("the body broke off")
            yield bytes(event.data)

    async def _next_event(self) -> Any:
        while (event := self._state.next_event()) is h11.NEED_DATA:
            try:
                async with asyncio.timeout(self._config.read_timeout_s):
                    data = await self._reader.read(_READ_BYTES)
            except TimeoutError:
                raise TooLate from None
            self._num_read_bytes += len(data)
            self._state.receive_data(data)  # nothing: the server has closed
        return event

    def finish(self) -> bool:
        """After an exchange: whether the connection may be used again. It may where the answer was read to its end and
        nothing came after it."""
        if self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        if self._state.trailing_data[0]:
            return False
        self._state.start_next_cycle()
        self._idle_since_s = time.monotonic()
        return not self.is_stale()

    def is_stale(self) -> bool:
        """Idle, and of no more use: too old, closed by the server, or sent what nobody asked for."""
        is_old = time.monotonic() > self._idle_since_s + KEEP_ALIVE_S
        return is_old or self._reader.num_fed_bytes > self._num_read_bytes or self._reader.at_eof()

    def close(self) -> None:
        """At once: nobody is left to whom a proper end would matter."""
        self._writer.transport.abort()

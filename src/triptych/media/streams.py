"""httpcore's network streams on asyncio's own. What httpcore brings works on any event loop, and pays for that at every
read and write (docs/log.md).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpcore

BUFFER_BYTES = 256 * 1024  # the socket is not read while twice this waits


class _Reader(asyncio.StreamReader):
    """Knows how much came in: what comes on an idle connection is no answer to anything."""

    num_fed_bytes = 0

    def feed_data(self, data: Any) -> None:
        self.num_fed_bytes += len(data)
        super().feed_data(data)


async def connect(address: str, port: int, timeout_s: float | None) -> AsyncioStream:
    """To an address, not a name. Raises httpcore.ConnectTimeout and httpcore.ConnectError."""
    loop = asyncio.get_running_loop()
    reader = _Reader(limit=BUFFER_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    async with _errors(timeout_s, httpcore.ConnectTimeout, httpcore.ConnectError):
        transport, _ = await loop.create_connection(lambda: protocol, address, port)
    return AsyncioStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


class AsyncioStream(httpcore.AsyncNetworkStream):
    """One connection. Reads and writes raise httpcore's errors."""

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._num_read_bytes = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's signature
        async with _errors(timeout, httpcore.ReadTimeout, httpcore.ReadError):
            data = await self._reader.read(max_bytes)
        self._num_read_bytes += len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if buffer:
            async with _errors(timeout, httpcore.WriteTimeout, httpcore.WriteError):
                self._writer.write(buffer)
                await self._writer.drain()

    async def aclose(self) -> None:
        """At once: nobody is left to whom a proper end would matter."""
        self._writer.transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncioStream:
        try:
            async with _errors(timeout, httpcore.ConnectTimeout, httpcore.ConnectError):
                await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except BaseException:
            await self.aclose()
            raise
        return self

    def get_extra_info(self, info: str) -> Any:
        """What httpcore asks: `is_readable` of an idle connection means that it is of no more use."""
        if info == "is_readable":
            return self._reader.num_fed_bytes > self._num_read_bytes or self._reader.at_eof()
        name = {"client_addr": "sockname", "server_addr": "peername"}.get(info, info)
        return self._writer.get_extra_info(name)


@asynccontextmanager
async def _errors(
    timeout_s: float | None, late: type[httpcore.TimeoutException], broken: type[httpcore.NetworkError]
) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:  # ssl.SSLError among them
        raise broken(str(error)) from error

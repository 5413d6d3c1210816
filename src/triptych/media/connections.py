"""Open connections, used again: idle ones by origin, newest first, and how many may be in use at a time.

httpcore's connections without httpcore's pool: that looks at every idle connection, socket and all, for every request
that begins or ends, which for sixteen downloads at once cost as much as the downloads.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpcore

from triptych.core.config import FetchConfig

KEEP_ALIVE_S = 15.0
MAX_IDLE = 20

Origin = tuple[bytes, bytes, int | None]


@dataclass(slots=True)
class Exchange:
    """One request under way. `Connections.end` gives its connection back, exactly once."""

    response: httpcore.Response
    connection: httpcore.AsyncHTTPConnection
    origin: Origin


class Connections:
    """Owner of every connection of the downloads. At most `max_connections` are in use at a time, at most
    `max_connections_per_host` of them to one host, and at most MAX_IDLE wait to be used again. One event loop.

    Nothing comes from the environment: no proxy, no .netrc, no cookies.
    """

    def __init__(self, config: FetchConfig, backend: httpcore.AsyncNetworkBackend, tls: ssl.SSLContext) -> None:
        self._config = config
        self._backend = backend
        self._tls = tls
        self._in_use = asyncio.Semaphore(config.max_connections)
        self._hosts: dict[tuple[str, int], tuple[asyncio.Semaphore, int]] = {}
        self._idle: dict[Origin, list[httpcore.AsyncHTTPConnection]] = {}
        self._num_idle = 0

    @asynccontextmanager
    async def slot(self, host: str, port: int) -> AsyncIterator[None]:
        """The right to have one exchange with this host; waits for its turn."""
        key = (host, port)
        semaphore, users = self._hosts.get(key) or (asyncio.Semaphore(self._config.max_connections_per_host), 0)
        self._hosts[key] = (semaphore, users + 1)
        try:
            async with semaphore, self._in_use:
                yield
        finally:
            semaphore, users = self._hosts.pop(key)
            if users > 1:
                self._hosts[key] = (semaphore, users - 1)

    async def begin(self, request: httpcore.Request) -> Exchange:
        """Send a request and read the answer's head. Raises httpcore's errors and what the backend raises."""
        origin: Origin = (request.url.scheme, request.url.host, request.url.port)
        connection = await self._take_idle(origin) or self._opened(request.url.origin)
        try:
            return Exchange(await connection.handle_async_request(request), connection, origin)
        except BaseException:
            await connection.aclose()
            raise

    async def end(self, exchange: Exchange) -> None:
        """Keep the connection where the answer was read to its end, else close it."""
        await exchange.response.aclose()
        if not exchange.connection.is_available():
            await exchange.connection.aclose()
            return
        self._idle.setdefault(exchange.origin, []).append(exchange.connection)
        self._num_idle += 1
        while self._num_idle > MAX_IDLE:
            await self._close_oldest()

    async def close(self) -> None:
        while self._num_idle:
            await self._close_oldest()

    def _opened(self, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        return httpcore.AsyncHTTPConnection(
            origin=origin,
            ssl_context=self._tls,
            keepalive_expiry=KEEP_ALIVE_S,
            http1=True,
            http2=False,
            retries=0,
            network_backend=self._backend,
        )

    async def _take_idle(self, origin: Origin) -> httpcore.AsyncHTTPConnection | None:
        while waiting := self._idle.get(origin):
            connection = self._pop(origin, waiting, -1)
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return None

    async def _close_oldest(self) -> None:
        """Of the origin that was first to have one."""
        origin, waiting = next(iter(self._idle.items()))
        await self._pop(origin, waiting, 0).aclose()

    def _pop(
        self, origin: Origin, waiting: list[httpcore.AsyncHTTPConnection], at: int
    ) -> httpcore.AsyncHTTPConnection:
        self._num_idle -= 1
        connection = waiting.pop(at)
        if not waiting:
            del self._idle[origin]
        return connection

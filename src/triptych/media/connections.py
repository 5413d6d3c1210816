"""Open connections, used again: idle ones by origin, newest first, and how many may be in use at a time.

Made for many small downloads at the same moment: nothing is done per idle connection, and little per request
(docs/log.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from triptych.core.config import FetchConfig
from triptych.media.http1 import Connection, Header, Response
from triptych.media.policy import Url
from triptych.media.transport import Connector

MAX_IDLE = 20


@dataclass(slots=True)
class Exchange:
    """One request under way. `Connections.end` gives its connection back, exactly once."""

    response: Response
    connection: Connection
    origin: str


class Connections:
    """Owner of every connection of the downloads. At most `max_connections` are in use at a time, at most
    `max_connections_per_host` of them to one host, and at most MAX_IDLE wait to be used again. One event loop.

    Nothing comes from the environment: no proxy, no .netrc, no cookies.
    """

    def __init__(self, config: FetchConfig, connector: Connector) -> None:
        self._config = config
        self._connector = connector
        self._in_use = asyncio.Semaphore(config.max_connections)
        self._hosts: dict[tuple[str, int], tuple[asyncio.Semaphore, int]] = {}
        self._idle: dict[str, list[Connection]] = {}
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

    async def begin(self, url: Url, headers: Sequence[Header]) -> Exchange:
        """Send a GET and read the answer's head. Raises what `Connector.open` and `Connection.get` raise."""
        connection = self._take_idle(url.origin) or await self._connector.open(url)
        try:
            return Exchange(await connection.get(url.target.encode(), headers), connection, url.origin)
        except BaseException:
            connection.close()
            raise

    def end(self, exchange: Exchange) -> None:
        """Keep the connection where the answer was read to its end, else close it."""
        if not exchange.connection.finish():
            exchange.connection.close()
            return
        self._idle.setdefault(exchange.origin, []).append(exchange.connection)
        self._num_idle += 1
        while self._num_idle > MAX_IDLE:
            self._close_oldest()

    def close(self) -> None:
        while self._num_idle:
            self._close_oldest()

    def _take_idle(self, origin: str) -> Connection | None:
        while waiting := self._idle.get(origin):
            connection = self._pop(origin, waiting, -1)
            if not connection.is_stale():
                return connection
            connection.close()
        return None

    def _close_oldest(self) -> None:
        """Of the origin that was first to have one."""
        origin, waiting = next(iter(self._idle.items()))
        self._pop(origin, waiting, 0).close()

    def _pop(self, origin: str, waiting: list[Connection], at: int) -> Connection:
        self._num_idle -= 1
        connection = waiting.pop(at)
        if not waiting:
            del self._idle[origin]
        return connection

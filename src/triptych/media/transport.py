"""Connects to the address that was checked, and to no other: names are resolved here, once, under the policy.

A network backend for httpcore. TLS still verifies the host name, because httpcore takes it from the URL.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any, Protocol

import httpcore

from triptych.core.config import FetchConfig
from triptych.core.errors import SourceTimeout, SourceUnavailable
from triptych.media.addresses import Address
from triptych.media.policy import Policy, Url
from triptych.media.streams import connect

RESOLVER_THREADS = 32  # a lookup that its caller gave up still holds one, until the name server's own deadline


class Resolver(Protocol):
    async def resolve(self, host: str, port: int) -> list[Address]:
        """Every address of a name, in order of preference. Raises OSError."""
        ...

    def close(self) -> None: ...


class SystemResolver:
    """getaddrinfo in threads of its own: a slow name server holds up no other work. A name that is being looked up is
    waited for, not looked up twice: one thread a name, however many ask and give up."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="media-dns")
        self._running: dict[str, asyncio.Future[list[Address]]] = {}

    async def resolve(self, host: str, port: int) -> list[Address]:
        running = self._running.get(host)
        if running is None:
            running = asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host)
            self._running[host] = running
            running.add_done_callback(lambda done: self._landed(host, done))
        return list(await asyncio.shield(running))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _landed(self, host: str, done: asyncio.Future[list[Address]]) -> None:
        del self._running[host]
        if not done.cancelled():
            done.exception()  # retrieved, so that a failure nobody waits for any more makes no noise


def _look_up(host: str) -> list[Address]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(ip_address(entry[4][0]) for entry in found))


class PolicyBackend(httpcore.AsyncNetworkBackend):
    """`connect_tcp` resolves, judges every address of the answer, and connects to one of the judged."""

    def __init__(self, policy: Policy, config: FetchConfig, resolver: Resolver) -> None:
        self._policy = policy
        self._config = config
        self._resolver = resolver

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises ForbiddenSource, SourceTimeout, SourceUnavailable, and httpcore's errors of connecting."""
        addresses = await self._checked_addresses(host, port)
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        for number, address in enumerate(addresses):
            left_s = max(0.05, deadline_s - time.monotonic())
            try:
                return await connect(str(address), port, left_s / (len(addresses) - number))
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if number == len(addresses) - 1:
                    raise
        raise SourceUnavailable(f"{host[:80]!r} has no address")

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        raise NotImplementedError("media never come over a local socket")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _checked_addresses(self, host: str, port: int) -> list[Address]:
        """All or none: one inside address among the answers spoils the name."""
        url = Url("https", host, port, "/")
        try:
            addresses: list[Address] = [ip_address(host)]
        except ValueError:
            addresses = await self._resolved(host, port)
        for address in addresses:
            self._policy.check_address(address, url)
        return addresses

    async def _resolved(self, host: str, port: int) -> list[Address]:
        try:
            async with asyncio.timeout(self._config.dns_timeout_s):
                return await self._resolver.resolve(host, port)
        except TimeoutError:
            raise SourceTimeout(f"{host[:80]!r} was not resolved within {self._config.dns_timeout_s:g} s") from None
        except OSError:
            raise SourceUnavailable(f"{host[:80]!r} could not be resolved") from None


def make_tls(ca_file: str | None = None) -> ssl.SSLContext:
    """Certificates are checked, and their names. Built by hand: `ssl.create_default_context` would write every key to
    the file that SSLKEYLOGFILE names. `ca_file` adds authorities (PEM) to the system's. Raises OSError."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if ca_file is not None:
        tls.load_verify_locations(cafile=ca_file)
    return tls

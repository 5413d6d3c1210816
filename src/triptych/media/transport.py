"""Connects to the address that was checked, and to no other: names are resolved here, once, under the policy.

TLS verifies the URL's host name, whatever address was chosen.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Protocol

from triptych.core.config import FetchConfig
from triptych.core.errors import SourceTimeout, SourceUnavailable
from triptych.media.addresses import Address
from triptych.media.http1 import Connection, TooLate
from triptych.media.policy import Policy, Url

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


class Connector:
    """`open` resolves, judges every address of the answer, and connects to one of the judged."""

    def __init__(self, policy: Policy, config: FetchConfig, resolver: Resolver, tls: ssl.SSLContext) -> None:
        self._policy = policy
        self._config = config
        self._resolver = resolver
        self._tls = tls

    async def open(self, url: Url) -> Connection:
        """Raises ForbiddenSource, SourceTimeout, SourceUnavailable, and `Connection.open`'s errors of the last address.
        A TLS failure is final: the next address is not tried."""
        addresses = await self._checked_addresses(url.host, url.port)
        tls = self._tls if url.scheme == "https" else None
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        for number, address in enumerate(addresses):
            left_s = max(0.05, deadline_s - time.monotonic()) / (len(addresses) - number)
            try:
                return await Connection.open(
                    str(address), url.port, self._config, timeout_s=left_s, tls=tls, host=url.host
                )
            except ssl.SSLError:
                raise
            except (OSError, TooLate):
                if number == len(addresses) - 1:
                    raise
        raise SourceUnavailable(f"{url.host[:80]!r} has no address")

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

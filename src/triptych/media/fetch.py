"""Downloads under the policy: every hop judged, every wait bounded, every byte counted while it comes in."""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import h11

from triptych.cache.lru import ByteLru
from triptych.core.config import FetchConfig
from triptych.core.errors import (
    BudgetExceeded,
    SourceTimeout,
    SourceUnavailable,
    TriptychError,
)
from triptych.media.connections import Connections, Exchange
from triptych.media.http1 import Header, Response, TooLate
from triptych.media.policy import Policy, Url
from triptych.media.transport import Connector, Resolver, SystemResolver, make_tls

USER_AGENT = "triptych"
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_WORTH_A_RETRY = frozenset({502, 503, 504})
_CHUNK_BYTES = 64 * 1024
_MAX_PARTS = 1024
_ANY_WRAPPER = 47  # zlib's word for "gzip or zlib, by its header"

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ByteLimit:
    """`name` is the budget's field, for the refusal."""

    name: str
    max_bytes: int

    def check(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise BudgetExceeded(self.name, allowed=self.max_bytes, requested=num_bytes)


@dataclass(frozen=True, slots=True)
class Validated:
    """A body that its server named: what the response cache holds."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]  # If-None-Match, If-Modified-Since


class _Again(Exception):
    """Nothing of an answer was read: the request may be sent once more."""

    def __init__(self, error: TriptychError) -> None:
        super().__init__(error.message)
        self.error = error


class Fetcher:
    """Owner of the connections and the response cache. One event loop."""

    def __init__(
        self,
        policy: Policy,
        config: FetchConfig,
        *,
        resolver: Resolver | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.policy = policy
        self.config = config
        self.cache: ByteLru[tuple[str, str], Validated] = ByteLru(config.response_cache_bytes)
        self._resolver = resolver or SystemResolver()
        connector = Connector(policy, config, self._resolver, tls or make_tls(config.ca_file))
        self._connections = Connections(config, connector)
        self.num_bytes = 0
        self.num_requests = 0

    async def close(self) -> None:
        self._connections.close()
        self._resolver.close()

    async def fetch(
        self, source: str, limit: ByteLimit, *, max_s: float, tenant: str = "", on_bytes: OnBytes | None = None
    ) -> bytes:
        """The body that `source` leads to. `on_bytes` is told of every block as it arrives, and may raise.

        Raises ForbiddenSource and InvalidRequest before a connection is made, at every hop; SourceTimeout after
        `max_s` or one of the configured deadlines; SourceUnavailable; BudgetExceeded by `limit`.
        """
        total_s = min(max_s, self.config.total_timeout_s)
        try:
            url = self.policy.check_url(source)
            async with asyncio.timeout(total_s):
                return await self._follow(url, limit, tenant, on_bytes)
        except TimeoutError:
            raise SourceTimeout(f"{url.origin} did not deliver within {total_s:g} s") from None

    async def _follow(self, url: Url, limit: ByteLimit, tenant: str, on_bytes: OnBytes | None) -> bytes:
        for _ in range(self.policy.config.max_redirects + 1):
            answer = await self._retried(url, limit, tenant, on_bytes)
            if isinstance(answer, bytes):
                return answer
            url = self.policy.check_url(answer.text)
        raise SourceUnavailable(f"more than {self.policy.config.max_redirects} redirects (max_redirects)")

    async def _retried(self, url: Url, limit: ByteLimit, tenant: str, on_bytes: OnBytes | None) -> bytes | _Redirect:
        for attempts_left in range(self.config.max_retries, -1, -1):
            try:
                async with self._connections.slot(url.host, url.port):
                    return await self._get(url, (tenant, url.origin + url.target), limit, on_bytes)
            except _Again as again:
                if attempts_left == 0:
                    raise again.error from None
                await asyncio.sleep(0.1)
        raise AssertionError("unreachable")

    async def _get(
        self, url: Url, cache_key: tuple[str, str], limit: ByteLimit, on_bytes: OnBytes | None
    ) -> bytes | _Redirect:
        cached = self.cache.peek(cache_key)
        self.num_requests += 1
        with _network_errors(url):
            exchange = await self._connections.begin(url, request_headers(url, cached))
        response = exchange.response
        try:
            if response.status in _REDIRECTS:
                return _Redirect(url.joined(_location(response)))
            if response.status == 304 and cached is not None:
                self.cache.lookup(cache_key)
                limit.check(len(cached.body))
                return cached.body
            _check_status(response.status, url)
            body = await self._body(exchange, url, limit, on_bytes)
        finally:
            self._connections.end(exchange)
        self._remember(cache_key, response, body)
        return body

    async def _body(self, exchange: Exchange, url: Url, limit: ByteLimit, on_bytes: OnBytes | None) -> bytes:
        """The whole body, its size checked by the declared length, then as it arrives, then as it unpacks."""
        length = exchange.response.header(b"content-length")
        if length.isdigit():
            limit.check(int(length))
        unpacker = _Unpacker(exchange.response.header(b"content-encoding").decode("latin-1"), url)
        blocks: list[bytes] = []
        num_raw = num_bytes = 0
        with _network_errors(url, has_answer=True):
            async for raw in exchange.connection.body():
                num_raw += len(raw)
                limit.check(num_raw)
                for block in unpacker.feed(raw):
                    num_bytes += len(block)
                    limit.check(num_bytes)
                    blocks.append(block)
                    if on_bytes is not None:
                        on_bytes(len(block))
                    if num_bytes > num_raw:  # what unpacks to much more than it was takes time: others come between
                        await asyncio.sleep(0)
        unpacker.finish()
        self.num_bytes += num_raw
        return b"".join(blocks)

    def _remember(self, key: tuple[str, str], response: Response, body: bytes) -> None:
        """Keep a body that can be asked about again by its validator."""
        if self.cache.capacity_bytes:
            self.cache.misses += 1
        control = response.header(b"cache-control").lower()
        if b"no-store" in control or response.header(b"vary").strip().lower() not in (b"", b"accept-encoding"):
            return
        headers = [
            (asked, value)
            for asked, given in ((b"If-None-Match", b"etag"), (b"If-Modified-Since", b"last-modified"))
            if (value := response.header(given))
        ]
        if headers:
            self.cache.put(key, Validated(body, tuple(headers)), len(body) + 1024)


def request_headers(url: Url, cached: Validated | None) -> list[Header]:
    return [
        (b"Host", url.host_header.encode()),
        (b"User-Agent", USER_AGENT.encode()),
        (b"Accept", b"image/*,video/*,audio/*,*/*;q=0.5"),
        (b"Accept-Encoding", b"identity"),
        *(cached.headers if cached is not None else ()),
    ]


@dataclass(frozen=True, slots=True)
class _Redirect:
    text: str


class _network_errors:  # noqa: N801 - used as a context manager
    """Errors of the connection as leaves of our tree; `_Again` where nothing of an answer had come."""

    def __init__(self, url: Url, *, has_answer: bool = False) -> None:
        self._origin = url.origin
        self._has_answer = has_answer

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TooLate):
            raise SourceTimeout(f"{self._origin} did not answer in time") from None
        if (reason := _tls_failure(error)) is not None:
            raise SourceUnavailable(f"{self._origin} could not be reached safely: {reason}") from None
        if isinstance(error, TimeoutError):  # the whole download's deadline, which `fetch` reports
            return
        if isinstance(error, (h11.ProtocolError, OSError)):
            text = "broke off" if self._has_answer else "could not be reached"
            unavailable = SourceUnavailable(f"{self._origin} {text}")
            raise (unavailable if self._has_answer else _Again(unavailable)) from None


def _tls_failure(error: BaseException | None) -> str | None:
    """What went wrong while the connection was being made safe; None where it was something else. Not worth a retry."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused ({error.verify_message.rstrip('.')})"
    return "the TLS handshake failed" if isinstance(error, ssl.SSLError) else None


def _check_status(status: int, url: Url) -> None:
    if status in _WORTH_A_RETRY:
        raise _Again(SourceUnavailable(f"{url.origin} answered with status {status}"))
    if status != 200:
        raise SourceUnavailable(f"{url.origin} answered with status {status}")


def _location(response: Response) -> str:
    location = response.header(b"location")
    if not location:
        raise SourceUnavailable(f"a redirect (status {response.status}) without a location")
    return location.decode("utf-8", "replace")


class _Unpacker:
    """Blocks of at most 64 KiB from what arrives, so that a compressed bomb is cut where the limit is."""

    def __init__(self, encoding: str, url: Url) -> None:
        name = encoding.strip().lower()
        if name not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise SourceUnavailable(f"{url.origin} answered in content encoding {name[:20]!r}, which was not asked for")
        self._origin = url.origin
        self._num_parts = 1
        self._inflater = None if name in ("", "identity") else zlib.decompressobj(wbits=_ANY_WRAPPER)

    def feed(self, raw: bytes) -> Iterator[bytes]:
        if self._inflater is None:
            yield raw
            return
        while True:
            if self._inflater.eof:  # a packed body may have several parts, one after another
                raw = self._inflater.unused_data + raw
                if not raw:
                    return
                self._num_parts += 1
                if self._num_parts > _MAX_PARTS:
                    raise SourceUnavailable(f"{self._origin} sent a body of more than {_MAX_PARTS} packed parts")
                self._inflater = zlib.decompressobj(wbits=_ANY_WRAPPER)
            try:
                block = self._inflater.decompress(raw, _CHUNK_BYTES)
            except zlib.error:
                raise SourceUnavailable(f"{self._origin} sent a body that does not unpack") from None
            yield block
            raw = b"" if self._inflater.eof else self._inflater.unconsumed_tail  # at the end both hold what is left
            if not raw and len(block) < _CHUNK_BYTES and not self._inflater.unused_data:
                return

    def finish(self) -> None:
        if self._inflater is not None and not self._inflater.eof:
            raise SourceUnavailable(f"{self._origin} sent a body that is cut off")

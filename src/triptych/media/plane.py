"""The media plane: from what a request refers to, to bytes within budget, to pixels and samples. In the front process.

policy -> fetch -> sniff and header -> budget -> identity (`open`), then, only where a cache does not have the product,
`decode`. Everything of a request runs at once; nothing of it runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from blake3 import blake3

from triptych.cache.single_flight import SingleFlight
from triptych.core.clock import Clock, MonotonicClock
from triptych.core.config import MediaConfig, Tier
from triptych.core.errors import ForbiddenSource, InvalidRequest, TriptychError
from triptych.core.media import Decoded, DecodeSpec, MediaBlob, MediaHeader, MediaRef, Modality, OnOpen
from triptych.media import decode as decoders
from triptych.media.aliases import Content, MediaAliases
from triptych.media.budget import (
    DecodeGuard,
    check_counts,
    check_decode,
    check_header,
    item_bytes_limit,
)
from triptych.media.costs import decode_cost_s
from triptych.media.fetch import ByteLimit, Fetcher
from triptych.media.gather import Arrival, OpenRequest
from triptych.media.inline import decode_data_url, read_local
from triptych.media.policy import Policy
from triptych.media.pool import DecodePool
from triptych.media.transport import Resolver

INLINE_BYTES = 256 * 1024  # data: URLs up to this size are decoded on the event loop


class MediaPlane:
    """Owner of the fetcher, the decode pool and the media ids. One event loop; start it, and close it, there."""

    def __init__(
        self, config: MediaConfig | None = None, clock: Clock | None = None, *, resolver: Resolver | None = None
    ) -> None:
        self.config = config or MediaConfig()
        self.policy = Policy(self.config.policy)
        self.aliases = MediaAliases(self.config.media_id_alias_bytes)
        self._clock = clock or MonotonicClock()
        self._resolver = resolver
        self._pool = DecodePool(self.config.decode_workers, self.config.decode_queue, self._clock)
        self._fetcher: Fetcher | None = None
        self._fetches: SingleFlight[Any, bytes] = SingleFlight()
        self._decodes: SingleFlight[Any, Decoded] = SingleFlight()
        self._arrivals: dict[Any, Arrival] = {}
        self._num_refused = 0

    async def __aenter__(self) -> MediaPlane:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        if self._fetcher is None:
            self._fetcher = Fetcher(self.policy, self.config.fetch, resolver=self._resolver)
            self._pool.start()

    async def close(self) -> None:
        """End what is in flight, and the threads. A closed plane stays closed."""
        await self._fetches.close()
        await self._decodes.close()
        await asyncio.to_thread(self._pool.close)
        if self._fetcher is not None:
            await self._fetcher.close()

    async def open(
        self, refs: Sequence[MediaRef], *, tier: Tier, tenant: str, on_open: OnOpen | None = None
    ) -> list[MediaBlob]:
        """Every item's bytes, header and digest, in order; nothing is decoded yet.

        All items at once; the first failure cancels the others and is raised, its `param` naming the item. `on_open`
        is told of each item while the others are still on their way, if the request so far is within its budget; what
        it raises is a failure of that item. Raises ForbiddenSource, SourceUnavailable, SourceTimeout, InvalidMedia,
        UnsupportedMedia, BudgetExceeded, UnknownMediaId, Conflict, InvalidRequest, Overloaded.
        """
        check_counts(refs, tier)
        request = OpenRequest(tier, tenant)

        async def open_one(index: int, ref: MediaRef) -> MediaBlob:
            blob = await self._open_one(ref, request)
            request.add_header(blob.header)
            if on_open is not None:
                on_open(index, blob)
            return blob

        return await request.run_all([open_one(*each) for each in enumerate(refs)])

    async def decode(self, blob: MediaBlob, spec: DecodeSpec, *, tier: Tier) -> Decoded:
        """Pixels or samples. The same content with the same spec, asked for twice at the same moment, is decoded once:
        the result is shared, and must not be written to. Raises InvalidMedia, UnsupportedMedia, BudgetExceeded,
        Overloaded."""
        try:
            check_header(blob.header, tier)
            check_decode(blob.header, spec, tier)
            key = (blob.digest, blob.header.modality, spec.key(), tier)
            return await self._decodes.run(key, lambda: self._decode(blob, spec, tier))
        except TriptychError as error:
            raise with_param(error, blob.param) from None

    def flush(self) -> int:
        """Forget all media ids and cached responses. Returns how many entries went."""
        return self.aliases.cache.flush() + (self._fetcher.cache.flush() if self._fetcher else 0)

    def stats(self) -> dict[str, float]:
        """Gauges and counters by the names that `metrics.names.sample_for` knows, and a few more."""
        stats = {
            "media_decode_queue_depth": float(self._pool.num_waiting),
            "media_fetch_queue_depth": float(self._fetches.num_in_flight),
            "decode_workers_busy": float(self._pool.num_busy),
            "decode_workers": float(self._pool.num_workers),
            "media_decode_busy_ms": self._pool.busy_s * 1e3,
            "media_decode_wait_ms": self._pool.wait_s * 1e3,
            "media_decodes": float(self._decodes.num_started),
            "media_decodes_joined": float(self._decodes.num_joined),
            "media_fetches_joined": float(self._fetches.num_joined),
            "media_sources_refused": float(self._num_refused),
            **self.aliases.cache.stats("media_id"),
        }
        if self._fetcher is not None:
            stats["media_fetched_bytes"] = float(self._fetcher.num_bytes)
            stats["media_fetches"] = float(self._fetcher.num_requests)
            stats |= self._fetcher.cache.stats("response")
        return stats

    # one item

    async def _open_one(self, ref: MediaRef, request: OpenRequest) -> MediaBlob:
        started_s = self._clock.now_s()
        try:
            content, header = await self._read(ref, request)
            check_header(header, request.tier)
            if ref.media_id is not None and ref.source is not None:
                self.aliases.register(request.tenant, ref.media_id, content)
        except TriptychError as error:
            self._num_refused += isinstance(error, ForbiddenSource)
            raise with_param(error, ref.param) from None
        fetch_ms = (self._clock.now_s() - started_s) * 1e3
        return MediaBlob(header, content.data, content.digest, ref.param, dict(ref.options), fetch_ms)

    async def _read(self, ref: MediaRef, request: OpenRequest) -> tuple[Content, MediaHeader]:
        if ref.source is None:
            if ref.media_id is None:
                raise InvalidRequest("a media item needs a source, or a media_id that stands for one")
            content = self.aliases.resolve(request.tenant, ref.media_id)
            request.add_bytes(len(content.data))
            return content, await self._pool.run(lambda: _header(content.data, ref.modality, request.tier))
        data = await self._bytes(ref.source, request)
        if not data:
            raise InvalidRequest("the media item is empty")
        return await self._pool.run(lambda: _identify(data, ref.modality, request.tier))

    async def _bytes(self, source: str | bytes, request: OpenRequest) -> bytes:
        limit = ByteLimit(*item_bytes_limit(request.tier, request.num_bytes))
        if isinstance(source, bytes):
            limit.check(len(source))
            request.add_bytes(len(source))
            return source
        scheme = self.policy.scheme_of(source)
        if scheme in ("https", "http"):
            return await self._download(source, limit, request)
        data = await self._inline(scheme, source, limit)
        request.add_bytes(len(data))
        return data

    async def _inline(self, scheme: str, source: str, limit: ByteLimit) -> bytes:
        if scheme == "data":
            if len(source) <= INLINE_BYTES and "%" not in source:
                return decode_data_url(source, limit.name, limit.max_bytes)
            return await self._pool.run(lambda: decode_data_url(source, limit.name, limit.max_bytes))
        root = self.config.policy.local_root
        assert root is not None, scheme
        return await self._pool.run(lambda: read_local(source, root, limit.name, limit.max_bytes))

    async def _download(self, source: str, limit: ByteLimit, request: OpenRequest) -> bytes:
        """One download for all who want this URL at this moment, each of them charged as the bytes come in."""
        fetcher = self._fetcher
        assert fetcher is not None, "the media plane is not started"
        max_s = request.tier.max_download_s
        key = (request.tenant, source, limit, max_s)
        arrival = self._arrivals.setdefault(key, Arrival())
        arrival.join(request)
        try:
            data = await self._fetches.run(
                key,
                lambda: fetcher.fetch(source, limit, max_s=max_s, tenant=request.tenant, on_bytes=arrival.add),
            )
            request.add_bytes(len(data) - arrival.num_bytes)
            return data
        finally:
            arrival.leave(request)
            if not arrival.requests:
                self._arrivals.pop(key, None)

    async def _decode(self, blob: MediaBlob, spec: DecodeSpec, tier: Tier) -> Decoded:
        return await self._pool.run(
            lambda: decoders.decode(blob.data, blob.header, spec, DecodeGuard(tier)),
            cost_s=decode_cost_s(blob.header, spec),
            max_s=tier.max_decode_s,
        )


def with_param(error: TriptychError, param: str | None, *, replace: bool = False) -> TriptychError:
    """The same error naming a request field; with `replace`, also in place of another's. A copy: single flight gives
    one error object to many."""
    if param is None or (error.param is not None and not replace):
        return error
    copy = type(error).__new__(type(error))
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    copy.param = param
    copy.__cause__ = error.__cause__
    return copy


def _header(data: bytes, modality: Modality, tier: Tier) -> MediaHeader:
    return decoders.inspect(data, modality, DecodeGuard(tier))


def _identify(data: bytes, modality: Modality, tier: Tier) -> tuple[Content, MediaHeader]:
    """Header first: what is over budget is not worth a digest."""
    header = _header(data, modality, tier)
    return Content(data, blake3(data).digest()), header

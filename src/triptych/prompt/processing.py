"""Decoded media through the model's processor, off the event loop, behind a cache that spares the decode as well.

The same item asked for twice at the same moment is decoded and processed once. Failures are not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from triptych.cache.lru import ByteLru
from triptych.cache.single_flight import SingleFlight
from triptych.core.clock import Clock
from triptych.core.errors import TriptychError
from triptych.core.media import Decoded, DecodeSpec, MediaBlob
from triptych.media.costs import decoded_bytes
from triptych.media.plane import with_param
from triptych.models.base import Layout, ProcessedItem
from triptych.prompt.gate import ByteGate
from triptych.prompt.identity import processed_key

MAX_DECODED_BYTES = 2**30

Decode = Callable[[MediaBlob, DecodeSpec], Awaitable[Decoded]]


@dataclass(frozen=True, slots=True)
class Processed:
    """`key` names the item's features: content, decode, processor, options."""

    key: bytes
    item: ProcessedItem


class ItemProcessor:
    """Owner of one model's processor cache and of the threads that fill it. One event loop.

    At most `max_decoded_bytes` of pixels and samples wait for a thread or are in one: where the processor is slower
    than the decoders, decoding waits, and memory does not grow with the number of requests.
    """

    def __init__(
        self, layout: Layout, cache_bytes: int, workers: int, time: Clock, max_decoded_bytes: int = MAX_DECODED_BYTES
    ) -> None:
        self._layout = layout
        self._time = time
        self._cache: ByteLru[bytes, ProcessedItem] = ByteLru(cache_bytes)
        self._gate = ByteGate(max_decoded_bytes)
        self._flights: SingleFlight[bytes, ProcessedItem] = SingleFlight()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="processor")

    def stats(self) -> dict[str, float]:
        return self._cache.stats("processor") | {
            "media_decoded_bytes": float(self._gate.num_bytes),
            "decoded_queue_depth": float(self._gate.num_waiting),
        }

    def flush(self) -> int:
        return self._cache.flush()

    def forget(self) -> None:
        """Empty, and its counters at zero: as if no request had come."""
        self._cache.flush()
        self._cache.reset_counters()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def process(self, blob: MediaBlob, decode: Decode) -> Processed:
        """One item's features, from the cache or made now. Raises what `decode` and the layout raise, naming
        `blob.param`."""
        spec = self._layout.decode_spec(blob.header, blob.options)
        key = processed_key(blob, spec, self._layout.processor_key)
        item = self._cache.lookup(key)
        if item is None:
            try:
                item = await self._flights.run(key, lambda: self._fill(key, blob, spec, decode))
            except TriptychError as error:  # shared with whoever waits for the same item: each names its own field
                raise with_param(error, blob.param, replace=True) from None
        return Processed(key, item)

    async def _fill(self, key: bytes, blob: MediaBlob, spec: DecodeSpec, decode: Decode) -> ProcessedItem:
        generation = self._cache.generation
        started_s = self._time.now_s()
        async with self._gate.inside(decoded_bytes(blob.header, spec)):
            decoded = await decode(blob, spec)
            loop = asyncio.get_running_loop()
            item = await loop.run_in_executor(self._threads, self._layout.process, decoded, blob.options)
            del decoded
        cost_ms = (self._time.now_s() - started_s) * 1e3
        self._cache.put(key, item, item.num_bytes, cost_ms=cost_ms, generation=generation)
        return item

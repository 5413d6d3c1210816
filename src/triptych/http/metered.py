"""The media plane as one request sees it: the same calls, and a count of what was admitted and decoded."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.core.config import Tier
from triptych.core.media import Decoded, DecodeSpec, MediaBlob, MediaRef, OnOpen
from triptych.http.seams import Media
from triptych.metrics.cost import MediaCost


class MeteredMedia:
    """`num_decoded` counts the items that no processor cache answered."""

    def __init__(self, media: Media, cost: MediaCost) -> None:
        self._media = media
        self._cost = cost
        self.num_opened = 0
        self.num_decoded = 0

    async def open(
        self, refs: Sequence[MediaRef], *, tier: Tier, tenant: str, on_open: OnOpen | None = None
    ) -> list[MediaBlob]:
        blobs = await self._media.open(refs, tier=tier, tenant=tenant, on_open=on_open)
        self.num_opened += len(blobs)
        for blob in blobs:
            self._cost.add(blob.header)
        return blobs

    async def decode(self, blob: MediaBlob, spec: DecodeSpec, *, tier: Tier) -> Decoded:
        self.num_decoded += 1
        return await self._media.decode(blob, spec, tier=tier)

    def flush(self) -> int:
        return self._media.flush()

    def stats(self) -> dict[str, float]:
        return self._media.stats()

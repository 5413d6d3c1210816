"""A request's media on its way in: opened, sized and made into features, each item as soon as its own header is known.

No item waits for another's download. What is begun early is what fits: an item is decoded only while the request so far
is within its tier and the model's context, so that a request over budget costs no more than one within it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from triptych.core.clock import Clock
from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, TriptychError
from triptych.core.media import Decoded, DecodeSpec, MediaBlob, MediaRef, Modality, OnOpen
from triptych.core.prepared import EncoderItem
from triptych.core.stages import Stage, StageClock
from triptych.models.base import ItemSize, Layout, ModelInfo
from triptych.prompt.identity import embedding_key
from triptych.prompt.parts import EmbedsPart
from triptych.prompt.precomputed import read_part
from triptych.prompt.processing import ItemProcessor, Processed


class Media(Protocol):
    """What is asked of `media.plane.MediaPlane`."""

    async def open(
        self, refs: Sequence[MediaRef], *, tier: Tier, tenant: str, on_open: OnOpen | None = None
    ) -> list[MediaBlob]: ...

    async def decode(self, blob: MediaBlob, spec: DecodeSpec, *, tier: Tier) -> Decoded: ...


@dataclass(slots=True)
class Item:
    """One media part. `size` is the header's promise until the features are made, then theirs; `encoder_item` is there
    from the start for embeddings that came with the request."""

    modality: Modality
    size: ItemSize
    encoder_item: EncoderItem | None = None


@dataclass(slots=True)
class _Room:
    """What is left of a request's limits, for work that begins before all of it is known."""

    visual_tokens: int
    tokens: int

    def take(self, item: Item) -> bool:
        self.visual_tokens -= _num_visual(item)
        self.tokens -= item.size.num_embeds
        return self.visual_tokens >= 0 and self.tokens > 0


class MediaIntake:
    """Between the media plane and one model's processor. One event loop."""

    def __init__(
        self, layout: Layout, info: ModelInfo, dtype: str, processor: ItemProcessor, max_tokens: int, time: Clock
    ) -> None:
        self._layout = layout
        self._info = info
        self._dtype = dtype
        self._processor = processor
        self._max_tokens = max_tokens
        self._time = time

    async def size_all(
        self,
        parts: Sequence[MediaRef | EmbedsPart],
        media: Media,
        tier: Tier,
        tenant: str,
        on_sized: Callable[[Item, MediaBlob], None] = lambda item, blob: None,
    ) -> list[Item]:
        """Every part with its size, in order; pixels untouched. Raises BudgetExceeded (`max_request_visual_tokens`),
        EmbeddingsRefused, and what `media` and the layout raise."""
        shared = self._layout.request_options([part.modality for part in parts])
        items = {
            index: self._precomputed(part, tier, tenant)
            for index, part in enumerate(parts)
            if isinstance(part, EmbedsPart)
        }
        places = [index for index in range(len(parts)) if index not in items]
        refs = [part for part in parts if isinstance(part, MediaRef)]

        def size_one(ref_index: int, blob: MediaBlob) -> None:
            blob = replace(blob, options=shared | blob.options)
            item = items[places[ref_index]] = Item(refs[ref_index].modality, self._size(blob))
            on_sized(item, blob)

        if refs:
            await media.open(refs, tier=tier, tenant=tenant, on_open=size_one)
        num_visual = sum(_num_visual(item) for item in items.values())
        if num_visual > tier.max_request_visual_tokens:
            raise BudgetExceeded(
                "max_request_visual_tokens", allowed=tier.max_request_visual_tokens, requested=num_visual
            )
        return [items[index] for index in range(len(parts))]

    async def make_all(
        self,
        parts: Sequence[MediaRef | EmbedsPart],
        media: Media,
        tier: Tier,
        tenant: str,
        clock: StageClock,
        *,
        num_text_tokens: int,
        check: Callable[[Sequence[Item]], object],
    ) -> list[Item]:
        """Every part with its `encoder_item`, in order, beside `num_text_tokens` of other tokens at least. `check` sees
        all sizes when all are known. The first failure ends the rest and is raised.

        Closes MEDIA_FETCH when the last item is open, MEDIA_DECODE at the end of the last decode, and MM_PROCESSOR at
        the end of all: what was done while something still downloaded is part of that time.
        """
        room = _Room(tier.max_request_visual_tokens, self._max_tokens - num_text_tokens)
        decoded_s = 0.0

        async def decode(blob: MediaBlob, spec: DecodeSpec) -> Decoded:
            nonlocal decoded_s
            decoded = await media.decode(blob, spec, tier=tier)
            decoded_s = max(decoded_s, self._time.now_s())
            return decoded

        async def make(item: Item, blob: MediaBlob) -> None:
            self._complete(item, await self._processor.process(blob, decode), tenant)

        async with _side_by_side() as begin:
            items = await self.size_all(
                parts, media, tier, tenant, lambda item, blob: begin(make(item, blob)) if room.take(item) else None
            )
            check(items)
            clock.close(Stage.MEDIA_FETCH, self._time.now_s())
        now_s = self._time.now_s()
        clock.close(Stage.MEDIA_DECODE, min(decoded_s, now_s))
        clock.close(Stage.MM_PROCESSOR, now_s)
        return items

    def _precomputed(self, part: EmbedsPart, tier: Tier, tenant: str) -> Item:
        ready, size = read_part(part, self._layout, self._info, self._dtype, tenant, tier)
        return Item(part.modality, size, ready)

    def _size(self, blob: MediaBlob) -> ItemSize:
        try:
            return self._layout.size(blob.header, blob.options)
        except TriptychError as error:
            error.param = error.param or blob.param
            raise

    def _complete(self, item: Item, processed: Processed, tenant: str) -> None:
        """The features' own size, where it is not what the header promised."""
        size = processed.item.size
        if (size.num_embeds, size.grid) != (item.size.num_embeds, item.size.grid):
            item.size = size
        item.encoder_item = EncoderItem(
            key=embedding_key(processed.key, self._info.revision, self._dtype, tenant),
            modality=item.modality,
            num_embeds=size.num_embeds,
            features=processed.item.features,
            batch_key=processed.item.batch_key,
            num_tokens_encoder=size.num_tokens_encoder,
            cost_flops=size.cost_flops,
        )


def _num_visual(item: Item) -> int:
    return item.size.num_embeds if item.modality is not Modality.AUDIO else 0


@asynccontextmanager
async def _side_by_side() -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """A task group whose first failure is raised as it is. What is begun after a failure is dropped."""

    def begin(work: Coroutine[Any, Any, None]) -> None:
        try:
            group.create_task(work)
        except RuntimeError:  # another item has failed, and the group is shutting down
            work.close()

    try:
        async with asyncio.TaskGroup() as group:
            yield begin
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None

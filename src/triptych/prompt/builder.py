"""From messages or text to a `PreparedRequest`: the one object of this room that the door holds.

Refusals come in the order of cost: template, then sources, then sizes from the headers, then pixels. A request too
long, or over its tier's visual tokens, is refused before anything of it is decoded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from triptych.core.clock import Clock, MonotonicClock
from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, PromptRefused, TriptychError
from triptych.core.media import Decoded, DecodeSpec, MediaBlob, MediaRef, Modality
from triptych.core.prepared import EncoderItem, PreparedRequest
from triptych.core.sampling import SamplingParams
from triptych.core.stages import Stage, StageClock
from triptych.models.base import Expanded, ItemSize, Layout, ModelInfo
from triptych.models.registry import load_layout, read_model_info
from triptych.prompt.detokenize import Detokenizer
from triptych.prompt.identity import embedding_key, prefix_salt
from triptych.prompt.parts import EmbedsPart, TokenCount
from triptych.prompt.precomputed import read_part
from triptych.prompt.processing import MAX_DECODED_BYTES, ItemProcessor, Processed
from triptych.prompt.template import ChatTemplate, Rendered
from triptych.prompt.tools import ToolCallStream, tool_style
from triptych.prompt.vocabulary import Vocabulary

INLINE_CHARS = 20_000  # longer prompts are rendered and tokenised off the event loop


class Media(Protocol):
    """What is asked of `media.plane.MediaPlane`."""

    async def open(self, refs: Sequence[MediaRef], *, tier: Tier, tenant: str) -> list[MediaBlob]: ...

    async def decode(self, blob: MediaBlob, spec: DecodeSpec, *, tier: Tier) -> Decoded: ...


@dataclass(frozen=True, slots=True)
class _Item:
    """One media part after its header is known: fetched media, or embeddings that came with the request."""

    part: MediaRef | EmbedsPart
    size: ItemSize
    blob: MediaBlob | None = None
    ready: EncoderItem | None = None


class PromptBuilder:
    """Owner of one model's template, layout and processor cache, in the front process.

    `dtype` is the served dtype's name: a part of every embedding's identity. Call `close` at the end.
    """

    def __init__(
        self,
        layout: Layout,
        tokenizer: Any,
        info: ModelInfo,
        *,
        dtype: str = "auto",
        max_tokens: int | None = None,
        processor_cache_bytes: int = 512 * 2**20,
        processor_workers: int = 2,
        max_decoded_bytes: int = MAX_DECODED_BYTES,
        time: Clock | None = None,
    ) -> None:
        self.layout = layout
        self.tokenizer = tokenizer
        self.info = info
        self.max_tokens = min(max_tokens or info.max_tokens, info.max_tokens)
        self.template = ChatTemplate(tokenizer, layout)
        self.vocabulary = Vocabulary(tokenizer)
        self._max_token_chars = self.vocabulary.max_token_chars  # read here: the first request should not wait for it
        self.tool_style = tool_style(tokenizer.chat_template)
        self._dtype = dtype
        self._time = time or MonotonicClock()
        self._processor = ItemProcessor(layout, processor_cache_bytes, processor_workers, self._time, max_decoded_bytes)

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(sorted(kind.value for kind in self.layout.modalities))

    def text_stream(self, stop: Sequence[str] = ()) -> Detokenizer:
        """Ids to text for one answer."""
        return Detokenizer(self.tokenizer, stop)

    def tool_stream(self) -> ToolCallStream | None:
        """Parts calls from text for one answer; None where the template has no tools."""
        return ToolCallStream(self.tool_style) if self.tool_style else None

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary.token_bytes(token_id)

    def stats(self) -> dict[str, float]:
        """The processor cache's counters, by `metrics.names`."""
        return self._processor.stats()

    def flush(self) -> int:
        """Empty the processor cache. Returns how many entries went."""
        return self._processor.flush()

    def forget(self) -> None:
        """The processor cache as if no request had come."""
        self._processor.forget()

    def close(self) -> None:
        self._processor.close()

    async def prepare_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        sampling: SamplingParams,
        media: Media,
        tier: Tier,
        tenant: str,
        request_id: str,
        arrival_s: float,
        clock: StageClock,
        cache_salt: str = "",
        deadline_s: float | None = None,
        priority: int = 0,
        template_options: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> PreparedRequest:
        """A conversation, ready for the engine. See `triptych.prompt` for the form of `messages`.

        Closes REQUEST_PARSE, and with media MEDIA_FETCH, MEDIA_DECODE and MM_PROCESSOR. `sampling.max_tokens` is cut
        to what is left of the model's context. Raises PromptRefused (template, length), BudgetExceeded
        (`max_request_visual_tokens`), EmbeddingsRefused, and what `media` and the layout raise.
        """
        rendered = await self._render(
            messages, tools, add_generation_prompt=add_generation_prompt, options=template_options
        )
        clock.close(Stage.REQUEST_PARSE, self._time.now_s())
        items = await self._open(rendered.parts, media, tier, tenant)
        self._check_length(self._expand(rendered.token_ids, items))
        if items:
            clock.close(Stage.MEDIA_FETCH, self._time.now_s())
        encoder_items, sizes = await self._process(items, media, tier, tenant, clock)
        expanded = self._checked(rendered.token_ids, sizes)
        return self._request(
            expanded,
            encoder_items,
            sampling=sampling,
            request_id=request_id,
            arrival_s=arrival_s,
            handoff_s=clock.edge_s,
            cache_salt=prefix_salt(tenant, cache_salt),
            deadline_s=deadline_s,
            priority=priority,
        )

    async def prepare_completion(
        self,
        prompt: str | list[int],
        *,
        sampling: SamplingParams,
        tenant: str,
        request_id: str,
        arrival_s: float,
        clock: StageClock,
        cache_salt: str = "",
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> PreparedRequest:
        """Plain text, or token ids, as they are. Closes REQUEST_PARSE. Raises PromptRefused."""
        token_ids = await self._completion_ids(prompt)
        clock.close(Stage.REQUEST_PARSE, self._time.now_s())
        return self._request(
            self._checked(token_ids, []),
            (),
            sampling=sampling,
            request_id=request_id,
            arrival_s=arrival_s,
            handoff_s=clock.edge_s,
            cache_salt=prefix_salt(tenant, cache_salt),
            deadline_s=deadline_s,
            priority=priority,
        )

    async def count_tokens(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        media: Media,
        tier: Tier,
        tenant: str,
        template_options: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenCount:
        """The prompt as it would be served, from headers alone: nothing is decoded."""
        rendered = await self._render(
            messages, tools, add_generation_prompt=add_generation_prompt, options=template_options
        )
        items = await self._open(rendered.parts, media, tier, tenant)
        expanded = self._expand(rendered.token_ids, items)
        counts: Counter[str] = Counter()
        for item in items:
            counts[item.part.modality.value] += item.size.num_embeds
        return TokenCount(expanded.token_ids, dict(counts))

    async def count_text_tokens(self, prompt: str) -> TokenCount:
        return TokenCount(await self._completion_ids(prompt))

    # text

    async def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **options: Any
    ) -> Rendered:
        num_chars = sum(_num_chars(message.get("content")) for message in messages)
        self._check_chars(num_chars, "messages")
        rendered: Rendered = await self._maybe_off_loop(
            num_chars, lambda: self.template.render(messages, tools, **options)
        )
        return rendered

    async def _completion_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            self._check_chars(len(prompt), "prompt")
            token_ids: list[int] = await self._maybe_off_loop(len(prompt), lambda: self.tokenizer.encode(prompt))
            return token_ids
        wrong = next((token for token in prompt if not 0 <= token < self.info.vocab_size), None)
        if wrong is not None:
            raise PromptRefused(
                f"token id {wrong} is outside the vocabulary of {self.info.vocab_size} tokens", param="prompt"
            )
        return list(prompt)

    async def _maybe_off_loop(self, num_chars: int, work: Callable[[], Any]) -> Any:
        return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)

    def _check_chars(self, num_chars: int, param: str) -> None:
        """Refuse an endless prompt before it is tokenised: no token is longer than the longest one."""
        at_least = num_chars // self._max_token_chars
        if at_least > self.max_tokens:
            raise PromptRefused(
                f"the prompt has at least {at_least} tokens, the model's context is {self.max_tokens}", param=param
            )

    # media

    async def _open(self, parts: Sequence[MediaRef | EmbedsPart], media: Media, tier: Tier, tenant: str) -> list[_Item]:
        """Every part with its size, in order; pixels untouched."""
        shared = self.layout.request_options([part.modality for part in parts])
        refs = [part for part in parts if isinstance(part, MediaRef)]
        blobs = iter(await media.open(refs, tier=tier, tenant=tenant) if refs else [])
        items = []
        for part in parts:
            if isinstance(part, EmbedsPart):
                ready, size = read_part(part, self.layout, self.info, self._dtype, tenant, tier)
                items.append(_Item(part, size, ready=ready))
            else:
                blob = next(blobs)
                blob = replace(blob, options=shared | blob.options)
                items.append(_Item(part, self._size(blob), blob=blob))
        num_visual = sum(item.size.num_embeds for item in items if item.part.modality is not Modality.AUDIO)
        if num_visual > tier.max_request_visual_tokens:
            raise BudgetExceeded(
                "max_request_visual_tokens", allowed=tier.max_request_visual_tokens, requested=num_visual
            )
        return items

    def _size(self, blob: MediaBlob) -> ItemSize:
        try:
            return self.layout.size(blob.header, blob.options)
        except TriptychError as error:
            error.param = error.param or blob.param
            raise

    async def _process(
        self, items: Sequence[_Item], media: Media, tier: Tier, tenant: str, clock: StageClock
    ) -> tuple[tuple[EncoderItem, ...], list[tuple[Modality, ItemSize]]]:
        """Decode and process all at once. The sizes are the processor's where they differ from the header's promise."""
        blobs = [item.blob for item in items if item.blob is not None]
        decode = partial(media.decode, tier=tier)
        done = iter(await self._processor.process_all(blobs, decode, clock))
        encoder_items: list[EncoderItem] = []
        sizes: list[tuple[Modality, ItemSize]] = []
        for item in items:
            size = item.size
            if item.ready is not None:
                encoder_items.append(item.ready)
            else:
                processed = next(done)
                if processed.item.size.num_embeds != size.num_embeds or processed.item.size.grid != size.grid:
                    size = processed.item.size
                encoder_items.append(self._encoder_item(item, processed, tenant))
            sizes.append((item.part.modality, size))
        return tuple(encoder_items), sizes

    def _encoder_item(self, item: _Item, processed: Processed, tenant: str) -> EncoderItem:
        size = processed.item.size
        return EncoderItem(
            key=embedding_key(processed.key, self.info.revision, self._dtype, tenant),
            modality=item.part.modality,
            num_embeds=size.num_embeds,
            features=processed.item.features,
            batch_key=processed.item.batch_key,
            num_tokens_encoder=size.num_tokens_encoder,
            cost_flops=size.cost_flops,
        )

    # the request

    def _expand(self, token_ids: list[int], items: Sequence[_Item]) -> Expanded:
        return self.layout.expand(token_ids, [(item.part.modality, item.size) for item in items])

    def _checked(self, token_ids: list[int], sizes: Sequence[tuple[Modality, ItemSize]]) -> Expanded:
        expanded = self.layout.expand(token_ids, sizes)
        self._check_length(expanded)
        return expanded

    def _check_length(self, expanded: Expanded) -> None:
        num_tokens = len(expanded.token_ids)
        if not num_tokens:
            raise PromptRefused("the prompt is empty")
        if num_tokens >= self.max_tokens:
            raise PromptRefused(
                f"the prompt has {num_tokens} tokens, which leaves no room in the model's context of {self.max_tokens}"
            )

    def _request(
        self, expanded: Expanded, items: tuple[EncoderItem, ...], *, sampling: SamplingParams, **rest: Any
    ) -> PreparedRequest:
        room = self.max_tokens - len(expanded.token_ids)
        if sampling.max_tokens > room:
            sampling = msgspec.structs.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        return PreparedRequest(
            token_ids=expanded.token_ids,
            sampling=sampling,
            spans=expanded.spans,
            items=items,
            positions=expanded.positions,
            position_offset=expanded.position_offset,
            whole_spans=expanded.whole_spans,
            eos_token_ids=self.info.eos_token_ids,
            **rest,
        )


def load_prompt_builder(
    path: str,
    *,
    dtype: str = "auto",
    overrides: dict[str, Any] | None = None,
    max_tokens: int | None = None,
    processor_cache_bytes: int = 512 * 2**20,
    processor_workers: int = 2,
    max_decoded_bytes: int = MAX_DECODED_BYTES,
    time: Clock | None = None,
) -> PromptBuilder:
    """For a folder, a hub name or an embedded model. Reads no weights. Raises UnknownModel, InvalidRequest."""
    layout = load_layout(path, overrides)
    return PromptBuilder(
        layout,
        layout.tokenizer,
        read_model_info(path),
        dtype=dtype,
        max_tokens=max_tokens,
        processor_cache_bytes=processor_cache_bytes,
        processor_workers=processor_workers,
        max_decoded_bytes=max_decoded_bytes,
        time=time,
    )


def _num_chars(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return 0

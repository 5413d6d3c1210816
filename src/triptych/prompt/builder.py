"""From messages or text to a `PreparedRequest`: the one object of this room that the door holds.

Refusals come in the order of cost: template, then sources, then sizes from the headers, then pixels. Of a request too
long, or over its tier's visual tokens, no more is decoded than would have fitted (`intake.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import msgspec

from triptych.core.clock import Clock, MonotonicClock
from triptych.core.config import Tier
from triptych.core.errors import PromptRefused
from triptych.core.media import Modality
from triptych.core.prepared import EncoderItem, PreparedRequest
from triptych.core.sampling import SamplingParams
from triptych.core.stages import Stage, StageClock
from triptych.models.base import Expanded, ItemSize, Layout, ModelInfo
from triptych.models.registry import load_layout, read_model_info
from triptych.prompt.detokenize import Detokenizer
from triptych.prompt.identity import prefix_salt
from triptych.prompt.intake import Item, Media, MediaIntake
from triptych.prompt.parts import TokenCount
from triptych.prompt.processing import MAX_DECODED_BYTES, ItemProcessor
from triptych.prompt.template import ChatTemplate, Rendered
from triptych.prompt.tools import ToolCallStream, tool_style
from triptych.prompt.vocabulary import Vocabulary

INLINE_CHARS = 20_000  # longer prompts are rendered and tokenised off the event loop


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
        self._time = time or MonotonicClock()
        self._processor = ItemProcessor(layout, processor_cache_bytes, processor_workers, self._time, max_decoded_bytes)
        self._intake = MediaIntake(layout, info, dtype, self._processor, self.max_tokens, self._time)

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
        items: list[Item] = []
        lay = cache(partial(self._lay, rendered.token_ids))  # once, unless features differ from what headers promise
        if rendered.parts:
            items = await self._intake.make_all(
                rendered.parts,
                media,
                tier,
                tenant,
                clock,
                num_text_tokens=len(rendered.token_ids) - len(rendered.parts),  # each part has one placeholder
                check=lambda sized: lay(_sizes(sized)),
            )
        return self._request(
            lay(_sizes(items)),
            tuple(item.encoder_item for item in items if item.encoder_item is not None),
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
            self._lay(token_ids, ()),
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
        items = await self._intake.size_all(rendered.parts, media, tier, tenant)
        expanded = self.layout.expand(rendered.token_ids, _sizes(items))
        counts: Counter[str] = Counter()
        for item in items:
            counts[item.modality.value] += item.size.num_embeds
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

    # the request

    def _lay(self, token_ids: list[int], sizes: tuple[tuple[Modality, ItemSize], ...]) -> Expanded:
        expanded = self.layout.expand(token_ids, sizes)
        num_tokens = len(expanded.token_ids)
        if not num_tokens:
            raise PromptRefused("the prompt is empty")
        if num_tokens >= self.max_tokens:
            raise PromptRefused(
                f"the prompt has {num_tokens} tokens, which leaves no room in the model's context of {self.max_tokens}"
            )
        return expanded

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


def _sizes(items: Sequence[Item]) -> tuple[tuple[Modality, ItemSize], ...]:
    return tuple((item.modality, item.size) for item in items)


def _num_chars(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return 0

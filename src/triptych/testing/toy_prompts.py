"""The front half of the toy: a byte template, four positions a picture, and media from `data:` URLs alone."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from triptych.core.clock import MonotonicClock
from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, ForbiddenSource, InvalidMedia, PromptRefused, UnknownMediaId
from triptych.core.media import Decoded, DecodedImage, DecodeSpec, MediaBlob, MediaHeader, MediaRef, OnOpen
from triptych.core.prepared import EncoderItem, PreparedRequest, Span
from triptych.core.sampling import SamplingParams
from triptych.core.stages import Stage, StageClock
from triptych.testing.toy_engine import ANSWER_ID, MEDIA_ID

MAX_TOKENS = 4096
TOKENS_PER_ITEM = 4
_CLOCK = MonotonicClock()


class ToyMedia:
    """Takes base64 `data:` URLs and bytes; knows aliases by tenant; counts nothing."""

    def __init__(self) -> None:
        self._aliases: dict[tuple[str, str], MediaBlob] = {}

    async def open(
        self, refs: Sequence[MediaRef], *, tier: Tier, tenant: str, on_open: OnOpen | None = None
    ) -> list[MediaBlob]:
        if len(refs) > tier.max_images:
            raise BudgetExceeded("max_images", allowed=tier.max_images, requested=len(refs))
        blobs = [self._open(ref, tier, tenant) for ref in refs]
        for each in enumerate(blobs):
            if on_open is not None:
                on_open(*each)
        return blobs

    def _open(self, ref: MediaRef, tier: Tier, tenant: str) -> MediaBlob:
        if ref.source is None:
            known = self._aliases.get((tenant, ref.media_id or ""))
            if known is None:
                raise UnknownMediaId(f"no media {ref.media_id!r}", param=ref.param)
            return known
        data = ref.source if isinstance(ref.source, bytes) else _from_url(ref.source, ref.param)
        try:
            width_px, height_px = Image.open(io.BytesIO(data)).size
        except OSError as error:
            raise InvalidMedia("not a picture", param=ref.param) from error
        if width_px > tier.max_width_px:
            raise BudgetExceeded("max_width_px", allowed=tier.max_width_px, requested=width_px, param=ref.param)
        header = MediaHeader(ref.modality, "image/png", len(data), width_px, height_px)
        blob = MediaBlob(header, data, hashlib.blake2s(data).digest(), ref.param, ref.options)
        if ref.media_id:
            self._aliases[tenant, ref.media_id] = blob
        return blob

    async def decode(self, blob: MediaBlob, spec: DecodeSpec, *, tier: Tier) -> Decoded:
        return DecodedImage(np.asarray(Image.open(io.BytesIO(blob.data)).convert("RGB")))

    def flush(self) -> int:
        num_entries = len(self._aliases)
        self._aliases.clear()
        return num_entries

    def stats(self) -> dict[str, float]:
        return {"decode_queue_depth": 0.0}


def _from_url(url: str, param: str | None) -> bytes:
    if not url.startswith("data:"):
        raise ForbiddenSource("the toy takes data: URLs alone", param=param)
    return base64.b64decode(url.partition(",")[2])


@dataclass(frozen=True, slots=True)
class ToyCount:
    """As `prompt.TokenCount`."""

    token_ids: list[int]
    media_tokens: dict[str, int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class ToyPrompts:
    """Renders `role: text`; a conversation begins with no assistant, and has no two user turns in a row."""

    async def prepare_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        sampling: SamplingParams,
        media: Any,
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
        token_ids, refs = _render(messages, tools)
        clock.close(Stage.REQUEST_PARSE, _CLOCK.now_s())
        blobs = await media.open(refs, tier=tier, tenant=tenant) if refs else []
        if refs:
            clock.close(Stage.MEDIA_FETCH, _CLOCK.now_s())
            for blob in blobs:
                await media.decode(blob, DecodeSpec(), tier=tier)
            clock.close(Stage.MEDIA_DECODE, _CLOCK.now_s())
        return _request(
            token_ids, sampling, blobs, request_id=request_id, arrival_s=arrival_s, deadline_s=deadline_s,
            priority=priority, cache_salt=f"{tenant}/{cache_salt}".encode(),
        )  # fmt: skip

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
        token_ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        clock.close(Stage.REQUEST_PARSE, _CLOCK.now_s())
        request = _request(token_ids, sampling, [], request_id=request_id, arrival_s=arrival_s)
        return replace(request, deadline_s=deadline_s, priority=priority, cache_salt=f"{tenant}/{cache_salt}".encode())

    async def count_tokens(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        media: Any,
        tier: Tier,
        tenant: str,
    ) -> ToyCount:
        token_ids, refs = _render(messages, tools)
        blobs = await media.open(refs, tier=tier, tenant=tenant)
        return ToyCount(token_ids, {"image": TOKENS_PER_ITEM * len(blobs)} if blobs else {})


def _render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[list[int], list[MediaRef]]:
    token_ids: list[int] = list(json.dumps(tools).encode()) if tools else []
    refs: list[MediaRef] = []
    last_role = ""
    for message in messages:
        if message["role"] == last_role == "user" or (not last_role and message["role"] == "assistant"):
            raise PromptRefused("roles must alternate and begin with the user", param="messages")
        last_role = message["role"]
        token_ids += [*f"{last_role}: ".encode(), ANSWER_ID]
        content = message["content"]
        for part in [{"type": "text", "text": content or ""}] if not isinstance(content, list) else content:
            if isinstance(part, MediaRef):
                refs.append(part)
                token_ids += [MEDIA_ID] * TOKENS_PER_ITEM
            else:
                token_ids += part["text"].encode()
    return token_ids, refs


def _request(
    token_ids: list[int], sampling: SamplingParams, blobs: list[MediaBlob], *, request_id: str, arrival_s: float,
    deadline_s: float | None = None, priority: int = 0, cache_salt: bytes = b"",
) -> PreparedRequest:  # fmt: skip
    if not token_ids:
        raise PromptRefused("the prompt is empty")
    if len(token_ids) >= MAX_TOKENS:
        raise PromptRefused(f"the prompt has {len(token_ids)} tokens, the model takes {MAX_TOKENS}")
    room = MAX_TOKENS - len(token_ids)
    if sampling.max_tokens > room:
        sampling = msgspec.structs.replace(sampling, max_tokens=room)
    starts = [i for i, t in enumerate(token_ids) if t == MEDIA_ID][::TOKENS_PER_ITEM]
    return PreparedRequest(
        request_id=request_id,
        token_ids=token_ids,
        sampling=sampling,
        spans=tuple(Span(start, TOKENS_PER_ITEM, index) for index, start in enumerate(starts[: len(blobs)])),
        items=tuple(EncoderItem(blob.digest, blob.header.modality, TOKENS_PER_ITEM, {}) for blob in blobs),
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        priority=priority,
        cache_salt=cache_salt,
    )

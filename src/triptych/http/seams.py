"""What the door needs of the rooms behind it, as protocols: an engine, a prompt builder, streams of text.

The real ones are `understand.engine`, `prompt.builder` and `media.plane`, put together by `launch`; the toy ones are in
`testing`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from triptych.core.config import Tier
from triptych.core.events import Event
from triptych.core.media import Decoded, DecodeSpec, MediaBlob, MediaRef, OnOpen
from triptych.core.prepared import PreparedRequest
from triptych.core.sampling import SamplingParams
from triptych.core.stages import StageClock


class EngineHandle(Protocol):
    """One engine, in this process or another."""

    def submit(self, request: PreparedRequest) -> AsyncIterator[Event]:
        """Any number of TokenEvent, then exactly one FinalEvent, whatever happens."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ask for an early end; the FinalEvent still comes. Unknown and ended ids are ignored."""
        ...

    async def stats(self) -> dict[str, float]:
        """Gauges and counters by the names that `metrics.names.sample_for` knows."""
        ...


class Media(Protocol):
    async def open(
        self, refs: Sequence[MediaRef], *, tier: Tier, tenant: str, on_open: OnOpen | None = None
    ) -> list[MediaBlob]: ...

    async def decode(self, blob: MediaBlob, spec: DecodeSpec, *, tier: Tier) -> Decoded: ...

    def flush(self) -> int: ...

    def stats(self) -> dict[str, float]: ...


class Prompts(Protocol):
    """See `triptych.prompt`."""

    async def prepare_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        sampling: SamplingParams,
        media: Media,
        tier: Tier,
        tenant: str,
        request_id: str,
        arrival_s: float,
        clock: StageClock,
        cache_salt: str,
        deadline_s: float | None,
        priority: int,
        template_options: dict[str, Any],
        add_generation_prompt: bool,
    ) -> PreparedRequest: ...

    async def prepare_completion(
        self,
        prompt: str | list[int],
        *,
        sampling: SamplingParams,
        tenant: str,
        request_id: str,
        arrival_s: float,
        clock: StageClock,
        cache_salt: str,
        deadline_s: float | None,
        priority: int,
    ) -> PreparedRequest: ...

    async def count_tokens(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        media: Media,
        tier: Tier,
        tenant: str,
    ) -> Any: ...


class TextStream(Protocol):
    """Token ids to text, whole characters only; text that may be the start of a stop string is held back."""

    stopped: bool

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class ToolStream(Protocol):
    """Parts the text of an answer from its tool calls."""

    def push(self, text: str) -> str: ...

    def finish(self) -> tuple[str, list[Any]]: ...


@dataclass(frozen=True, slots=True)
class Served:
    """One model behind the door.

    `token_bytes` gives the exact bytes of one token. `embed` is an async function to a float32 vector [D], where the
    model can. `flushers` empty one cache each, by name, and return how many entries went. `details` are shown by
    `/v1/models`; what only a loaded engine knows comes in when it has loaded.
    """

    name: str
    engine: EngineHandle
    prompts: Prompts
    max_tokens: int
    text_stream: Callable[[Sequence[str]], TextStream]
    token_bytes: Callable[[int], bytes]
    tool_stream: Callable[[], ToolStream] | None = None
    modalities: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    created_s: int = 0
    embed: Callable[[PreparedRequest], Awaitable[npt.NDArray[np.float32]]] | None = None
    front_stats: Callable[[], dict[str, float]] = dict
    flushers: Mapping[str, Callable[[], Awaitable[int]]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

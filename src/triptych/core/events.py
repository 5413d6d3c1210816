"""What the engine says about a request. Any number of `TokenEvent` (or one
`EmbeddingEvent`), then exactly one `FinalEvent`."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from triptych.core.errors import TriptychError, from_wire


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, tag="token"):
    """One or more new tokens. `stage_ms` comes with the first event only: the engine's stages up to the first token.

    `sent_s` is the engine's monotonic clock when the event left it."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    stage_ms: dict[str, float] | None = None
    sent_s: float = 0.0


class FinalEvent(msgspec.Struct, frozen=True, tag="final"):
    """The last word on a request. `error_*` are set when `reason` is ERROR (see `core.errors.from_wire`).

    `counters`: cached_tokens (prefix cache), encoder_hits, encoder_misses, preemptions, kv_blocks_peak."""

    request_id: str
    reason: FinishReason
    error_code: str | None = None
    error_message: str | None = None
    error_param: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    counters: dict[str, float] = {}
    sent_s: float = 0.0
    retry_after_s: float = 1.0

    def error(self) -> TriptychError:
        """The leaf that ended the request, as it is raised on the caller's side."""
        message = self.error_message or "the engine failed"
        return from_wire(self.error_code or "", message, self.error_param, self.retry_after_s)


class EmbeddingEvent(msgspec.Struct, frozen=True, tag="embedding"):
    """The last token's final hidden state, scaled to length one: [D]."""

    request_id: str
    vector: list[float]


Event = TokenEvent | EmbeddingEvent | FinalEvent


class FeaturesWanted(msgspec.Struct, frozen=True, tag="wanted"):
    """From an engine in another process: these items of the request came without features, and it needs them."""

    request_id: str
    item_indices: list[int]


class EmbeddingsDropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The encoder cache holds these no longer."""

    keys: list[bytes]


EngineEvent = Event | FeaturesWanted | EmbeddingsDropped

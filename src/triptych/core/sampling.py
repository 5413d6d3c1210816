"""How the next token is chosen: the caller's wishes, checked at construction."""

from __future__ import annotations

import msgspec

from triptych.core.errors import InvalidRequest


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults follow the OpenAI chat API. `temperature` 0 is greedy.

    `seed` fixes the text whoever shares the batch: random numbers are drawn from (seed, token index) alone.
    `top_logprobs` None: no log probabilities; 0: of the chosen token only. `grammar` is a JSON schema, regex or Lark
    text for the grammar library, by `grammar_kind`.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    grammar_kind: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidRequest(
                    f"{name} must be between {_plain(low)} and {_plain(high)}, got {_plain(value)}", param=name
                )
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is over max_tokens {self.max_tokens}", param="min_tokens"
            )
        if any(token_id < 0 for token_id in (*self.stop_token_ids, *self.logit_bias)):
            raise InvalidRequest("token ids must not be negative", param="logit_bias")
        if self.grammar_kind not in (None, "json_schema", "regex", "lark"):
            raise InvalidRequest(f"grammar_kind {self.grammar_kind!r} is not known", param="grammar_kind")


def _plain(value: float) -> str:
    """1000000, not 1e+06."""
    return f"{value:.12g}"


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 1_000_000),
    ("min_tokens", 0, 1_000_000),
    ("temperature", 0, 100),
    ("top_p", 1e-6, 1),
    ("top_k", 0, 1_000_000),
    ("min_p", 0, 1),
    ("repetition_penalty", 0.01, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", -(2**63), 2**63 - 1),
    ("top_logprobs", 0, 20),
)

"""From the sampling fields of a body to `SamplingParams`, stop strings and grammar."""

from __future__ import annotations

from typing import Any

import msgspec

from triptych.core.config import HttpConfig
from triptych.core.errors import InvalidRequest
from triptych.core.sampling import SamplingParams
from triptych.http.schema import ChatRequest, CompletionRequest, ResponseFormat

ALL_THAT_IS_LEFT = 1_000_000  # the prompt builder lowers it to the room in the model's context

WHITESPACE = r"\n? {0,16}"  # between the tokens of JSON: pretty printing passes, an endless run does not

_PLAIN = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


def check_traits(body: ChatRequest | CompletionRequest, limits: HttpConfig) -> None:
    """The rules on fields that are not sampling. Raises InvalidRequest."""
    if body.n is not None and not 1 <= body.n <= limits.max_choices:
        raise InvalidRequest(f"n must be between 1 and {limits.max_choices}, got {body.n}", param="n")
    if body.cache_salt is not None and len(body.cache_salt) > limits.max_cache_salt_chars:
        raise InvalidRequest(
            f"cache_salt may have {limits.max_cache_salt_chars} characters, it has {len(body.cache_salt)}",
            param="cache_salt",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.timeout_s is not None and not body.timeout_s > 0:
        raise InvalidRequest(f"timeout_s must be over 0, got {body.timeout_s:g}", param="timeout_s")


def stop_strings(stop: str | list[str] | None, limits: HttpConfig) -> tuple[str, ...]:
    """Raises InvalidRequest for too many, or an empty one."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > limits.max_stop_strings:
        raise InvalidRequest(f"stop may have {limits.max_stop_strings} strings, it has {len(strings)}", param="stop")
    if "" in strings:
        raise InvalidRequest("a stop string must not be empty", param="stop")
    return strings


def sampling_params(
    body: ChatRequest | CompletionRequest, max_tokens: int | None, top_logprobs: int | None
) -> SamplingParams:
    """Absent fields keep their defaults. `max_tokens` None: all that the prompt leaves of the context."""
    given = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    return SamplingParams(
        max_tokens=ALL_THAT_IS_LEFT if max_tokens is None else max_tokens,
        top_logprobs=top_logprobs,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias),
        **given,
        **_grammar(body.response_format),
    )


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    found = {}
    for token, value in (bias or {}).items():
        if not token.isdecimal():
            raise InvalidRequest(f"logit_bias is keyed by token id, got {token[:32]!r}", param="logit_bias")
        if not -100 <= value <= 100:
            raise InvalidRequest(f"logit_bias must be between -100 and 100, got {value:g}", param=f"logit_bias.{token}")
        found[int(token)] = value
    return found


def json_grammar(schema: dict[str, Any]) -> dict[str, str]:
    """The fields of SamplingParams that hold an answer to a JSON schema. White space is bounded: a small model would
    otherwise fill its answer with it."""
    bounded = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
    return {"grammar_kind": "json_schema", "grammar": msgspec.json.encode(bounded).decode()}


def _grammar(wanted: ResponseFormat | None) -> dict[str, Any]:
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return json_grammar({"type": "object"})
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise InvalidRequest(
                "response_format of type json_schema needs json_schema", param="response_format.json_schema"
            )
        return json_grammar(wanted.json_schema.schema)
    if not wanted.grammar:
        raise InvalidRequest(f"response_format of type {wanted.type} needs grammar", param="response_format.grammar")
    return {"grammar_kind": wanted.type, "grammar": wanted.grammar}

"""The usage block and log probabilities, in the OpenAI form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triptych.core.events import TokenLogprob
from triptych.core.prepared import PreparedRequest
from triptych.http.call import Call
from triptych.http.seams import Served


def usage_block(call: Call, prepared: Sequence[PreparedRequest], *, stages: bool) -> dict[str, Any]:
    """`stages` (ours) adds the table of milliseconds up to the first token."""
    record = call.record
    details = {"cached_tokens": record.cached_tokens, **_media_tokens(prepared)}
    usage: dict[str, Any] = {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.output_tokens,
        "total_tokens": record.prompt_tokens + record.output_tokens,
        "prompt_tokens_details": details,
    }
    if stages:
        usage["stages"] = call.stage_table()
    return usage


def _media_tokens(prepared: Sequence[PreparedRequest]) -> dict[str, int]:
    found = {"image_tokens": 0, "video_tokens": 0, "audio_tokens": 0}
    for request in prepared:
        for span in request.spans:
            found[f"{request.items[span.item_idx].modality}_tokens"] += span.length
    return found


def chat_logprobs(served: Served, logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]]:
    return [
        {
            **_token(served, entry.token_id, entry.logprob),
            "top_logprobs": [_token(served, token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in logprobs or ()
    ]


def _token(served: Served, token_id: int, logprob: float) -> dict[str, Any]:
    raw = served.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}


class CompletionLogprobs:
    """The older form of `/v1/completions`: parallel lists, with offsets into the text."""

    def __init__(self, served: Served, offset: int) -> None:
        self._served = served
        self._offset = offset

    def block(self, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        tokens, values, tops, offsets = [], [], [], []
        for entry in logprobs or ():
            text = self._text(entry.token_id)
            tokens.append(text)
            values.append(max(entry.logprob, -9999.0))
            tops.append({self._text(token_id): max(logprob, -9999.0) for token_id, logprob in entry.top})
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _text(self, token_id: int) -> str:
        return self._served.token_bytes(token_id).decode("utf-8", "replace")

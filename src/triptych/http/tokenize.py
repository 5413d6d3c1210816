"""`POST /tokenize` and `/detokenize`: what a prompt will cost, its media counted from their headers alone."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp

from triptych.core.errors import InvalidRequest
from triptych.core.sampling import SamplingParams
from triptych.http.call import Call
from triptych.http.messages import to_messages, to_tools
from triptych.http.responses import json_response
from triptych.http.schema import DetokenizeRequest, TokenizeRequest
from triptych.http.validate import decode_body


async def tokenize(call: Call) -> ASGIApp:
    """Answers `{count, max_model_len, tokens, media_tokens}`; `media_tokens` counts positions of media, by modality."""
    body, ignored = decode_body(await call.body(), TokenizeRequest)
    call.ignore(ignored)
    call.parsed()
    served = call.select(body.model)
    if (body.messages is None) == (body.prompt is None):
        raise InvalidRequest("exactly one of messages and prompt is needed", param="messages")
    answer: dict[str, Any] = {"max_model_len": served.max_tokens}
    if body.messages is None:
        prepared = await served.prompts.prepare_completion(
            body.prompt or "",
            sampling=SamplingParams(max_tokens=1),
            **call.asker(),
        )
        answer |= {"count": len(prepared.token_ids), "tokens": prepared.token_ids, "media_tokens": {}}
    else:
        counted = await served.prompts.count_tokens(
            to_messages(body.messages, call.front.config.http),
            tools=to_tools(body.tools),
            media=call.media,
            tier=call.tier,
            tenant=call.tenant.name,
        )
        answer |= {"count": counted.num_tokens, "tokens": counted.token_ids, "media_tokens": counted.media_tokens}
    return json_response(answer, call.headers)


async def detokenize(call: Call) -> ASGIApp:
    body, ignored = decode_body(await call.body(), DetokenizeRequest)
    call.ignore(ignored)
    served = call.select(body.model)
    stream = served.text_stream(())
    return json_response({"prompt": stream.push(body.tokens) + stream.finish()}, call.headers)

"""`POST /v1/embeddings`, for models that can: text, token ids, or messages with media (ours)."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from starlette.types import ASGIApp

from triptych.core.errors import InvalidRequest, UnsupportedMedia
from triptych.core.prepared import PreparedRequest
from triptych.core.sampling import SamplingParams
from triptych.http.call import Call
from triptych.http.completions import prompt_list
from triptych.http.messages import to_messages
from triptych.http.responses import json_response
from triptych.http.schema import EmbeddingRequest
from triptych.http.seams import Served
from triptych.http.validate import decode_body

MAX_INPUTS = 256
_SAMPLING = SamplingParams(max_tokens=1)


async def embeddings(call: Call) -> ASGIApp:
    body, ignored = decode_body(await call.body(), EmbeddingRequest)
    call.ignore(ignored)
    call.parsed()
    served = call.select(body.model)
    if served.embed is None:
        raise UnsupportedMedia(f"{served.name} gives no embeddings", param="model")
    requests = await _prompts(call, body, served)
    for request in requests:
        call.prepared(request)
    vectors = await asyncio.gather(*(served.embed(request) for request in requests))
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _encode(_cut(vector, body.dimensions), body.encoding_format),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": call.record.prompt_tokens, "total_tokens": call.record.prompt_tokens}
    return json_response({"object": "list", "data": data, "model": served.name, "usage": usage}, call.headers)


async def _prompts(call: Call, body: EmbeddingRequest, served: Served) -> list[PreparedRequest]:
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("exactly one of input and messages is needed", param="input")
    if body.messages is not None:
        return [await _chat_prompt(call, body, served)]
    inputs = prompt_list(body.input or [], "input")
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(f"input may have {MAX_INPUTS} entries, it has {len(inputs)}", param="input")
    found = []
    for index, text in enumerate(inputs):
        request = await served.prompts.prepare_completion(
            text,
            sampling=_SAMPLING,
            **call.asker(index=index),
        )
        found.append(request)
    return found


async def _chat_prompt(call: Call, body: EmbeddingRequest, served: Served) -> PreparedRequest:
    return await served.prompts.prepare_chat(
        to_messages(body.messages or [], call.front.config.http),
        tools=None,
        sampling=_SAMPLING,
        media=call.media,
        tier=call.tier,
        **call.asker(),
        template_options={},
        add_generation_prompt=False,
    )


def _cut(vector: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first `dimensions` values, of unit length again."""
    if dimensions is None:
        return vector
    if not 1 <= dimensions <= vector.size:
        raise InvalidRequest(f"dimensions must be between 1 and {vector.size}, got {dimensions}", param="dimensions")
    head = vector[:dimensions]
    return head / max(float(np.linalg.norm(head)), 1e-12)


def _encode(vector: np.ndarray, form: str | None) -> Any:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype(np.float32).tolist()

"""`POST /v1/chat/completions`: parse, prepare, submit, answer whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from triptych.core.errors import InvalidRequest
from triptych.core.ids import new_id
from triptych.core.prepared import PreparedRequest
from triptych.http.call import Call
from triptych.http.choice import Choice, Piece, merged, settled_first
from triptych.http.messages import to_messages, to_tools
from triptych.http.params import check_traits, sampling_params, stop_strings
from triptych.http.responses import json_response
from triptych.http.schema import ChatRequest
from triptych.http.seams import Served, ToolStream
from triptych.http.sse import EventStream, frame
from triptych.http.tools import check_tools, forced_call, tool_stream
from triptych.http.usage import chat_logprobs, usage_block
from triptych.http.validate import decode_body


@dataclass(frozen=True, slots=True)
class _Job:
    """A validated chat request on its way."""

    call: Call
    body: ChatRequest
    served: Served
    prepared: PreparedRequest
    choices: list[Choice]
    created_s: int

    @property
    def wants_stages(self) -> bool:
        options = self.body.stream_options
        return bool(self.body.include_stages or (options and options.include_stages))

    def usage(self) -> dict[str, Any]:
        return usage_block(self.call, [self.prepared], stages=self.wants_stages)

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.call.request_id, "object": kind, "created": self.created_s, "model": self.served.name}

    def tool_streams(self) -> list[ToolStream | None]:
        return [tool_stream(self.body, self.served) for _ in self.choices]


async def chat(call: Call) -> ASGIApp:
    body, ignored = decode_body(await call.body(), ChatRequest)
    call.ignore(ignored)
    call.parsed()
    job = await _prepare(call, body)
    return await _stream(job) if body.stream else await _whole(job)


async def _prepare(call: Call, body: ChatRequest) -> _Job:
    limits = call.front.config.http
    check_traits(body, limits)
    if body.modalities and body.modalities != ["text"]:
        raise InvalidRequest(f"modalities may be ['text'], got {body.modalities}", param="modalities")
    served = call.select(body.model)
    call.streaming = bool(body.stream)
    call.set_timeout(body.timeout_s)
    prepared = await _prompt(call, body, served)
    call.prepared(prepared)
    stop = stop_strings(body.stop, limits)
    choices = [Choice(call, served, nth(prepared, index, body.n or 1), index, stop) for index in range(body.n or 1)]
    return _Job(call, body, served, prepared, choices, int(time.time()))


async def _prompt(call: Call, body: ChatRequest, served: Served) -> PreparedRequest:
    check_tools(body, served)
    sampling = sampling_params(body, _max_tokens(body), _top_logprobs(body))
    sampling = forced_call(body, sampling)
    return await served.prompts.prepare_chat(
        to_messages(body.messages, call.front.config.http),
        tools=None if body.tool_choice == "none" else to_tools(body.tools),
        sampling=sampling,
        media=call.media,
        tier=call.tier,
        **call.asker(cache_salt=body.cache_salt, priority=body.priority),
        template_options=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
    )


def nth(prepared: PreparedRequest, index: int, of: int) -> PreparedRequest:
    """The request of choice `index`: an id of its own, and a seed of its own where one is given."""
    if of == 1:
        return prepared
    sampling = prepared.sampling
    if sampling.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=sampling.seed + index)
    return replace(prepared, request_id=f"{prepared.request_id}-{index}", sampling=sampling)


def _max_tokens(body: ChatRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


async def _whole(job: _Job) -> Response:
    texts = ["" for _ in job.choices]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in job.choices]
    async with aclosing(merged(job.choices)) as pieces:
        async for piece in pieces:
            texts[piece.index] += piece.text
            logprobs[piece.index] += chat_logprobs(job.served, piece.logprobs)
    answers = []
    for choice, text, probs, tools in zip(job.choices, texts, logprobs, job.tool_streams(), strict=True):
        message, finish_reason = _message(text, tools, choice.finish_reason)
        block = {"content": probs} if job.body.logprobs else None
        answers.append({"index": choice.index, "message": message, "logprobs": block, "finish_reason": finish_reason})
    return json_response(
        {**job.envelope("chat.completion"), "choices": answers, "usage": job.usage()}, job.call.headers
    )


def _message(text: str, tools: ToolStream | None, finish_reason: str) -> tuple[dict[str, Any], str]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if tools is None:
        return message, finish_reason
    head = tools.push(text)
    tail, calls = tools.finish()
    message["content"] = head + tail
    if calls:
        message |= {"content": (head + tail).strip() or None, "tool_calls": [_tool_call(call) for call in calls]}
        finish_reason = _with_calls(finish_reason)
    return message, finish_reason


def _with_calls(finish_reason: str) -> str:
    """An answer that was cut short says so, though it has calls."""
    return "tool_calls" if finish_reason == "stop" else finish_reason


def _tool_call(call: Any) -> dict[str, Any]:
    return {"id": new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _stream(job: _Job) -> EventStream:
    pieces = merged(job.choices)
    first = await settled_first(pieces)
    return EventStream(_frames(job, first, pieces), job.call.headers, source=pieces)


async def _frames(job: _Job, first: list[Piece], pieces: AsyncGenerator[Piece]) -> AsyncGenerator[bytes]:
    envelope = job.envelope("chat.completion.chunk")
    options = job.body.stream_options
    if options and (options.include_usage or options.include_stages):
        envelope["usage"] = None
    tools = job.tool_streams()
    head = b"".join(_chunk(envelope, choice.index, {"role": "assistant", "content": ""}) for choice in job.choices)
    for piece in first:
        yield head + _text_chunk(job, envelope, piece, tools[piece.index])
        head = b""
    async for piece in pieces:
        if data := _text_chunk(job, envelope, piece, tools[piece.index]):
            yield data
    yield head + b"".join(_end_chunk(envelope, choice, tools[choice.index]) for choice in job.choices)
    if job.wants_stages or (options and options.include_usage):
        yield frame({**envelope, "choices": [], "usage": job.usage()})


def _chunk(envelope: dict[str, Any], index: int, delta: dict[str, Any], **more: Any) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
    return frame({**envelope, "choices": [choice]})


def _text_chunk(job: _Job, envelope: dict[str, Any], piece: Piece, tools: ToolStream | None) -> bytes:
    text = tools.push(piece.text) if tools is not None else piece.text
    more = {"logprobs": {"content": chat_logprobs(job.served, piece.logprobs)}} if piece.logprobs else {}
    return _chunk(envelope, piece.index, {"content": text}, **more) if text or more else b""


def _end_chunk(envelope: dict[str, Any], choice: Choice, tools: ToolStream | None) -> bytes:
    data, finish_reason = b"", choice.finish_reason
    if tools is not None:
        text, calls = tools.finish()
        if text.strip() or (text and not calls):
            data += _chunk(envelope, choice.index, {"content": text})
        if calls:
            deltas = [{"index": position, **_tool_call(call)} for position, call in enumerate(calls)]
            data += _chunk(envelope, choice.index, {"tool_calls": deltas})
            finish_reason = _with_calls(finish_reason)
    return data + _chunk(envelope, choice.index, {}, finish_reason=finish_reason)

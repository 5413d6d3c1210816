"""`POST /v1/completions`: text or token ids in, without a template; several prompts in one request."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from triptych.core.errors import InvalidRequest
from triptych.core.prepared import PreparedRequest
from triptych.http.call import Call
from triptych.http.chat import nth
from triptych.http.choice import Choice, Piece, merged, settled_first
from triptych.http.params import check_traits, sampling_params, stop_strings
from triptych.http.responses import json_response
from triptych.http.schema import CompletionRequest
from triptych.http.seams import Served
from triptych.http.sse import EventStream, frame
from triptych.http.usage import CompletionLogprobs, usage_block
from triptych.http.validate import decode_body

MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16  # the OpenAI API's own


@dataclass(frozen=True, slots=True)
class _Job:
    call: Call
    body: CompletionRequest
    served: Served
    prepared: list[PreparedRequest]
    choices: list[Choice]
    echoes: list[str]  # one a choice
    logprobs: list[CompletionLogprobs]
    created_s: int

    def envelope(self) -> dict[str, Any]:
        return {
            "id": self.call.request_id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.served.name,
        }

    def usage(self) -> dict[str, Any]:
        options = self.body.stream_options
        stages = bool(self.body.include_stages or (options and options.include_stages))
        return usage_block(self.call, self.prepared, stages=stages)


async def completions(call: Call) -> ASGIApp:
    body, ignored = decode_body(await call.body(), CompletionRequest)
    call.ignore(ignored)
    call.parsed()
    job = await _prepare(call, body)
    return await _stream(job) if body.stream else await _whole(job)


async def _prepare(call: Call, body: CompletionRequest) -> _Job:
    limits = call.front.config.http
    check_traits(body, limits)
    _refuse_unsupported(body)
    served = call.select(body.model)
    call.streaming = bool(body.stream)
    call.set_timeout(body.timeout_s)
    stop = stop_strings(body.stop, limits)
    per_prompt, prompts = body.n or 1, prompt_list(body.prompt)
    if len(prompts) * per_prompt > MAX_PROMPTS:
        raise InvalidRequest(f"prompts times n may be {MAX_PROMPTS}, got {len(prompts) * per_prompt}", param="prompt")
    prepared = [await _prompt(call, body, served, prompt, index) for index, prompt in enumerate(prompts)]
    choices: list[Choice] = []
    echoes: list[str] = []
    for prompt, request in zip(prompts, prepared, strict=True):
        call.prepared(request)
        for index in range(per_prompt):
            choices.append(Choice(call, served, nth(request, index, per_prompt), len(choices), stop))
            echoes.append(_echo(served, prompt) if body.echo else "")
    logprobs = [CompletionLogprobs(served, len(echo)) for echo in echoes]
    return _Job(call, body, served, prepared, choices, echoes, logprobs, int(time.time()))


def _refuse_unsupported(body: CompletionRequest) -> None:
    if body.suffix:
        raise InvalidRequest("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(f"best_of must equal n, got {body.best_of}", param="best_of")
    if body.echo and body.logprobs is not None:
        raise InvalidRequest("echo with logprobs is not supported", param="echo")


def prompt_list(prompt: str | list[str | int | list[int]], param: str = "prompt") -> list[str | list[int]]:
    """One entry a prompt: text, token ids, or a list of either. Raises InvalidRequest for an empty or mixed list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    kinds = {type(entry) for entry in prompt}
    if len(kinds) > 1:
        raise InvalidRequest(f"{param} mixes {' and '.join(sorted(kind.__name__ for kind in kinds))}", param=param)
    if kinds == {int}:
        return [[entry for entry in prompt if isinstance(entry, int)]]
    return [entry for entry in prompt if not isinstance(entry, int)]


async def _prompt(
    call: Call, body: CompletionRequest, served: Served, prompt: str | list[int], index: int
) -> PreparedRequest:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return await served.prompts.prepare_completion(
        prompt,
        sampling=sampling_params(body, max_tokens, body.logprobs),
        **call.asker(index=index, cache_salt=body.cache_salt, priority=body.priority),
    )


def _echo(served: Served, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    stream = served.text_stream(())
    return stream.push(prompt) + stream.finish()


def _choice(job: _Job, index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


async def _whole(job: _Job) -> Response:
    texts = list(job.echoes)
    entries: list[list[Any]] = [[] for _ in job.choices]
    async with aclosing(merged(job.choices)) as pieces:
        async for piece in pieces:
            texts[piece.index] += piece.text
            entries[piece.index] += piece.logprobs or []
    answers = []
    for choice, text in zip(job.choices, texts, strict=True):
        wanted = job.body.logprobs is not None
        logprobs = job.logprobs[choice.index].block(entries[choice.index]) if wanted else None
        answers.append(_choice(job, choice.index, text, logprobs, choice.finish_reason))
    return json_response({**job.envelope(), "choices": answers, "usage": job.usage()}, job.call.headers)


async def _stream(job: _Job) -> EventStream:
    pieces = merged(job.choices)
    first = await settled_first(pieces)
    return EventStream(_frames(job, first, pieces), job.call.headers, source=pieces)


async def _frames(job: _Job, first: list[Piece], pieces: AsyncGenerator[Piece]) -> AsyncGenerator[bytes]:
    envelope = job.envelope()
    for index, echo in enumerate(job.echoes):
        if echo:
            yield frame({**envelope, "choices": [_choice(job, index, echo, None, None)]})
    for piece in first:
        yield _text_frame(job, envelope, piece)
    async for piece in pieces:
        if piece.text or piece.logprobs:
            yield _text_frame(job, envelope, piece)
    ends = [_choice(job, choice.index, "", None, choice.finish_reason) for choice in job.choices]
    yield b"".join(frame({**envelope, "choices": [end]}) for end in ends)
    options = job.body.stream_options
    if job.body.include_stages or (options and (options.include_usage or options.include_stages)):
        yield frame({**envelope, "choices": [], "usage": job.usage()})


def _text_frame(job: _Job, envelope: dict[str, Any], piece: Piece) -> bytes:
    logprobs = job.logprobs[piece.index].block(piece.logprobs) if piece.logprobs else None
    return frame({**envelope, "choices": [_choice(job, piece.index, piece.text, logprobs, None)]})

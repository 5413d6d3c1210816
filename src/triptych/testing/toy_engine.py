"""A whole model behind the door without weights: bytes are tokens, and the answer is what the caller said.

For tests of the door, the demo of its protocol and measurements of its overhead. Same seams as the real rooms
(`http.seams`); delays and faults are arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from triptych.core.clock import MonotonicClock
from triptych.core.errors import ModelFault, Overloaded, TriptychError
from triptych.core.events import Event, FinalEvent, FinishReason, TokenEvent, TokenLogprob
from triptych.core.prepared import PreparedRequest
from triptych.core.stages import Stage

EOS_ID = 256
MEDIA_ID = 257
ANSWER_ID = 258  # the prompt's last stretch after this token is what the toy answers


@dataclass(slots=True)
class ToyTimes:
    """Seconds. `encode_s` for each item."""

    queue_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    token_s: float = 0.0


@dataclass(slots=True)
class ToyEngine:
    """An `EngineHandle` that echoes. `fault(request, num_tokens)` may return an error to end with; `max_running`
    refuses more at once with Overloaded; requests
    wait before their first token while `is_held`."""

    times: ToyTimes = field(default_factory=ToyTimes)
    max_running: int = 1024
    fault: Callable[[PreparedRequest, int], TriptychError | None] = lambda request, num_tokens: None
    is_held: bool = False
    seen: list[PreparedRequest] = field(default_factory=list)
    finals: list[FinalEvent] = field(default_factory=list)
    _running: dict[str, asyncio.Event] = field(default_factory=dict)
    _num_steps: int = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        for cancelled in self._running.values():
            cancelled.set()

    def cancel(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].set()

    async def stats(self) -> dict[str, float]:
        return {"num_waiting": 0, "num_running": self.num_running, "kv_blocks": 64, "kv_blocks_used": self.num_running}

    async def flush(self, cache: str) -> int:
        return 0

    async def submit(self, request: PreparedRequest) -> AsyncIterator[Event]:
        self.seen.append(request)
        cancelled = self._running[request.request_id] = asyncio.Event()
        final: FinalEvent | None = None
        try:
            async for event in self._run(request, cancelled):
                final = event if isinstance(event, FinalEvent) else None
                if final is not None:
                    del self._running[request.request_id]
                    self.finals.append(final)
                yield event
        finally:
            if final is None:
                del self._running[request.request_id]
                self.finals.append(FinalEvent(request.request_id, FinishReason.CANCELLED))

    async def _run(self, request: PreparedRequest, cancelled: asyncio.Event) -> AsyncIterator[Event]:
        if len(self._running) > self.max_running:
            yield _failed(request, Overloaded(f"max_running is {self.max_running}"))
            return
        stage_ms: dict[str, float] | None = await self._before_first(request, cancelled)
        answer, limit, reason = answer_ids(request.token_ids), request.sampling.max_tokens, FinishReason.STOP
        if request.sampling.ignore_eos:
            answer = (answer * (limit // max(1, len(answer)) + 1))[:limit] or [0] * limit
        num_tokens = 0
        for token_id in answer:
            if error := self.fault(request, num_tokens):
                yield _failed(request, error)
                return
            if cancelled.is_set() or num_tokens == limit:
                break
            if num_tokens and self.times.token_s:
                await asyncio.sleep(self.times.token_s)
            num_tokens += 1
            yield TokenEvent(
                request.request_id, [token_id], _logprobs(request, token_id), stage_ms, MonotonicClock().now_s()
            )
            stage_ms = None
            await asyncio.sleep(0)
        if cancelled.is_set():
            reason = FinishReason.CANCELLED
        elif num_tokens == limit:
            reason = FinishReason.LENGTH
        yield FinalEvent(
            request.request_id,
            reason,
            num_prompt_tokens=len(request.token_ids),
            num_output_tokens=num_tokens,
            counters={"cached_tokens": 0, "encoder_misses": len(request.items), "encoder_hits": 0},
            sent_s=MonotonicClock().now_s(),
        )

    async def _before_first(self, request: PreparedRequest, cancelled: asyncio.Event) -> dict[str, float]:
        clock = MonotonicClock()
        edges = [clock.now_s()]
        while self.is_held and not cancelled.is_set():  # noqa: ASYNC110  set from a test's thread
            await asyncio.sleep(0.005)
        for seconds in (self.times.queue_s, self.times.encode_s * len(request.items), self.times.prefill_s):
            if seconds:
                await asyncio.sleep(seconds)
            edges.append(clock.now_s())
        stages = (Stage.LLM_QUEUE, Stage.VISION_ENCODE, Stage.LLM_PREFILL)
        return {stage.value: (end - begin) * 1e3 for stage, begin, end in zip(stages, edges, edges[1:], strict=False)}


async def toy_embed(request: PreparedRequest) -> np.ndarray:
    """A histogram of the prompt's bytes, of unit length: float32 [16]."""
    counts = np.bincount(np.asarray(request.token_ids) % 16, minlength=16).astype(np.float32)
    return counts / np.linalg.norm(counts)


def answer_ids(token_ids: Sequence[int]) -> list[int]:
    """What the toy answers to a prompt: the bytes after its last ANSWER_ID, or all of its bytes."""
    ids = list(token_ids)
    start = len(ids) - ids[::-1].index(ANSWER_ID) if ANSWER_ID in ids else 0
    return [token_id for token_id in ids[start:] if token_id < 256]


def toy_token_bytes(token_id: int) -> bytes:
    return bytes([token_id]) if token_id < 256 else b""


class ToyTokenizer:
    """The part of a tokenizer that `prompt.Detokenizer` asks for."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return b"".join(toy_token_bytes(token_id) for token_id in token_ids).decode("utf-8", "replace")


def _logprobs(request: PreparedRequest, token_id: int) -> list[TokenLogprob] | None:
    wanted = request.sampling.top_logprobs
    if wanted is None:
        return None
    others = tuple((other % 256, -1.0 - rank) for rank, other in enumerate(range(token_id, token_id + wanted)))
    return [TokenLogprob(token_id, -0.5, others)]


def _failed(request: PreparedRequest, error: TriptychError) -> FinalEvent:
    return FinalEvent(request.request_id, FinishReason.ERROR, error.code, error.message, error.param)


def model_fault(request: PreparedRequest, num_tokens: int) -> TriptychError | None:
    """A fault for tests: fails after three tokens a request that asks for it."""
    asked = b"please fail" in bytes(token_id for token_id in request.token_ids if token_id < 256)
    return ModelFault("the toy was asked to fail") if asked and num_tokens == 3 else None

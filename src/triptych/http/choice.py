"""One answer being generated: engine events to pieces of text, stop strings, and the cancel when nobody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from triptych.core.errors import Cancelled, from_wire
from triptych.core.events import FinalEvent, FinishReason, TokenEvent, TokenLogprob
from triptych.core.prepared import PreparedRequest
from triptych.http.call import Call
from triptych.http.seams import Served


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of choice `index` (may be empty: bytes of an unfinished character, or a held-back stop string)."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None = None


class Choice:
    """`pieces()` runs it, once. Afterwards `finish_reason`, `num_tokens` and `final` are set."""

    def __init__(self, call: Call, served: Served, prepared: PreparedRequest, index: int, stop: Sequence[str]) -> None:
        self.index = index
        self.finish_reason = ""
        self.num_tokens = 0
        self.final: FinalEvent | None = None
        self._call = call
        self._served = served
        self._prepared = prepared
        self._text = served.text_stream(stop)
        self._first_s = 0.0
        self._last_s = 0.0

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Raises the leaf that the engine's FinalEvent names. Closing it early cancels the request in the engine."""
        request_id, engine = self._prepared.request_id, self._served.engine
        try:
            async for event in engine.submit(self._prepared):
                if isinstance(event, FinalEvent):
                    self.final = event
                    break
                if self._text.stopped or not isinstance(event, TokenEvent):
                    continue  # cancelled below: only the final event is waited for
                self._stamp(event)
                text = self._text.push(event.token_ids)
                if self._text.stopped:
                    engine.cancel(request_id)
                yield Piece(self.index, text, event.logprobs)
        finally:
            if self.final is None:
                engine.cancel(request_id)
        self._settle()
        if tail := self._text.finish():
            yield Piece(self.index, tail)

    def _stamp(self, event: TokenEvent) -> None:
        self._last_s = self._call.now_s()
        self.num_tokens += len(event.token_ids)
        if not self._first_s:
            self._first_s = self._last_s
            if not self._call.first_token_s:
                self._call.first_tokens(event, self._last_s)

    def _settle(self) -> None:
        final = self.final
        if final is None:
            raise from_wire("internal_error", "the engine ended without a final event")
        stopped = self._text.stopped
        if final.reason is FinishReason.ERROR:
            raise final.error()
        if final.reason is FinishReason.CANCELLED and not stopped:
            raise Cancelled("the engine cancelled this request")
        self.finish_reason = FinishReason.STOP.value if stopped else final.reason.value
        gaps = self.num_tokens - 1
        tpot_ms = (self._last_s - self._first_s) * 1e3 / gaps if gaps > 0 else 0.0
        self._call.choice_done(final, self.num_tokens, tpot_ms, self.finish_reason)


async def merged(choices: Sequence[Choice]) -> AsyncGenerator[Piece]:
    """Pieces of all choices as they come. The first failure ends all."""
    if len(choices) == 1:
        async with aclosing(choices[0].pieces()) as pieces:
            async for piece in pieces:
                yield piece
        return
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(choice, queue)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(choice: Choice, queue: asyncio.Queue[Piece | BaseException | None]) -> None:
    try:
        async with aclosing(choice.pieces()) as pieces:
            async for piece in pieces:
                queue.put_nowait(piece)
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)


async def settled_first(pieces: AsyncGenerator[Piece]) -> list[Piece]:
    """Wait for the first piece (none at the end), so that the engine's refusal is a status and no broken stream."""
    async for piece in pieces:
        return [piece]
    return []

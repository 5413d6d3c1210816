"""One request at the door, from its first byte to its record: who asks, under which budget, and where the time goes."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

from starlette.requests import Request

from triptych.core.config import Tenant
from triptych.core.errors import BudgetExceeded, Cancelled, InternalError, TriptychError
from triptych.core.events import FinalEvent, TokenEvent
from triptych.core.prepared import PreparedRequest
from triptych.core.stages import Stage, StageClock
from triptych.http.front import Front
from triptych.http.metered import MeteredMedia
from triptych.http.seams import Served
from triptych.http.status import status_of
from triptych.metrics.cost import CostRecord
from triptych.metrics.spans import emit_spans


class Call:
    """`async with` it: entering takes the tenant's place and counts the request in; leaving undoes both and writes the
    one record, whatever happened. `headers` go into the response."""

    def __init__(self, front: Front, request: Request, endpoint: str, request_id: str, arrival_s: float) -> None:
        self.front = front
        self.request = request
        self.request_id = request_id
        self.clock = StageClock(arrival_s)
        self.headers: dict[str, str] = {}
        self.failure: TriptychError | None = None
        self.streaming = False
        self.first_token_s = 0.0
        self.record = CostRecord(request_id=request_id, endpoint=endpoint, time_s=time.time())
        self.media = MeteredMedia(front.media, self.record.media)
        self.deadline_s = arrival_s + front.config.http.request_timeout_s
        self.timeout = asyncio.timeout(None)
        self.body_read = asyncio.Event()
        self._waits_for_first_byte = False
        self._entered: Tenant | None = None

    async def __aenter__(self) -> Call:
        try:
            self.tenant = self.front.tenants.of(self.request.headers)
            self.record.tenant, self.record.tier = self.tenant.name, self.tenant.tier
            self.tier = self.front.config.tier(self.tenant.tier)
            self.front.enter()
            try:
                self.front.traffic.reserve(self.tenant.name, self.tier, self.now_s())
            except TriptychError:
                self.front.leave()
                raise
        except TriptychError as error:
            self._write(error)
            raise
        self._entered = self.tenant
        self.front.metrics.add("requests_in_flight", 1, self.record.endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._entered is not None
        self.front.traffic.release(self._entered.name)
        self.front.leave()
        self.front.metrics.add("requests_in_flight", -1, self.record.endpoint)
        self._write(self.failure or _as_leaf(error))

    def now_s(self) -> float:
        return self.front.clock.now_s()

    async def body(self) -> bytes:
        """Raises BudgetExceeded as soon as the body is over `max_body_bytes`, before it is read where its length is
        declared."""
        allowed = self.front.config.http.max_body_bytes
        declared = self.request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > allowed:
            raise BudgetExceeded("max_body_bytes", allowed=allowed, requested=int(declared))
        pieces, num_bytes = [], 0
        async for piece in self.request.stream():
            num_bytes += len(piece)
            if num_bytes > allowed:
                raise BudgetExceeded("max_body_bytes", allowed=allowed, requested=num_bytes)
            pieces.append(piece)
        self.body_read.set()
        return b"".join(pieces)

    def set_timeout(self, timeout_s: float | None) -> None:
        """The request ends `timeout_s` after its arrival, if that is earlier than the server's own limit."""
        if timeout_s is not None:
            self.deadline_s = min(self.deadline_s, self.clock.started_s + timeout_s)
        self.timeout.reschedule(asyncio.get_running_loop().time() + max(0.0, self.deadline_s - self.now_s()))

    def asker(self, *, index: int = 0, cache_salt: str | None = None, priority: int | None = None) -> dict[str, Any]:
        """What every prompt of this request is prepared with. `index` counts the prompts: the first has the request's
        own id and clock."""
        return dict(
            tenant=self.tenant.name,
            request_id=self.request_id if index == 0 else f"{self.request_id}-p{index}",
            arrival_s=self.clock.started_s,
            clock=self.clock if index == 0 else StageClock(self.now_s()),
            cache_salt=cache_salt or "",
            deadline_s=self.deadline_s,
            priority=priority or 0,
        )

    def select(self, model: str | None) -> Served:
        served = self.front.select(model)
        self.record.model = served.name
        return served

    def ignore(self, fields: list[str]) -> None:
        """Tell the caller which fields had no effect."""
        if fields:
            shown = ", ".join(sorted(fields)[:20])
            self.headers["x-triptych-ignored"] = shown.encode("ascii", "backslashreplace").decode()[:1000]

    def parsed(self) -> None:
        self.clock.close(Stage.REQUEST_PARSE, self.now_s())

    def prepared(self, request: PreparedRequest) -> None:
        """Count one prepared prompt."""
        record = self.record
        record.prompt_tokens += len(request.token_ids)
        record.media_tokens += sum(span.length for span in request.spans)
        if request.items or self.media.num_opened:
            record.kind = "multimodal"
        if self.media.num_opened:
            record.caches["processor_misses"] = self.media.num_decoded
            record.caches["processor_hits"] = max(0, self.media.num_opened - self.media.num_decoded)

    def first_tokens(self, event: TokenEvent, now_s: float) -> None:
        """Called with the first TokenEvent of all choices: the engine's stages go between the front's.

        What lies between the last stage here and the engine's receipt is waiting for the engine; what lies between its
        sending and the socket is the first stream. So the stages add up to the time to first token by construction.
        """
        self.first_token_s = now_s
        engine_ms = event.stage_ms or {Stage.LLM_PREFILL.value: 0.0}
        sent_s = min(event.sent_s or now_s, now_s)
        queue = Stage.ENCODER_QUEUE if self.record.kind == "multimodal" else Stage.LLM_QUEUE
        self.clock.take(engine_ms, sent_s, gap=queue)
        if self.streaming:
            self._waits_for_first_byte = True
        else:
            self.first_byte(now_s)

    def sent(self) -> None:
        """Called after each write to the socket."""
        if self._waits_for_first_byte:
            self.first_byte(self.now_s())

    def first_byte(self, now_s: float) -> None:
        self._waits_for_first_byte = False
        self.clock.close(Stage.FIRST_STREAM, now_s)
        self.record.ttft_ms = self.clock.total_ms

    def choice_done(self, final: FinalEvent, num_tokens: int, tpot_ms: float, reason: str) -> None:
        """Add one finished choice."""
        record = self.record
        record.output_tokens += num_tokens
        record.tpot_ms = max(record.tpot_ms, tpot_ms)
        record.finish_reason = reason
        for name, value in final.counters.items():
            if name == "cached_tokens":
                record.cached_tokens += int(value)
            else:
                record.caches[name] = record.caches.get(name, 0) + value

    def stage_table(self) -> dict[str, float]:
        """For the usage block: the stages, and what they add up to."""
        table = {stage: round(ms, 3) for stage, ms in self.clock.ms.items()}
        table |= {"ttft_ms": round(self.record.ttft_ms, 3), "tpot_ms": round(self.record.tpot_ms, 3)}
        return table

    def _write(self, error: TriptychError | None) -> None:
        record = self.record
        record.stream = self.streaming
        record.stage_ms = dict(self.clock.ms)
        record.total_ms = (self.now_s() - self.clock.started_s) * 1e3
        if error is not None:
            record.status, record.code = status_of(error), error.code
        self.front.ledger.write(record, self.front.slo_ms(record.kind))
        emit_spans(record, self.request.headers)


def _as_leaf(error: BaseException | None) -> TriptychError | None:
    if error is None or isinstance(error, TriptychError):
        return error
    if isinstance(error, Exception):
        return InternalError("the server failed")
    return Cancelled("the server stopped this request")

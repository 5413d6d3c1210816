"""The step loop: receive, plan, run, settle, send. One thread, the only one that touches rows between its queues."""

from __future__ import annotations

from queue import Empty, Queue

import torch

from triptych.core.clock import Clock
from triptych.core.config import GenerateConfig
from triptych.core.errors import InternalError, ModelFault
from triptych.generate.events import PreviewEvent, StepEvent
from triptych.generate.flight import Flight
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Conditioning, Row
from triptych.generate.preview import LatentPreview
from triptych.generate.request import GenerateRequest, ModelTraits
from triptych.generate.runner import StepOutcome, StepRunner
from triptych.generate.schedule import ONE_WORKER, BatchKey, BatchSizer, Job, StepPlan, StepScheduler, Way, ways_of
from triptych.generate.stages import GenerateStage
from triptych.generate.step_workers import StepWorkers
from triptych.generate.text_stage import TextStage
from triptych.generate.totals import Totals
from triptych.models.cpu_threads import can_limit_threads


class StepLoop:
    """Owns the flights that are being denoised. `inbox` brings prepared ones; None closes it. At most `max_resident`
    are taken in, so that the latents of a long queue do not pile up."""

    def __init__(
        self, kind: Kind, config: GenerateConfig, clock: Clock, outbox: Queue[Flight | None], totals: Totals
    ) -> None:
        self.kind = kind
        self.traits: ModelTraits = kind.traits()
        self.inbox: Queue[Flight | None] = Queue(config.max_resident)
        self.preview: LatentPreview | None = None
        ways: tuple[Way, ...] = (ONE_WORKER,)
        if kind.device.type == "cpu" and can_limit_threads():
            ways = ways_of(config.num_threads or torch.get_num_threads())
        self.sizer = BatchSizer(
            max_step_tokens=config.max_step_tokens, max_branches=config.max_step_branches, ways=ways
        )
        self._config = config
        self._clock = clock
        self._outbox = outbox
        self._totals = totals
        self._scheduler = StepScheduler(self.sizer)
        self._workers = StepWorkers(max(way.num_workers for way in ways)) if len(ways) > 1 else None
        self._runner = StepRunner(kind, max_forward_tokens=config.max_step_tokens, workers=self._workers)
        self._flights: dict[str, Flight] = {}
        self._is_open = True

    def run(self) -> None:
        """Until the inbox is closed and the last flight is gone."""
        while self._is_open or self._flights:
            self._receive()
            self._drop_unwanted()
            plan = self._scheduler.plan()
            if plan is not None:
                self._settle(plan, self._step(plan))

    def close(self) -> None:
        """After `run`."""
        if self._workers is not None:
            self._workers.close()

    def _receive(self) -> None:
        """Take in what waits; sleep when there is nothing else to do."""
        while self._is_open and len(self._flights) < self._config.max_resident:
            try:
                flight = self.inbox.get(block=not self._flights)
            except Empty:
                return
            if flight is None:
                self._is_open = False
            else:
                self._join(flight)

    def _join(self, flight: Flight) -> None:
        assert flight.row is not None
        request = flight.request
        self._flights[flight.request_id] = flight
        self._scheduler.join(
            Job(
                flight.request_id,
                self._key(request),
                flight.row.num_steps,
                len(flight.row.branches),
                self.kind.branch_tokens(request),
            )
        )

    def _drop_unwanted(self) -> None:
        for flight in list(self._flights.values()):
            reason = flight.why_end()
            if reason is not None:
                self._remove(flight, reason)

    def _remove(self, flight: Flight, error: Exception) -> None:
        self._scheduler.leave(flight.request_id)
        del self._flights[flight.request_id]
        flight.fail(error)

    def _step(self, plan: StepPlan) -> StepOutcome:
        flights = [self._flights[job_id] for job_id in plan.job_ids]
        for flight in flights:
            if GenerateStage.DENOISE_QUEUE not in flight.stages.ms:
                flight.close_stage(GenerateStage.DENOISE_QUEUE)
        rows = [_row(flight) for flight in flights]
        keep = [row.step + 1 in flight.preview_steps for flight, row in zip(flights, rows, strict=True)]
        started_s = self._clock.now_s()
        outcome = self._run_safely(rows, keep, plan.way)
        step_ms = (self._clock.now_s() - started_s) * 1e3
        self._measure(plan, flights, step_ms, outcome)
        return outcome

    def _run_safely(self, rows: list[Row], keep: list[bool], way: Way) -> StepOutcome:
        try:
            return self._runner.step(rows, keep_estimates=keep, way=way)
        except Exception as error:  # a mistake of ours: these rows fail, the loop lives on
            fault = InternalError(f"{type(error).__name__} in the step loop")
            return StepOutcome(dict.fromkeys(range(len(rows)), fault))

    def _measure(self, plan: StepPlan, flights: list[Flight], step_ms: float, outcome: StepOutcome) -> None:
        if outcome.ran_out_of_memory:
            self.sizer.limit(str(plan.key), plan.num_branches // 2)
        elif not outcome.failures and not any(_row(flight).caches for flight in flights):  # skipped steps tell nothing
            self.sizer.observe(str(plan.key), plan.num_branches, plan.branch_tokens, plan.way, step_ms)
        self._totals.step(len(flights), step_ms)
        for flight in flights:
            flight.count("steps", 1)
            flight.count("step_ms", step_ms)
            flight.count("batch_rows", len(flights))

    def _settle(self, plan: StepPlan, outcome: StepOutcome) -> None:
        flights = [self._flights[job_id] for job_id in plan.job_ids]
        finished = set(self._scheduler.settle(plan))
        for index, flight in enumerate(flights):
            error = outcome.failures.get(index)
            if error is not None:
                self._remove(flight, error)
                continue
            self._tell(flight)
            if flight.request_id in finished:
                self._send(flight)

    def _tell(self, flight: Flight) -> None:
        row = _row(flight)
        flight.sink(StepEvent(flight.request_id, row.step, row.num_steps))
        if row.step in flight.preview_steps and self.preview is not None:
            started_s = self._clock.now_s()
            pixels = self.preview(row)
            now_s = self._clock.now_s()
            flight.count("preview_ms", (now_s - started_s) * 1e3)
            flight.counters.setdefault("first_preview_ms", (now_s - flight.stages.started_s) * 1e3)
            flight.sink(PreviewEvent(flight.request_id, flight.num_previews_sent, row.step, pixels))
            flight.num_previews_sent += 1
            row.clean_estimate = None

    def _send(self, flight: Flight) -> None:
        del self._flights[flight.request_id]
        flight.counters["mean_batch_rows"] = flight.counters.pop("batch_rows") / flight.counters["steps"]
        if caches := _row(flight).caches:
            flight.counters["cache_hits"] = sum(cache.num_hits for cache in caches)
            flight.counters["cache_lookups"] = len(caches) * _row(flight).num_steps
        flight.close_stage(GenerateStage.DENOISE)
        self._outbox.put(flight)

    def warm_up(self, text: TextStage) -> None:
        """Measure one step of the default size, and then of half its sides, at 1, 2, 4, ... branches, up to the knee or
        `warm_up_s`; what an earlier run left is not measured again."""
        until_s = self._clock.now_s() + self._config.warm_up_s
        for request in _warm_requests(self.traits):
            branch = text.encode(request.prompt, is_negative=False)
            num_branches = 1
            while num_branches <= self.sizer.max_branches(*self._shape(request)):
                if not self._measure_rung(request, branch, num_branches, until_s):
                    return
                num_branches *= 2

    def _shape(self, request: GenerateRequest) -> tuple[str, int]:
        """What the sizer knows a request's rows by: their key's name, and the tokens of a branch."""
        return str(self._key(request)), self.kind.branch_tokens(request)

    def _key(self, request: GenerateRequest) -> BatchKey:
        kind = self.kind
        return BatchKey(kind.name, request.width_px, request.height_px, request.num_frames, kind.variant(request))

    def _measure_rung(self, request: GenerateRequest, branch: Conditioning, num_branches: int, until_s: float) -> bool:
        """Each way until it is known; False when the time is up."""
        shape, branch_tokens = self._shape(request)
        rows = [self.kind.prepare(request, (branch,)) for _ in range(num_branches)]
        for way in self.sizer.ways:
            while way.num_workers <= num_branches and self.sizer.is_worth_trying(shape, num_branches, way):
                started_s = self._clock.now_s()
                if started_s > until_s:
                    return False
                self._runner.predict(rows, way)
                step_ms = (self._clock.now_s() - started_s) * 1e3
                self.sizer.observe(shape, num_branches, branch_tokens, way, step_ms)
        return True

    @property
    def is_busy(self) -> bool:
        """Whether rows are being denoised. Any thread may ask."""
        return len(self._scheduler) > 0

    def stats(self) -> dict[str, float]:
        return {"running": float(len(self._scheduler)), "denoise_queue_depth": float(self.inbox.qsize())}


def _row(flight: Flight) -> Row:
    if flight.row is None:
        raise ModelFault("a flight lost its row")
    return flight.row


def _warm_requests(traits: ModelTraits) -> list[GenerateRequest]:
    multiple = traits.size_multiple_px
    width_px, height_px = traits.default_width_px, traits.default_height_px
    half = tuple(max(1, side_px // 2 // multiple) * multiple for side_px in (width_px, height_px))
    return [
        GenerateRequest(
            request_id="warm-up",
            prompt="a picture",
            width_px=size_px[0],
            height_px=size_px[1],
            num_steps=2,
            guidance_scale=1.0,
            seed=0,
            frames_per_s=traits.default_frames_per_s,
        )
        for size_px in dict.fromkeys(((width_px, height_px), half))
    ]

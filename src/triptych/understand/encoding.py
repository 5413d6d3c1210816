"""The encoder's part of a step: one job at a time, in slices that end at layer edges.

Owned by `EngineCore`. While sequences decode, a slice lasts at most the stall that the setting allows (and at least two
layers); while nobody does, it lasts until the job is done or mail arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from triptych.core.clock import Clock
from triptych.core.errors import ModelFault
from triptych.core.stages import Stage
from triptych.understand.pace import MIN_SLICE_LAYERS, Pace
from triptych.understand.pausable import LayerEdges, PausableCall
from triptych.understand.runner import Runner
from triptych.understand.schedule.encode import EncodeJob
from triptych.understand.schedule.rows import prefill_rows
from triptych.understand.schedule.scheduler import Scheduler
from triptych.understand.sequence import Sequence


@dataclass(frozen=True, slots=True)
class EncodeFault:
    owners: list[Sequence]
    error: ModelFault


@dataclass(slots=True)
class _Slice:
    """Part of a job, from layer edge to layer edge. Mail ends it at the next one, `is_late` after its fewest layers."""

    has_mail: Callable[[], bool]
    is_late: Callable[[], bool] = lambda: False
    num_layers: int = 0

    def is_over(self) -> bool:
        """Asked at the end of each layer."""
        self.num_layers += 1
        return self.has_mail() or (self.num_layers >= MIN_SLICE_LAYERS and self.is_late())


class EncoderLoop:
    def __init__(self, scheduler: Scheduler, runner: Runner, edges: LayerEdges, pace: Pace, clock: Clock) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._edges = edges
        self._pace = pace
        self._clock = clock
        self._job: EncodeJob | None = None
        self._call: PausableCall | None = None
        self._active_s = 0.0

    @property
    def is_busy(self) -> bool:
        return self._job is not None

    def advance(self, has_mail: Callable[[], bool]) -> list[EncodeFault]:
        """Start the next job if none runs, then run one slice of it. Returns the faults of items that failed."""
        started_s = self._clock.now_s()
        self._abandon_if_unwanted()
        if self._job is None and not self._start(started_s):
            return []
        assert self._job is not None
        assert self._call is not None
        part = self._slice(started_s, has_mail)
        is_done, results = self._call.resume(part.is_over)
        now_s = self._clock.now_s()
        self._active_s += now_s - started_s
        if not is_done:
            self._pace.note_slice(part.num_layers, now_s - started_s)
        return self._finish(results, now_s) if is_done else []

    def _slice(self, started_s: float, has_mail: Callable[[], bool]) -> _Slice:
        if not self._language_model_waits():
            return _Slice(has_mail)
        until_s = started_s + self._pace.max_decode_stall_ms / 1e3
        return _Slice(has_mail, lambda: self._clock.now_s() >= until_s)

    def _language_model_waits(self) -> bool:
        scheduler = self._scheduler
        if scheduler.num_decoding:
            return True
        return bool(prefill_rows(scheduler.running, scheduler.cache, budget_tokens=1, soft_cap_tokens=1))

    def _start(self, now_s: float) -> bool:
        job = self._scheduler.next_job(flops_per_s=self._pace.encoder_flops_per_s, now_s=now_s)
        if job is None:
            return False
        self._job, self._active_s = job, 0.0
        self._call = PausableCall(self._edges, lambda: self._runner.encode(job))
        for seq in self._owners(job):
            if seq.num_output_tokens == 0:
                seq.clock.close(Stage.ENCODER_QUEUE, now_s)
            seq.is_encoding = True
        return True

    def _abandon_if_unwanted(self) -> None:
        """All who asked for this job's items are gone: stop it where it stands."""
        if self._job is None or self._call is None:
            return
        if any(self._scheduler.cache.references(item.key) for item in self._job.items):
            return
        self._call.abort()
        for item in self._job.items:
            self._scheduler.cache.drop(item.key)
        self._job = self._call = None

    def _finish(self, results: dict[bytes, torch.Tensor | ModelFault], now_s: float) -> list[EncodeFault]:
        job, self._job, self._call = self._job, None, None
        assert job is not None
        self._pace.note_encode(sum(item.cost_flops for item in job.items), self._active_s)
        owners = self._owners(job)
        for seq in owners:
            if seq.num_output_tokens == 0:
                seq.clock.close(Stage.VISION_ENCODE, now_s)
            seq.is_encoding = False
        faults = []
        encode_ms = self._active_s * 1e3 / len(job.items)
        for item in job.items:
            result = results[item.key]
            if isinstance(result, ModelFault):
                faults.append(EncodeFault(self._scheduler.owners([item.key]), result))
                self._scheduler.cache.drop(item.key)
            else:
                self._runner.keep(item.key, result)
                self._scheduler.cache.mark_ready(item.key, encode_ms)
        placed_s = self._clock.now_s()
        for seq in owners:
            if seq.num_output_tokens == 0:
                seq.clock.close(Stage.EMBEDDING_TRANSFER, placed_s)
        return faults

    def _owners(self, job: EncodeJob) -> list[Sequence]:
        return self._scheduler.owners([item.key for item in job.items])

"""The engine's heart: one `step()` that is its table of contents. Single-threaded; knows no socket and no event loop.

receive (submit, cancel) -> admit -> reserve -> encode a slice -> plan rows -> run -> settle -> emit.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import torch

from triptych.core.clock import Clock
from triptych.core.errors import DeadlineExceeded, InvalidRequest, ModelFault, Overloaded, TriptychError
from triptych.core.events import (
    EmbeddingEvent,
    EmbeddingsDropped,
    EngineEvent,
    FeaturesWanted,
    FinalEvent,
    FinishReason,
    TokenEvent,
)
from triptych.core.prepared import EncoderItem, PreparedRequest
from triptych.core.stages import Stage, StageClock
from triptych.understand.encoding import EncoderLoop
from triptych.understand.grammar import GrammarCompiler
from triptych.understand.pace import Pace
from triptych.understand.runner import Runner
from triptych.understand.sampler import Sampled, SamplingState, sample
from triptych.understand.schedule.rows import Row
from triptych.understand.schedule.scheduler import Scheduler
from triptych.understand.sequence import Sequence
from triptych.understand.stats import encoder_stats, prefix_stats


class EngineCore:
    """`emit` is called with each event, in order; every submitted request gets exactly one FinalEvent."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        encoder: EncoderLoop,
        pace: Pace,
        *,
        max_media_bytes: int,
        grammar: Callable[[], GrammarCompiler],
        clock: Clock,
        emit: Callable[[EngineEvent], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._encoder = encoder
        self._pace = pace
        self._max_media_bytes = max_media_bytes
        self._num_media_bytes = 0
        self._load_grammar = grammar
        self._grammar: GrammarCompiler | None = None
        self._clock = clock
        self._emit = emit
        self._sequences: dict[str, Sequence] = {}
        self._sampling: dict[str, SamplingState] = {}
        self._num_steps = 0
        self._busy_s = 0.0
        self._is_stalled = False

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._encoder.is_busy

    @property
    def waits_for_mail(self) -> bool:
        """Nothing can go on before something comes in: no work, or none but what waits for withheld features."""
        return self._is_stalled or not self.has_work

    # receive

    def submit(self, request: PreparedRequest) -> None:
        """Never raises: what is wrong with the request comes as its final event."""
        try:
            if request.request_id in self._sequences:
                raise InvalidRequest("a request with this id is running", param="request_id")
            self._scheduler.check(request)
            self._check_media_bytes(request.num_media_bytes)
            self._start(request)
        except TriptychError as error:
            self._emit(_failure(request, error, self._clock.now_s()))
        except Exception as error:  # a bug of ours or of a library must not stop the engine
            fault = ModelFault(f"this request cannot be started: {type(error).__name__}")
            self._emit(_failure(request, fault, self._clock.now_s()))

    def _start(self, request: PreparedRequest) -> None:
        params = request.sampling
        grammar = None
        if params.grammar_kind is not None:
            self._grammar = self._grammar or self._load_grammar()
            grammar = self._grammar.compile(params)
        seq = Sequence.of(request, StageClock(request.handoff_s or self._clock.now_s()))
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids))
        self._sampling[seq.request_id] = SamplingState(params, seed, seq.tokens, seq.num_prompt_tokens, ends, grammar)
        self._sequences[seq.request_id] = seq
        self._num_media_bytes += request.num_media_bytes
        self._scheduler.add(seq)

    def supply(self, request_id: str, items: Mapping[int, EncoderItem]) -> None:
        """The features that `FeaturesWanted` asked for. What is wrong with them ends the request; one that is over
        already is fine."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return
        num_bytes = sum(item.num_bytes for item in items.values())
        try:
            self._check_media_bytes(num_bytes)
            self._scheduler.supply(seq, items)
            self._num_media_bytes += num_bytes
        except TriptychError as error:
            self._fail(seq, error)

    def fail(self, request_id: str, error: TriptychError) -> None:
        """End a request for a reason from outside; unknown and finished ids are fine."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._fail(seq, error)

    def _check_media_bytes(self, num_bytes: int) -> None:
        """Processor outputs of all live requests are host memory: bounded, as every cache is."""
        wanted = self._num_media_bytes + num_bytes
        if self._num_media_bytes and wanted > self._max_media_bytes:
            raise Overloaded(f"max_media_bytes is {self._max_media_bytes}, live requests would hold {wanted}")

    def cancel(self, request_id: str) -> None:
        """Frees everything at once; unknown and finished ids are fine."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._finish(seq, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        for request_id in list(self._sequences):
            self.cancel(request_id)

    # step

    def step(self, has_mail: Callable[[], bool]) -> None:
        """One turn of every stage. `has_mail` lets a long encode give way to what just arrived."""
        now_s = self._clock.now_s()
        self._expire(now_s)
        self._scheduler.admit()
        for request_id, item_indices in self._scheduler.reserve_items(now_s).items():
            self._emit(FeaturesWanted(request_id, item_indices))
        self._drop_embeddings()
        for fault in self._encoder.advance(has_mail):
            self._fail_all(fault.owners, fault.error)
        rows = self._scheduler.plan_rows(
            soft_cap_tokens=self._pace.prefill_cap_tokens(is_decoding=self._scheduler.num_decoding > 0)
        )
        if rows:
            self._settle(rows, self._run(rows))
        self._drop_embeddings()
        self._is_stalled = not rows and not self._encoder.is_busy and self._scheduler.waits_for_features
        self._num_steps += 1
        self._busy_s += self._clock.now_s() - now_s

    def _drop_embeddings(self) -> None:
        if keys := self._scheduler.cache.take_dropped():
            self._runner.drop(keys)
            self._emit(EmbeddingsDropped(keys))

    def _expire(self, now_s: float) -> None:
        for seq in list(self._sequences.values()):
            deadline_s = seq.request.deadline_s
            if deadline_s is not None and now_s >= deadline_s:
                self._fail(seq, DeadlineExceeded(f"not done within {deadline_s - seq.request.arrival_s:.1f} s"))

    def _run(self, rows: list[Row]) -> torch.Tensor | None:
        """Last states of the rows that end, or None after a fault was dealt with row by row."""
        started_s = self._clock.now_s()
        for row in rows:
            self._close_stage(row.seq, Stage.VISION_ENCODE if row.seq.is_encoding else Stage.LLM_QUEUE, started_s)
        try:
            hidden = self._runner.hidden(rows)
        except Exception as error:  # whatever model code raises must not stop the engine
            if len(rows) == 1:
                self._fail(rows[0].seq, ModelFault(f"the model failed on this request: {type(error).__name__}"))
            else:
                for row in rows:
                    self._settle([row], self._run([row]))
            return None
        ended_s = self._clock.now_s()
        self._pace.note_step(rows, ended_s - started_s)
        for row in rows:
            self._close_stage(row.seq, Stage.LLM_PREFILL, ended_s)
        return hidden

    def _settle(self, rows: list[Row], hidden: torch.Tensor | None) -> None:
        if hidden is None:
            return
        ending = [row.seq for row in rows if row.num_new == row.seq.num_uncomputed]
        for row in rows:
            self._scheduler.commit(row.seq, row.num_new)
        generating = [i for i, seq in enumerate(ending) if not seq.request.wants_embedding]
        for i in set(range(len(ending))) - set(generating):
            self._emit_embedding(ending[i], hidden[i])
        seqs = [ending[i] for i in generating]
        tokens = self._sample(self._runner.logits(hidden[generating]), seqs) if seqs else []
        for seq, token in zip(seqs, tokens, strict=True):
            self._append(seq, token)

    def _sample(self, logits: torch.Tensor, seqs: list[Sequence]) -> list[Sampled | None]:
        """One token a sequence; None for each whose row the sampler cannot use, whatever the reason."""
        try:
            return sample(logits, [self._sampling[seq.request_id] for seq in seqs])
        except Exception:
            if len(seqs) == 1:
                return [None]
            return [self._sample(logits[i : i + 1], [seq])[0] for i, seq in enumerate(seqs)]

    def _append(self, seq: Sequence, token: Sampled | None) -> None:
        if token is None:
            self._fail(seq, ModelFault("no token can be chosen from the model's logits for this request"))
            return
        state = self._sampling[seq.request_id]
        is_first = seq.num_output_tokens == 0
        seq.tokens.append(token.token_id)
        reason = self._finish_reason(seq, state, token.token_id)
        is_silent = reason is FinishReason.STOP and token.token_id in state.end_token_ids
        if is_first or not is_silent:
            self._emit_token(seq, token, is_first=is_first, is_silent=is_silent)
        if reason is not None:
            self._finish(seq, reason)

    def _finish_reason(self, seq: Sequence, state: SamplingState, token_id: int) -> FinishReason | None:
        if state.grammar is not None:
            state.grammar.advance(token_id)
        if token_id in state.end_token_ids:
            return FinishReason.STOP
        if state.grammar is not None and state.grammar.is_finished:
            return FinishReason.STOP
        if seq.num_output_tokens >= self._scheduler.max_output_tokens(seq.request):
            return FinishReason.LENGTH
        return None

    # emit

    def _emit_embedding(self, seq: Sequence, hidden: torch.Tensor) -> None:
        if not bool(torch.isfinite(hidden).all()):
            self._fail(seq, ModelFault("the model gave an embedding that is not finite for this request"))
            return
        vector = torch.nn.functional.normalize(hidden.float(), dim=0).tolist()
        self._emit(EmbeddingEvent(seq.request_id, vector))
        self._finish(seq, FinishReason.STOP)

    def _emit_token(self, seq: Sequence, token: Sampled, *, is_first: bool, is_silent: bool) -> None:
        now_s = self._clock.now_s()
        if is_first:
            seq.clock.close(Stage.LLM_PREFILL, now_s)
        token_ids = [] if is_silent else [token.token_id]
        logprobs = [token.logprob] if token.logprob is not None and not is_silent else None
        stages = dict(seq.clock.ms) if is_first else None
        self._emit(TokenEvent(seq.request_id, token_ids, logprobs, stages, now_s))

    def _finish(self, seq: Sequence, reason: FinishReason, error: TriptychError | None = None) -> None:
        """The one way out: release everything, forget the request, send its final event. Once a request."""
        if seq.request_id not in self._sequences:
            return
        self._scheduler.remove(seq, forget_blocks=isinstance(error, ModelFault))
        del self._sequences[seq.request_id], self._sampling[seq.request_id]
        self._num_media_bytes -= seq.request.num_media_bytes
        self._emit(
            FinalEvent(
                seq.request_id,
                reason,
                error.code if error else None,
                error.message if error else None,
                error.param if error else None,
                seq.num_prompt_tokens,
                seq.num_output_tokens,
                {
                    "cached_tokens": seq.num_cached_tokens,
                    "encoder_hits": seq.encoder_hits,
                    "encoder_misses": seq.encoder_misses,
                    "preemptions": seq.num_preemptions,
                },
                self._clock.now_s(),
            )
        )

    def _fail(self, seq: Sequence, error: TriptychError) -> None:
        self._finish(seq, FinishReason.ERROR, error)

    def _fail_all(self, seqs: list[Sequence], error: TriptychError) -> None:
        for seq in seqs:
            self._fail(seq, error)

    @staticmethod
    def _close_stage(seq: Sequence, stage: Stage, now_s: float) -> None:
        if seq.num_output_tokens == 0:
            seq.clock.close(stage, now_s)

    # look and admin

    def flush(self, cache: str) -> int:
        """Forget one cache, "encoder" or "prefix"; what is in use is left to its users. Returns the entries
        forgotten."""
        if cache == "encoder":
            return self._scheduler.cache.flush()
        if cache == "prefix":
            return self._scheduler.pool.flush()
        raise InvalidRequest(f"no cache {cache!r} here, there are: encoder, prefix", param="cache")

    def forget(self) -> None:
        """Both caches empty, counters and pace as at the start: for the warm-up. What runs goes on."""
        self._scheduler.forget()
        self._drop_embeddings()
        self._pace.reset()
        self._num_steps, self._busy_s = 0, 0.0

    def stats(self) -> dict[str, float]:
        """Gauges and counters, by the names that `metrics.names.sample_for` knows."""
        scheduler = self._scheduler
        return {
            "num_waiting": len(scheduler.waiting),
            "num_running": len(scheduler.running),
            "num_waiting_items": len(scheduler.waiting_items),
            "live_media_bytes": self._num_media_bytes,
            "engine_steps": self._num_steps,
            "engine_busy_ms": self._busy_s * 1e3,
            "num_preemptions": scheduler.num_preemptions,
            **self._runner.stats(),
            **prefix_stats(scheduler.pool, self._runner.block_bytes, self._pace.prefill_ms_per_token),
            **encoder_stats(scheduler.cache),
        }


def _failure(request: PreparedRequest, error: TriptychError, now_s: float) -> FinalEvent:
    return FinalEvent(
        request.request_id,
        FinishReason.ERROR,
        error.code,
        error.message,
        error.param,
        num_prompt_tokens=len(request.token_ids),
        sent_s=now_s,
        retry_after_s=error.retry_after_s if isinstance(error, Overloaded) else 1.0,
    )

"""The way in: one diffusion engine, in this process, on three threads (encode, step loop, decode).

Path: submit -> encode queue -> TextStage -> StepLoop (StepScheduler, StepRunner) -> decode queue -> DecodeStage.
Every queue is bounded: the whole engine holds at most `max_waiting` requests, and refuses the next one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from queue import Queue

import torch

from triptych.core.clock import Clock, MonotonicClock
from triptych.core.config import GenerateConfig
from triptych.core.errors import InternalError, Overloaded
from triptych.core.stages import StageClock
from triptych.generate.decode_stage import DecodeStage
from triptych.generate.events import GenerateEvent, GenerateFinal
from triptych.generate.flight import Flight
from triptych.generate.kinds.base import Kind
from triptych.generate.knee_store import KneeStore
from triptych.generate.preview import fit_preview
from triptych.generate.request import GenerateRequest, ModelTraits
from triptych.generate.schedule import StepTable
from triptych.generate.step_loop import StepLoop
from triptych.generate.text_stage import TextStage
from triptych.generate.totals import Totals
from triptych.models.cpu_threads import keep_freed_memory, on_cores

log = logging.getLogger(__name__)


class GenerateEngine:
    """Owns the stages and their threads. `submit` and `cancel` may be called from any thread.

    `traits` says what the model can do; requests are expected to have passed `request.check_request`.
    """

    def __init__(
        self,
        kind: Kind,
        config: GenerateConfig | None = None,
        clock: Clock | None = None,
        knees: Callable[[], KneeStore] | None = None,
    ) -> None:
        """`knees` opens the store of step times; without it, or without warm-up, none are kept."""
        self._config = config or GenerateConfig()
        self._clock = clock or MonotonicClock()
        self._kind = kind
        self._flights: dict[str, Flight] = {}
        self._lock = threading.Lock()
        self._encode_queue: Queue[Flight | None] = Queue()
        self._decode_queue: Queue[Flight | None] = Queue(self._config.decode_queue)
        self._text = TextStage(kind, self._clock, cache_bytes=self._config.text_cache_bytes)
        self._decode = DecodeStage(kind)
        self._totals = Totals()
        self._loop = StepLoop(kind, self._config, self._clock, self._decode_queue, self._totals)
        self._open_knees = knees
        self._knees: KneeStore | None = None
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._has_stopped = False

    @property
    def traits(self) -> ModelTraits:
        return self._loop.traits

    @property
    def has_stopped(self) -> bool:
        """Whether the step loop ended by a mistake: nothing more is taken in. Any thread may ask."""
        return self._has_stopped

    async def start(self) -> None:
        """Fit the preview map, measure the batch knee of the default size or recall it, start the threads."""
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        if self._kind.device.type == "cpu":
            keep_freed_memory()
        with torch.inference_mode():
            self._loop.preview = fit_preview(self._kind)
            if self._config.warm_up:
                self._measure_knee()
        for name, target in (("encode", self._run_encode), ("denoise", self._run_loop), ("decode", self._run_decode)):
            thread = threading.Thread(target=target, name=f"generate-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _measure_knee(self) -> None:
        if self._open_knees is not None:
            self._knees = self._open_knees()
            self._loop.sizer.restore(self._knees.load())
        self._loop.warm_up(self._text)
        self._keep_knees()

    def _keep_knees(self) -> None:
        if self._knees is not None:
            self._knees.save(self.step_table())

    async def close(self) -> None:
        """Cancel what is running, wait for the threads. Every open request still gets its final event."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            open_flights = list(self._flights.values())
        for flight in open_flights:
            flight.is_cancelled = True
        self._encode_queue.put(None)
        for thread in self._threads:
            thread.join()
        self._keep_knees()
        for flight in open_flights:
            flight.fail(InternalError("the engine was closed"))

    def submit(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """Accept at once; raises Overloaded, Conflict. Closing the iterator early cancels the request."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[GenerateEvent] = asyncio.Queue()
        self.accept(request, lambda event: _hand_over(loop, events, event))
        return self._events(request.request_id, events)

    def accept(self, request: GenerateRequest, sink: Callable[[GenerateEvent], None]) -> None:
        """`sink` is called from the engine's threads, the last time with the GenerateFinal."""
        now_s = self._clock.now_s()
        stages = StageClock(request.arrival_s or now_s)
        flight = Flight(request, self._clock, self._ending(request, sink), stages)
        with self._lock:
            if self._has_stopped:
                raise InternalError("the step loop stopped; the engine has to be started again")
            if self._is_closed:
                raise Overloaded("the engine is closing")
            self._totals.check_room(request.request_id, self._flights, self._config.max_waiting)
            self._flights[request.request_id] = flight
        self._encode_queue.put(flight)

    def _ending(
        self, request: GenerateRequest, sink: Callable[[GenerateEvent], None]
    ) -> Callable[[GenerateEvent], None]:
        def deliver(event: GenerateEvent) -> None:
            if isinstance(event, GenerateFinal):
                with self._lock:
                    self._flights.pop(request.request_id, None)
                self._totals.end(request, event)
            sink(event)

        return deliver

    async def _events(self, request_id: str, events: asyncio.Queue[GenerateEvent]) -> AsyncIterator[GenerateEvent]:
        try:
            while True:
                event = await events.get()
                yield event
                if isinstance(event, GenerateFinal):
                    return
        finally:
            self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Takes effect at the next edge of whatever stage holds the request; unknown and ended ids are ignored."""
        with self._lock:
            flight = self._flights.get(request_id)
        if flight is not None:
            flight.is_cancelled = True

    async def stats(self) -> dict[str, float]:
        """Gauges and counters, by the names of `metrics.names`."""
        return {
            **self._totals.stats(),
            **self._text.stats(),
            **self._loop.stats(),
            "engine_up": float(not self._has_stopped),
            "generate_encode_queue_depth": float(self._encode_queue.qsize()),
            "generate_decode_queue_depth": float(self._decode_queue.qsize()),
            "generate_in_flight": float(len(self._flights)),
            "generate_tiled_decodes": float(self._decode.num_tiled),
        }

    def step_table(self) -> StepTable:
        """Step time by size, number of branches and way, as measured: where batching stops to pay."""
        return self._loop.sizer.table()

    # the three threads

    @torch.inference_mode()
    def _run_encode(self) -> None:
        while (flight := self._encode_queue.get()) is not None:
            if self._still_wanted(flight):
                try:
                    with self._side_cores():
                        self._text.run(flight)
                except Exception as error:
                    flight.fail(error)
                else:
                    self._loop.inbox.put(flight)
        self._loop.inbox.put(None)

    @torch.inference_mode()
    def _run_loop(self) -> None:
        try:
            self._loop.run()
        except Exception as error:  # a mistake of ours: whoever waits is told, and no more is taken in
            self._give_up(error)
        finally:
            self._decode_queue.put(None)
            self._loop.close()

    def _give_up(self, error: Exception) -> None:
        """End every open request; what the encoder still brings ends too, until the engine is closed."""
        log.exception("the step loop stopped")
        stopped = InternalError(f"the step loop stopped: {type(error).__name__}")
        with self._lock:
            self._has_stopped = True
            open_flights = list(self._flights.values())
        for flight in open_flights:
            flight.fail(stopped)
        while (late := self._loop.inbox.get()) is not None:
            late.fail(stopped)

    @torch.inference_mode()
    def _run_decode(self) -> None:
        while (flight := self._decode_queue.get()) is not None:
            if self._still_wanted(flight):
                try:
                    with self._side_cores():
                        self._decode.run(flight)
                except Exception as error:
                    flight.fail(error)

    def _side_cores(self) -> AbstractContextManager[None]:
        """Encode and decode take half of the cores while the step loop runs, all of them while it sleeps."""
        if self._kind.device.type != "cpu":
            return nullcontext()
        num_threads = self._config.num_threads or torch.get_num_threads()
        return on_cores(max(1, num_threads // 2) if self._loop.is_busy else num_threads)

    def _still_wanted(self, flight: Flight) -> bool:
        reason = flight.why_end()
        if reason is not None:
            flight.fail(reason)
        return reason is None


def _hand_over(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[GenerateEvent], event: GenerateEvent) -> None:
    try:
        loop.call_soon_threadsafe(events.put_nowait, event)
    except RuntimeError:
        return  # the event loop is closed: nobody is left to tell

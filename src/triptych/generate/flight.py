"""One accepted request on its way through the stages, and the promise that it ends in exactly one final event."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from triptych.core.clock import Clock
from triptych.core.errors import Cancelled, DeadlineExceeded, InternalError, TriptychError
from triptych.core.events import FinishReason
from triptych.core.stages import StageClock
from triptych.generate.events import GenerateEvent, GenerateFinal
from triptych.generate.kinds.row import Row
from triptych.generate.request import GenerateRequest
from triptych.generate.stages import GenerateStage


@dataclass(slots=True)
class Flight:
    """Owned by the stage that holds it. `cancel` may come from any thread; whoever ends it first has the last word."""

    request: GenerateRequest
    clock: Clock
    sink: Callable[[GenerateEvent], None]
    stages: StageClock
    row: Row | None = None
    preview_steps: frozenset[int] = frozenset()
    num_previews_sent: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    is_cancelled: bool = False
    is_done: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def close_stage(self, stage: GenerateStage) -> None:
        self.stages.close(stage, self.clock.now_s())

    def count(self, name: str, amount: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount

    def why_end(self) -> TriptychError | None:
        """The reason to stop early, if there is one."""
        if self.is_cancelled:
            return Cancelled("cancelled")
        if self.request.deadline_s is not None and self.clock.now_s() > self.request.deadline_s:
            return DeadlineExceeded("the request ran out of time")
        return None

    def finish(self, frames: npt.NDArray[np.uint8]) -> None:
        self._end(FinishReason.STOP, frames=frames)

    def fail(self, error: BaseException) -> None:
        """End with an error; what is not of our tree becomes InternalError, without its text."""
        leaf = error if isinstance(error, TriptychError) else InternalError(f"{type(error).__name__} in the engine")
        if isinstance(leaf, Cancelled):
            self._end(FinishReason.CANCELLED)
        else:
            self._end(FinishReason.ERROR, error=leaf)

    def _end(
        self,
        reason: FinishReason,
        *,
        frames: npt.NDArray[np.uint8] | None = None,
        error: TriptychError | None = None,
    ) -> None:
        with self._lock:
            if self.is_done:
                return
            self.is_done = True
        self.row = None
        self.sink(GenerateFinal(self.request_id, reason, frames, error, dict(self.stages.ms), dict(self.counters)))


def preview_steps(num_previews: int, num_steps: int) -> frozenset[int]:
    """After which steps (1 to `num_steps` - 1) a preview is due: evenly spread, at most one a step."""
    gaps = num_previews + 1
    return frozenset(step for i in range(1, gaps) if 0 < (step := round(i * num_steps / gaps)) < num_steps)

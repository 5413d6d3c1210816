"""The named stages between arrival and the first token, and the record that a request's clock fills in.

Time to first token is the sum of the stages (U2): each boundary is stamped once, so nothing falls between two stages
and nothing is counted twice. Stages that run side by side for several media of one request are measured as the wall
time from the first start to the last end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    REQUEST_PARSE = "request_parse_ms"
    MEDIA_FETCH = "media_fetch_ms"
    MEDIA_DECODE = "media_decode_ms"
    MM_PROCESSOR = "mm_processor_ms"
    ENCODER_QUEUE = "encoder_queue_ms"
    VISION_ENCODE = "vision_encode_ms"
    EMBEDDING_TRANSFER = "embedding_transfer_ms"
    LLM_QUEUE = "llm_queue_ms"
    LLM_PREFILL = "llm_prefill_ms"
    FIRST_STREAM = "first_stream_ms"


@dataclass(slots=True)
class StageClock:
    """Turns a sequence of boundary stamps into stage durations that add up by construction.

    `close(stage, now_s)` gives all time since the previous boundary to `stage`; a stage may be closed more than once
    (chunked prefill returns to a queue), and its times add.
    """

    started_s: float
    _edge_s: float = field(init=False)
    ms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._edge_s = self.started_s

    def close(self, stage: StrEnum, now_s: float) -> None:
        elapsed_ms = max(0.0, now_s - self._edge_s) * 1e3
        self.ms[stage.value] = self.ms.get(stage.value, 0.0) + elapsed_ms
        self._edge_s = max(self._edge_s, now_s)

    def take(self, ms: Mapping[str, float], ended_s: float, *, gap: StrEnum) -> None:
        """Stages that another process measured, the last of which ended at `ended_s` of the same monotonic clock. What
        lies between the edge here and their beginning goes to `gap`."""
        self.close(gap, ended_s - sum(ms.values()) / 1e3)
        for stage, elapsed_ms in ms.items():
            now_s = min(self._edge_s + elapsed_ms / 1e3, ended_s)
            self.ms[stage] = self.ms.get(stage, 0.0) + max(0.0, now_s - self._edge_s) * 1e3
            self._edge_s = max(self._edge_s, now_s)

    @property
    def edge_s(self) -> float:
        return self._edge_s

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())

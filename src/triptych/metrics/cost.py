"""What a request cost (F3): one structured record, one JSON log line, the counters, and the recent ones for a look.

Written once, at the request's end, whatever the end was.
"""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from triptych.core.media import MediaHeader, Modality
from triptych.metrics.registry import Metrics

LOGGER = logging.getLogger("triptych.requests")


class MediaCost(msgspec.Struct, omit_defaults=True):
    """What was admitted, known from headers. `pixels` counts every frame of a video."""

    images: int = 0
    videos: int = 0
    audios: int = 0
    bytes: int = 0
    pixels: int = 0
    frames: int = 0
    seconds: float = 0.0

    def add(self, header: MediaHeader) -> None:
        self.images += header.modality is Modality.IMAGE
        self.videos += header.modality is Modality.VIDEO
        self.audios += header.modality is Modality.AUDIO
        self.bytes += header.num_bytes
        self.pixels += header.num_pixels * max(1, header.num_frames)
        self.frames += header.num_frames if header.modality is Modality.VIDEO else 0
        self.seconds += header.duration_s


class CostRecord(msgspec.Struct):
    """One line of the request log. `code` is `ok` or the error's code; `stage_ms` sums to `ttft_ms`."""

    request_id: str
    endpoint: str
    time_s: float  # Unix time of arrival
    tenant: str = ""
    tier: str = ""
    model: str = ""
    kind: str = "text"
    status: int = 200
    code: str = "ok"
    finish_reason: str = ""
    stream: bool = False
    media: MediaCost = msgspec.field(default_factory=MediaCost)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    media_tokens: int = 0
    output_tokens: int = 0
    stage_ms: dict[str, float] = {}
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    total_ms: float = 0.0
    generated: dict[str, float] = {}  # pictures, width_px, height_px, frames, steps, guidance_scale, branches
    caches: dict[str, float] = {}  # encoder_hits, encoder_misses, processor_hits, processor_misses, ...

    def log_line(self) -> str:
        return msgspec.json.encode(_rounded(self)).decode()


class Ledger:
    """Takes every finished request's record to the log, the counters and the ring of recent ones."""

    def __init__(self, metrics: Metrics, *, num_recent: int = 64, log: bool = True) -> None:
        self._metrics = metrics
        self._recent: deque[CostRecord] = deque(maxlen=num_recent)
        self._log = log

    def recent(self, tenant: str | None = None) -> list[CostRecord]:
        """Newest first; of one tenant, or of all when None."""
        return [record for record in reversed(self._recent) if tenant is None or record.tenant == tenant]

    def write(self, record: CostRecord, slo_ms: float) -> None:
        self._recent.append(record)
        if self._log:
            LOGGER.info(record.log_line())
        self._count(record)
        self._time(record, slo_ms)

    def _count(self, record: CostRecord) -> None:
        count = self._metrics.count
        count("requests", 1, record.endpoint, record.model, record.tenant, str(record.status), record.code)
        by_tenant = (record.model, record.tenant)
        for name, amount in (
            ("prompt_tokens", record.prompt_tokens),
            ("cached_tokens", record.cached_tokens),
            ("media_tokens", record.media_tokens),
            ("output_tokens", record.output_tokens),
            ("media_bytes", record.media.bytes),
            ("media_pixels", record.media.pixels),
            ("media_frames", record.media.frames),
            ("media_seconds", record.media.seconds),
        ):
            if amount:
                count(name, amount, *by_tenant)
        for modality in Modality:
            if items := getattr(record.media, f"{modality}s"):
                count("media_items", items, *by_tenant, modality.value)

    def _time(self, record: CostRecord, slo_ms: float) -> None:
        by_kind = (record.model, record.kind)
        self._metrics.observe("request_ms", record.total_ms, *by_kind)
        if not record.ttft_ms:
            return
        for stage, ms in record.stage_ms.items():
            self._metrics.observe(stage, ms, *by_kind)
        self._metrics.observe("ttft_ms", record.ttft_ms, *by_kind)
        if record.ttft_ms > slo_ms:
            self._metrics.count("ttft_slo_missed", 1, *by_kind)
        if record.output_tokens > 1:
            self._metrics.observe("tpot_ms", record.tpot_ms, *by_kind)


def _rounded(record: CostRecord) -> dict[str, object]:
    line = msgspec.to_builtins(record)
    for name in ("ttft_ms", "tpot_ms", "total_ms"):
        line[name] = round(line[name], 3)
    line["stage_ms"] = {stage: round(ms, 3) for stage, ms in line["stage_ms"].items()}
    return {name: value for name, value in line.items() if value not in ("", {}, 0, 0.0, False)}

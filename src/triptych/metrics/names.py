"""Every metric: name, kind, unit, labels. The one table that `/metrics`, the docs and the dashboards are made from.

Exported as `triptych_<name>`; counters get Prometheus' `_total`. Durations are milliseconds, as in the requirements.
Stage metrics carry the names of `core.stages.Stage`. `kind` is `text` or `multimodal`: their latencies are never mixed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from triptych.core.stages import Stage

PREFIX = "triptych_"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`buckets` are upper bounds in `unit`, for histograms alone."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        return PREFIX + self.name + ("_total" if self.kind is Kind.COUNTER else "")


LATENCY_BUCKETS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 350, 500, 750, 1000, 2000, 5000, 10_000, 30_000, 60_000)
STAGE_BUCKETS_MS = (0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000)
TPOT_BUCKETS_MS = (1, 2, 4, 6, 8, 10, 13, 16, 20, 25, 30, 40, 60, 80, 100, 200, 500, 1000)

_BY_KIND = ("model", "kind")
_BY_TENANT = ("model", "tenant")
_BY_CACHE = ("model", "cache")

_STAGE_HELP = {
    Stage.REQUEST_PARSE: "arrival to a validated body",
    Stage.MEDIA_FETCH: "policy, fetch, sniff and header of all items of a request",
    Stage.MEDIA_DECODE: "decode of all items of a request",
    Stage.MM_PROCESSOR: "template, tokens, processor and placeholder plan",
    Stage.ENCODER_QUEUE: "waiting for the encoder",
    Stage.VISION_ENCODE: "encoder and projector",
    Stage.EMBEDDING_TRANSFER: "embeddings from encoder to language model",
    Stage.LLM_QUEUE: "waiting for the language model",
    Stage.LLM_PREFILL: "prefill, to the first sampled token",
    Stage.FIRST_STREAM: "first token from the engine to the socket",
}

STAGE_METRICS = tuple(
    Metric(stage.value, Kind.HISTOGRAM, "ms", _STAGE_HELP[stage], _BY_KIND, STAGE_BUCKETS_MS) for stage in Stage
)

LATENCY_METRICS = (
    Metric("ttft_ms", Kind.HISTOGRAM, "ms", "arrival to the first token sent", _BY_KIND, LATENCY_BUCKETS_MS),
    Metric("tpot_ms", Kind.HISTOGRAM, "ms", "mean time of an output token after the first", _BY_KIND, TPOT_BUCKETS_MS),
    Metric("request_ms", Kind.HISTOGRAM, "ms", "arrival to the last byte", _BY_KIND, LATENCY_BUCKETS_MS),
    Metric("ttft_slo_ms", Kind.GAUGE, "ms", "the configured objective for the time to first token", ("kind",)),
    Metric(
        "ttft_slo_missed", Kind.COUNTER, "requests", "requests whose first token came after the objective", _BY_KIND
    ),
)

TRAFFIC_METRICS = (
    Metric("requests", Kind.COUNTER, "requests", "requests ended, by endpoint, HTTP status and error code (ok: none)",
           ("endpoint", "model", "tenant", "status", "code")),
    Metric("requests_in_flight", Kind.GAUGE, "requests", "requests accepted and not yet ended", ("endpoint",)),
    Metric("prompt_tokens", Kind.COUNTER, "tokens", "prompt tokens, media included", _BY_TENANT),
    Metric("cached_tokens", Kind.COUNTER, "tokens", "prompt tokens served from the prefix cache", _BY_TENANT),
    Metric("media_tokens", Kind.COUNTER, "tokens", "prompt positions filled by embeddings", _BY_TENANT),
    Metric("output_tokens", Kind.COUNTER, "tokens", "tokens generated", _BY_TENANT),
    Metric("media_items", Kind.COUNTER, "items", "media items admitted", (*_BY_TENANT, "modality")),
    Metric("media_bytes", Kind.COUNTER, "bytes", "encoded bytes of admitted media", _BY_TENANT),
    Metric("media_pixels", Kind.COUNTER, "pixels", "pixels of admitted media, by frame", _BY_TENANT),
    Metric("media_frames", Kind.COUNTER, "frames", "frames of admitted video", _BY_TENANT),
    Metric("media_seconds", Kind.COUNTER, "seconds", "length of admitted video and audio", _BY_TENANT),
)  # fmt: skip

STATE_METRICS = (
    Metric("queue_depth", Kind.GAUGE, "items", "waiting before a stage", ("model", "queue")),
    Metric("running", Kind.GAUGE, "requests", "requests in the engine's batch", ("model",)),
    Metric("kv_blocks_used", Kind.GAUGE, "blocks", "KV blocks referenced by a request", ("model",)),
    Metric("kv_blocks_total", Kind.GAUGE, "blocks", "KV blocks there are", ("model",)),
    Metric("kv_bytes_total", Kind.GAUGE, "bytes", "memory of the KV cache", ("model",)),
    Metric("encoder_held_bytes", Kind.GAUGE, "bytes", "embeddings that requests reference or wait for", ("model",)),
    Metric(
        "live_media_bytes", Kind.GAUGE, "bytes", "processor outputs of all live requests, in the engine", ("model",)
    ),
    Metric("decode_workers_busy", Kind.GAUGE, "workers", "media decode workers at work", ("model",)),
    Metric("decode_workers", Kind.GAUGE, "workers", "media decode workers there are", ("model",)),
    Metric("media_decode_busy_ms", Kind.COUNTER, "ms", "time the decode workers were at work", ("model",)),
    Metric("media_decode_wait_ms", Kind.COUNTER, "ms", "time that items waited for a decode worker", ("model",)),
    Metric("media_decoded_bytes", Kind.GAUGE, "bytes", "pixels and samples between decoder and processor", ("model",)),
    Metric("media_decodes", Kind.COUNTER, "items", "items decoded", ("model",)),
    Metric("media_decodes_joined", Kind.COUNTER, "items", "items that shared another request's decode", ("model",)),
    Metric("media_fetches", Kind.COUNTER, "requests", "requests to sources of media", ("model",)),
    Metric("media_fetches_joined", Kind.COUNTER, "items", "items that shared another request's fetch", ("model",)),
    Metric("media_fetched_bytes", Kind.COUNTER, "bytes", "bytes read from sources of media", ("model",)),
    Metric("media_sources_refused", Kind.COUNTER, "requests", "sources that the policy refused", ("model",)),
    Metric("engine_restarts", Kind.COUNTER, "restarts", "engine processes started again", ("model",)),
    Metric("transfer_shared_bytes", Kind.GAUGE, "bytes", "shared memory that the engine still reads", ("model",)),
    Metric("transfer_shared_capacity_bytes", Kind.GAUGE, "bytes", "shared memory towards the engine", ("model",)),
    Metric("transfers_shared", Kind.COUNTER, "arrays", "arrays that went through shared memory", ("model",)),
    Metric(
        "transfer_withheld_bytes",
        Kind.COUNTER,
        "bytes",
        "features not sent at first: the engine was to hold the embeddings",
        ("model",),
    ),
    Metric("transfers_asked_for", Kind.COUNTER, "items", "withheld items that the engine lacked after all", ("model",)),
    Metric("transfers_refused", Kind.COUNTER, "arrays", "large arrays sent as frames, for want of room", ("model",)),
    Metric("device_memory_used_bytes", Kind.GAUGE, "bytes", "memory used by the engine on its device", ("model",)),
    Metric("device_memory_total_bytes", Kind.GAUGE, "bytes", "memory of the engine's device", ("model",)),
    Metric("engine_up", Kind.GAUGE, "bool", "1 when the engine answers", ("model",)),
    Metric(
        "preemptions", Kind.COUNTER, "preemptions", "requests that lost their KV and were computed again", ("model",)
    ),
    Metric("prefix_cache_hit_tokens", Kind.COUNTER, "tokens", "prompt tokens found in the prefix cache", ("model",)),
    Metric("prefix_cache_queried_tokens", Kind.COUNTER, "tokens", "prompt tokens looked up in it", ("model",)),
    Metric("engine_steps", Kind.COUNTER, "steps", "engine steps run", ("model",)),
    Metric("engine_busy_ms", Kind.COUNTER, "ms", "time the engine spent in steps", ("model",)),
    Metric("generated_pictures", Kind.COUNTER, "pictures", "pictures and clips made", ("model",)),
    Metric("generated_frames", Kind.COUNTER, "frames", "frames made, a picture being one", ("model",)),
    Metric("generated_pixels", Kind.COUNTER, "pixels", "pixels made, over all frames", ("model",)),
    Metric(
        "generate_row_steps", Kind.COUNTER, "rows", "rows over all steps; by engine_steps, the mean batch", ("model",)
    ),
    Metric("generate_tiled_decodes", Kind.COUNTER, "decodes", "decodes done in tiles for want of memory", ("model",)),
    Metric("generate_refused_queue_full", Kind.COUNTER, "requests", "refused because the queue was full", ("model",)),
    Metric("generate_in_flight", Kind.GAUGE, "pictures", "accepted and not yet ended", ("model",)),
)

CACHE_METRICS = (
    Metric("cache_bytes", Kind.GAUGE, "bytes", "held by a cache", _BY_CACHE),
    Metric("cache_capacity_bytes", Kind.GAUGE, "bytes", "a cache's limit", _BY_CACHE),
    Metric("cache_entries", Kind.GAUGE, "entries", "entries of a cache", _BY_CACHE),
    Metric("cache_hits", Kind.COUNTER, "lookups", "lookups answered by a cache", _BY_CACHE),
    Metric("cache_misses", Kind.COUNTER, "lookups", "lookups not answered by a cache", _BY_CACHE),
    Metric("cache_evictions", Kind.COUNTER, "entries", "entries dropped for room", _BY_CACHE),
    Metric(
        "cache_saved_ms", Kind.COUNTER, "ms", "work that hits made unnecessary, by what the miss had cost", _BY_CACHE
    ),
)

_BY_WORK = ("model", "pixels", "frames", "steps", "branches")

GENERATE_METRICS = (
    *(
        Metric(name, Kind.HISTOGRAM, "ms", what, _BY_WORK, STAGE_BUCKETS_MS)
        for name, what in (
            ("generate_encode_queue_ms", "waiting for the text encoder"),
            ("text_encode_ms", "text encoder, latent and timesteps of one picture"),
            ("denoise_queue_ms", "waiting for the first denoising step"),
            ("denoise_ms", "first to last denoising step of one picture, turns of others included"),
            ("generate_decode_queue_ms", "waiting for the VAE"),
            ("vae_decode_ms", "VAE decode of one picture or clip"),
            ("step_ms", "mean denoising step that one picture was in"),
            ("first_preview_ms", "arrival to the first preview"),
            ("generate_ms", "arrival to the picture, end to end"),
        )
    ),
)

METRICS = STAGE_METRICS + LATENCY_METRICS + TRAFFIC_METRICS + STATE_METRICS + CACHE_METRICS + GENERATE_METRICS
BY_NAME = {metric.name: metric for metric in METRICS}

CACHES = ("processor", "encoder", "prefix")  # F4: never mixed; others (media_alias, fetch) may be reported beside them


@dataclass(frozen=True, slots=True)
class Sample:
    """One statistic of a room, translated: which metric it is, and under which extra labels."""

    metric: Metric
    labels: dict[str, str]


_CACHE_STAT = re.compile(
    r"(?P<cache>[a-z_]+?)_cache_(?P<what>bytes|capacity_bytes|entries|hits|misses|evictions|saved_ms)"
)
_QUEUE_STAT = re.compile(r"(?P<queue>[a-z_]+?)_queue_depth")


_RENAMED = {
    "num_waiting": ("queue_depth", {"queue": "llm"}),
    "num_waiting_items": ("queue_depth", {"queue": "encoder"}),
    "num_running": ("running", {}),
    "num_preemptions": ("preemptions", {}),
    "kv_blocks": ("kv_blocks_total", {}),
    "num_restarts": ("engine_restarts", {}),
}


def sample_for(stat: str) -> Sample | None:
    """Translate a name in `EngineHandle.stats()` or `MediaPlane.stats()`; None when the table has no such metric.

    `<cache>_cache_<bytes|capacity_bytes|entries|hits|misses|evictions|saved_ms>` and `<queue>_queue_depth` become one
    metric each with a label; any other name must be a row of the table labelled by model alone.
    """
    if stat in _RENAMED:
        name, labels = _RENAMED[stat]
        return Sample(BY_NAME[name], labels)
    if found := _CACHE_STAT.fullmatch(stat):
        return Sample(BY_NAME["cache_" + found["what"]], {"cache": found["cache"]})
    if found := _QUEUE_STAT.fullmatch(stat):
        return Sample(BY_NAME["queue_depth"], {"queue": found["queue"]})
    metric = BY_NAME.get(stat)
    return Sample(metric, {}) if metric is not None and metric.labels == ("model",) else None


def as_markdown() -> str:
    """The table of the docs."""
    rows = [f"| `{m.exported}` | {m.kind} | {m.unit} | {', '.join(m.labels)} | {m.help} |" for m in METRICS]
    return "\n".join(["| name | kind | unit | labels | what |", "| --- | --- | --- | --- | --- |", *rows])

"""The table of names, the exposition made from it, cost records, spans, and stages that add up."""

import asyncio
import json
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from triptych.core.media import MediaHeader, Modality
from triptych.core.stages import Stage
from triptych.metrics.cost import CostRecord, Ledger, MediaCost
from triptych.metrics.names import BY_NAME, METRICS, Kind, as_markdown, sample_for
from triptych.metrics.registry import Metrics
from triptych.metrics.spans import emit_spans


def record(**changes: object) -> CostRecord:
    stages = {Stage.REQUEST_PARSE.value: 1.5, Stage.VISION_ENCODE.value: 40.0, Stage.FIRST_STREAM.value: 0.5}
    values = dict(
        request_id="r1",
        endpoint="chat",
        time_s=1000.0,
        tenant="acme",
        model="m",
        kind="multimodal",
        stage_ms=stages,
        ttft_ms=42.0,
        tpot_ms=5.0,
        total_ms=92.0,
        output_tokens=11,
        prompt_tokens=80,
        media=MediaCost(images=1, bytes=1000, pixels=64),
    )
    return CostRecord(**{**values, **changes})


def values(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_names_are_unique_and_carry_their_unit():
    """No two metrics share a name; a duration's name ends in its unit."""
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        if metric.unit in ("ms", "bytes") and metric.name not in ("ttft_slo_missed",):
            assert metric.unit in metric.name


def test_every_stage_has_a_histogram():
    """The stages of the clock and the stages of the table are the same."""
    assert {BY_NAME[stage.value].kind for stage in Stage} == {Kind.HISTOGRAM}


@pytest.mark.parametrize(
    ("stat", "name", "labels"),
    [
        ("encoder_cache_hits", "cache_hits", {"cache": "encoder"}),
        ("prefix_cache_saved_ms", "cache_saved_ms", {"cache": "prefix"}),
        ("processor_cache_capacity_bytes", "cache_capacity_bytes", {"cache": "processor"}),
        ("decode_queue_depth", "queue_depth", {"queue": "decode"}),
        ("num_waiting", "queue_depth", {"queue": "llm"}),
        ("kv_blocks_used", "kv_blocks_used", {}),
    ],
)
def test_statistics_of_rooms_are_translated(stat, name, labels):
    """A room's own counter finds its metric and labels."""
    sample = sample_for(stat)

    assert (sample.metric.name, sample.labels) == (name, labels)


def test_unknown_statistic_is_no_metric():
    """A name that the table lacks, or that needs more labels, is left out."""
    assert sample_for("nonsense") is None
    assert sample_for("requests") is None


def test_exposition_of_own_and_foreign_counters():
    """The front's counters and the snapshots of rooms come out of one scrape, and parse."""
    metrics = Metrics()
    Ledger(metrics, log=False).write(record(), slo_ms=40)
    found = values(metrics.render({"m": {"encoder_cache_hits": 3, "num_waiting": 2, "nonsense": 1}, "front": {}}))

    by_kind = (("kind", "multimodal"), ("model", "m"))
    assert found["triptych_vision_encode_ms_sum", by_kind] == 40
    assert found["triptych_ttft_ms_count", by_kind] == 1
    assert found["triptych_ttft_slo_missed_total", by_kind] == 1
    assert found["triptych_cache_hits_total", (("cache", "encoder"), ("model", "m"))] == 3
    assert found["triptych_queue_depth", (("model", "m"), ("queue", "llm"))] == 2
    assert found["triptych_media_pixels_total", (("model", "m"), ("tenant", "acme"))] == 64


def test_snapshot_is_of_the_last_scrape_alone():
    """A model that is gone leaves no stale figures."""
    metrics = Metrics()
    metrics.render({"old": {"num_running": 1}})

    assert b'model="old"' not in metrics.render({"new": {"num_running": 1}})


def test_failed_request_is_counted_and_not_timed_as_first_token():
    """A request without a first token counts with its code, and in no stage histogram."""
    metrics = Metrics()
    Ledger(metrics, log=False).write(record(ttft_ms=0.0, status=413, code="budget_exceeded"), slo_ms=1)
    text = metrics.render({}).decode()

    assert 'code="budget_exceeded"' in text
    assert "triptych_ttft_ms_count" not in text


def test_log_line_is_one_json_object(caplog):
    """The record is one line; what is empty is left out."""
    with caplog.at_level(logging.INFO, "triptych.requests"):
        Ledger(Metrics()).write(record(), slo_ms=40)
    line = json.loads(caplog.records[0].getMessage())

    assert (line["tenant"], line["media"]["pixels"], line["stage_ms"]["vision_encode_ms"]) == ("acme", 64, 40)
    assert "finish_reason" not in line


def test_recent_records_are_bounded_and_by_tenant():
    """The ring holds the newest, newest first."""
    ledger = Ledger(Metrics(), num_recent=2, log=False)
    for tenant in ("a", "b", "c"):
        ledger.write(record(tenant=tenant), slo_ms=40)

    assert [r.tenant for r in ledger.recent()] == ["c", "b"]
    assert [r.tenant for r in ledger.recent("b")] == ["b"]


def test_media_cost_adds_headers():
    """Pixels count every frame of a video; seconds count video and sound."""
    cost = MediaCost()
    cost.add(MediaHeader(Modality.IMAGE, "image/png", 10, 4, 5))
    cost.add(MediaHeader(Modality.VIDEO, "video/mp4", 20, 2, 2, num_frames=3, duration_s=1.5))
    cost.add(MediaHeader(Modality.AUDIO, "audio/wav", 30, duration_s=2.0))

    assert cost == MediaCost(images=1, videos=1, audios=1, bytes=60, pixels=32, frames=3, seconds=3.5)


def test_spans_lie_end_to_end_under_the_callers():
    """One span a request and one a stage, contiguous, below the caller's own."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    emit_spans(record(), {"traceparent": parent}, provider)
    *stages, root = sorted(exporter.get_finished_spans(), key=lambda span: span.end_time)

    assert [span.name for span in stages] == ["request_parse", "vision_encode", "first_stream"]
    assert format(root.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert [span.start_time for span in stages] == [root.start_time, *(span.end_time for span in stages[:-1])]
    assert stages[-1].end_time - root.start_time == 42_000_000


def test_spans_cost_nothing_without_the_sdk():
    """Without a provider nothing happens."""
    emit_spans(record(), {})


def test_docs_table_has_every_metric():
    """The table of the docs is made from the table of names."""
    assert all(f"`{metric.exported}`" in as_markdown() for metric in METRICS)


def test_metrics_are_used_from_one_thread():
    """Rendering while counting on the same loop never fails."""

    async def both() -> None:
        metrics = Metrics()
        for _ in range(50):
            metrics.count("requests", 1, "chat", "m", "t", "200", "ok")
            metrics.render({})
            await asyncio.sleep(0)

    asyncio.run(both())

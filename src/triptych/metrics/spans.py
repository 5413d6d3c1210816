"""OpenTelemetry spans of a finished request: one for the request, one below it for each stage. No-op without the SDK.

Stages are contiguous, so their spans are laid end to end from the arrival. The caller's `traceparent` is the parent.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.trace import SpanKind, Status, StatusCode

from triptych.core.stages import Stage
from triptych.metrics.cost import CostRecord

_ORDER = {stage.value: position for position, stage in enumerate(Stage)}


def emit_spans(record: CostRecord, headers: Mapping[str, str], provider: trace.TracerProvider | None = None) -> None:
    """Write the spans of `record`; times are Unix nanoseconds counted from its arrival."""
    tracer = trace.get_tracer("triptych", tracer_provider=provider)
    start_ns = int(record.time_s * 1e9)
    span = tracer.start_span(
        record.endpoint,
        context=extract(headers),
        kind=SpanKind.SERVER,
        start_time=start_ns,
        attributes=_attributes(record),
    )
    if not span.is_recording():
        return
    if record.status >= 400:
        span.set_status(Status(StatusCode.ERROR, record.code))
    context, edge_ns = trace.set_span_in_context(span), start_ns
    for stage, ms in sorted(record.stage_ms.items(), key=lambda item: _ORDER.get(item[0], len(_ORDER))):
        child = tracer.start_span(stage.removesuffix("_ms"), context=context, start_time=edge_ns)
        edge_ns += int(ms * 1e6)
        child.end(end_time=edge_ns)
    span.end(end_time=start_ns + int(record.total_ms * 1e6))


def _attributes(record: CostRecord) -> dict[str, str | int | float]:
    return {
        "triptych.request_id": record.request_id,
        "triptych.tenant": record.tenant,
        "triptych.kind": record.kind,
        "triptych.media_pixels": record.media.pixels,
        "triptych.media_tokens": record.media_tokens,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "http.response.status_code": record.status,
    }

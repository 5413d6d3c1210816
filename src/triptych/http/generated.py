"""What a finished picture adds to the record of its call and to the metrics (G8)."""

from __future__ import annotations

from triptych.generate.events import GenerateFinal
from triptych.generate.request import GenerateRequest
from triptych.http.call import Call

STEP_EDGES = (1, 4, 8, 16, 32, 64)
FRAME_EDGES = (1, 16, 64)


def record_final(call: Call, model: str, request: GenerateRequest, final: GenerateFinal) -> None:
    """Exact sizes go to the record; the histograms get bounded labels, so that callers cannot multiply series."""
    record, metrics = call.record, call.front.metrics
    record.generated["pictures"] = record.generated.get("pictures", 0) + 1
    record.generated |= {
        "width_px": request.width_px,
        "height_px": request.height_px,
        "frames": request.num_frames,
        "steps": request.num_steps,
        "guidance_scale": request.guidance_scale,
        "branches": final.counters.get("branches", 1),
    }
    for stage, ms in final.stage_ms.items():
        call.clock.ms[stage] = max(call.clock.ms.get(stage, 0.0), ms)
    labels = work_labels(model, request, int(final.counters.get("branches", 1)))
    for stage, ms in final.stage_ms.items():
        metrics.observe(stage, ms, *labels)
    metrics.observe("generate_ms", sum(final.stage_ms.values()), *labels)
    if steps := final.counters.get("steps"):
        metrics.observe("step_ms", final.counters["step_ms"] / steps, *labels)
    if "first_preview_ms" in final.counters:
        metrics.observe("first_preview_ms", final.counters["first_preview_ms"], *labels)


def work_labels(model: str, request: GenerateRequest, num_branches: int) -> tuple[str, ...]:
    """Model, pixels, frames, steps, branches, as upper edges: pixels by powers of two."""
    pixels = 1 << max(0, request.num_pixels - 1).bit_length()
    return (
        model,
        str(pixels),
        _edge(request.num_frames, FRAME_EDGES),
        _edge(request.num_steps, STEP_EDGES),
        str(num_branches),
    )


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def _edge(value: int, edges: tuple[int, ...]) -> str:
    return next((str(edge) for edge in edges if value <= edge), f"over {edges[-1]}")

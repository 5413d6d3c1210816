"""The stages of one request as a waterfall in a terminal: what came when, and how long it took."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from triptych.client import Answer
from triptych.core.stages import Stage

WIDTH_CHARS = 36
_ORDER = [stage.value for stage in Stage]


def waterfall(answer: Answer) -> Table:
    """One row a stage, its bar where its time lies; the last row is the time to first token."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    total_ms = max(sum(answer.stage_ms.values()), 1e-6)
    edge_ms = 0.0
    for stage in sorted(answer.stage_ms, key=_ORDER.index):
        ms = answer.stage_ms[stage]
        table.add_row(stage.removesuffix("_ms"), f"{ms:.1f} ms", bar(edge_ms, ms, total_ms))
        edge_ms += ms
    table.add_row(Text("time to first token", style="bold"), Text(f"{answer.ttft_ms:.1f} ms", style="bold"))
    if answer.tpot_ms:
        table.add_row("time per output token", f"{answer.tpot_ms:.1f} ms")
    return table


def bar(start_ms: float, ms: float, total_ms: float) -> Text:
    """Eighths of a character, so that a short stage is a short bar and not none."""
    start = start_ms / total_ms * WIDTH_CHARS
    eighths = max(1, round(ms / total_ms * WIDTH_CHARS * 8))
    blocks = "█" * (eighths // 8) + ("" if eighths % 8 == 0 else "▏▎▍▌▋▊▉"[eighths % 8 - 1])
    return Text(" " * min(int(start), WIDTH_CHARS - 1) + blocks, style="cyan")

"""One picture of a run: each row of the ratio table as bars, a panel a row, the target as a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"triptych": "#1b6ca8", "vllm": "#d1602f", "transformers": "#8a8a8a", "openvino": "#5a9e4b"}


def draw(report: dict[str, Any], out: Path) -> None:
    """Write a PNG. Panels without a figure of any peer are left empty."""
    rows = report["ratios"]
    columns = 4
    figure, axes = pyplot.subplots(-(-len(rows) // columns), columns, figsize=(16, 7), layout="constrained")
    for axis, row in zip(axes.flat, rows, strict=False):
        _panel(axis, row)
    for axis in axes.flat[len(rows) :]:
        axis.axis("off")
    about = report["about"]
    figure.suptitle(
        f"{', '.join(about['architecture'] or [])}, {about['dtype']}, {about['threads']} threads, "
        f"{about['cpu']}, {about['date']}"
    )
    figure.savefig(out, dpi=80)
    pyplot.close(figure)


def _panel(axis: Any, row: dict[str, Any]) -> None:
    values = {peer: value for peer, value in row["values"].items() if value is not None}
    bars = axis.bar(list(values), list(values.values()), color=[COLOURS.get(peer, "#444444") for peer in values])
    axis.bar_label(bars, fmt="%.4g", fontsize=8)
    if "vllm" in values:
        target = float(row["target"].split()[0]) * values["vllm"]
        axis.axhline(target, color="black", linestyle="--", linewidth=1)
    ratio = "" if row["ratio"] is None else f"\nratio {row['ratio']:.2f} ({row['target']}): {row['verdict']}"
    axis.set_title(f"{row['what']}{ratio}", fontsize=9)
    axis.set_ylabel(row["unit"])
    axis.tick_params(axis="x", labelsize=8)

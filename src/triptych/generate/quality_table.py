"""Quality reports as tables, for a terminal, a README and the file beside the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from triptych.generate.contact_sheet import ContactSheet
from triptych.generate.evaluate import Case, Report, Summary, summarise
from triptych.generate.picture_files import write_whole

COLUMNS = ("PSNR dB", "SSIM", "mean diff", "latent error", "flicker", "right", "hits", "speedup", "gate")


def by_group(report: Report) -> str:
    """One setting: a row for each size, number of steps and guidance scale, then all together. Worst values."""
    groups: dict[str, list[Case]] = {}
    for case in report.cases:
        groups.setdefault(case.group, []).append(case)
    rows = [(group, summarise(cases)) for group, cases in groups.items()]
    return _table("size, steps, guidance", [*rows, ("all", report.summary)])


def by_setting(reports: Sequence[Report]) -> str:
    """A row for each setting tried; one that was dropped at its first failure is marked."""
    rows = []
    for report in reports:
        dropped = "" if report.is_complete else f", dropped after {report.summary.num_cases}"
        rows.append((f"{report.setting}{dropped}", report.summary))
    return _table("setting", rows)


def by_edit(edits: Mapping[str, Summary]) -> str:
    """A row for each kind of edit that the chosen setting was tried on."""
    return _table("edit", list(edits.items()))


def verdict(report: Report) -> str:
    """One line: whether the setting may be a default, and what it brings."""
    summary = report.summary
    if not report.passes:
        return f"{report.setting}: refused as default: {'; '.join(summary.failures)}"
    speed = "" if summary.speedup is None else f", {summary.speedup:.2f} times as fast"
    return f"{report.setting}: inside the gate, {summary.hit_rate:.0%} skipped{speed}"


def write_report(folder: Path, report: Report, sheet: ContactSheet) -> None:
    """`quality.json` with every case, `quality.md`, `contact-sheet.png`; the folder is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "quality.json", msgspec.json.format(msgspec.json.encode(report), indent=2))
    write_whole(folder / "quality.md", (by_group(report) + "\n\n" + verdict(report) + "\n").encode())
    sheet.save(folder / "contact-sheet.png")


def _table(first: str, rows: Sequence[tuple[str, Summary]]) -> str:
    lines = [f"| {first} | cases | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * (len(COLUMNS) + 1)]
    return "\n".join(
        lines + [f"| {name} | {summary.num_cases} | " + " | ".join(_cells(summary)) + " |" for name, summary in rows]
    )


def _cells(summary: Summary) -> list[str]:
    score = "" if summary.score is None else f"{summary.plain_score:.0%} to {summary.score:.0%}"
    return [
        f"{summary.psnr_db:.1f}",
        f"{summary.ssim:.4f}",
        f"{summary.mean_difference:.2f}",
        f"{summary.latent_error:.4f}",
        f"{summary.flicker:+.2f}",
        score,
        f"{summary.hit_rate:.0%}",
        "" if summary.speedup is None else f"{summary.speedup:.2f}",
        "pass" if summary.passes else "; ".join(summary.failures),
    ]

"""From records to figures: percentiles, rates, goodput, and whether an open loop's run is void. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.load import Record

MAX_LAG_P99_S = 0.05  # a client that is later than this on its own account has not made the load it says


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 50.0


def percentiles_ms(values_s: Sequence[float]) -> dict[str, float] | None:
    if not values_s:
        return None
    found = np.percentile(values_s, [50, 95, 99]) * 1e3
    names = ("p50", "p95", "p99")
    return dict(zip(names, map(_rounded, found), strict=True)) | {"max": _rounded(max(values_s) * 1e3)}


def summarise(records: Sequence[Record], *, slo: Slo | None = None, open_loop: bool = False) -> dict[str, Any]:
    """Figures of one run. Times are milliseconds, rates are per second of the run's wall time (first intended send to
    last end). Failed requests count in `num_failed` and against goodput, and in nothing else."""
    slo = slo or Slo()
    good = [record for record in records if record.error is None]
    wall_s = max(r.end_s for r in records) - min(r.intended_s for r in records) if records else 0.0
    tpots_s = [tpot_s for record in good if (tpot_s := record.tpot_s) is not None]
    figures: dict[str, Any] = {
        "num_requests": len(records),
        "num_failed": len(records) - len(good),
        "errors": sorted({record.error for record in records if record.error})[:3],
        "wall_s": _rounded(wall_s),
        "prompt_tokens": sorted({record.num_prompt_tokens for record in good}),
        "output_tokens": sorted({record.num_output_tokens for record in good}),
        "ttft_ms": percentiles_ms([record.ttft_s for record in good]),
        "tpot_ms": percentiles_ms(tpots_s),
        "itl_ms": percentiles_ms([gap_s for record in good for gap_s in record.gaps_s]),
        "e2e_ms": percentiles_ms([record.e2e_s for record in good]),
        "requests_per_s": _rate(len(good), wall_s),
        "tokens_per_s": _rate(sum(record.num_output_tokens for record in good), wall_s),
        "goodput_per_s": _rate(sum(is_good(record, slo) for record in records), wall_s),
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms},
    }
    if open_loop:
        lags = percentiles_ms([record.lag_s for record in records])
        figures |= {"dispatch_lag_ms": lags, "void": bool(lags and lags["p99"] > MAX_LAG_P99_S * 1e3)}
    if stages := mean_stages(good):
        figures["stages_ms"] = stages
    return figures


def is_good(record: Record, slo: Slo) -> bool:
    if record.error is not None or record.ttft_s * 1e3 > slo.ttft_ms:
        return False
    tpot_s = record.tpot_s
    return tpot_s is None or tpot_s * 1e3 <= slo.tpot_ms


def mean_stages(records: Sequence[Record]) -> dict[str, float] | None:
    """The mean of each stage that servers which know it sent."""
    tables = [record.stages for record in records if record.stages]
    if not tables:
        return None
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: _rounded(sum(table.get(name, 0.0) for table in tables) / len(tables)) for name in names}


def _rate(count: float, wall_s: float) -> float:
    return _rounded(count / wall_s) if wall_s > 0 else 0.0


def _rounded(value: float) -> float:
    """Four significant digits."""
    if value == 0 or not math.isfinite(value):
        return float(value)
    return round(float(value), max(0, 3 - math.floor(math.log10(abs(value)))))

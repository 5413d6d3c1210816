"""The ratios that triptych has to reach against vLLM in the same run, and which were. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """`path` leads from a server's figures to one number. `bound` is the least ratio ours/theirs where more is better,
    else the greatest."""

    what: str
    unit: str
    path: tuple[str, ...]
    bound: float
    more_is_better: bool = False

    def read(self, figures: Figures) -> float | None:
        found: Any = figures
        for name in self.path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return None if found is None else float(found)

    def is_hit(self, ratio: float) -> bool:
        return ratio >= self.bound if self.more_is_better else ratio <= self.bound


TARGETS = (
    Target("time per output token, one stream", "ms", ("single_text", "tpot_ms", "p50"), 0.75),
    Target("TTFT, unique picture, one at a time", "ms", ("single_unique", "ttft_ms", "p50"), 0.7),
    Target("TTFT, repeated picture", "ms", ("single_same", "ttft_ms", "p50"), 0.5),
    Target("requests/s, unique pictures, 8 at a time", "1/s", ("eight_unique", "requests_per_s"), 1.4, True),
    Target("TTFT p50, unique pictures, 8 at a time", "ms", ("eight_unique", "ttft_ms", "p50"), 0.5),
    Target("text inter-token p99 while pictures arrive", "ms", ("mixed", "text_itl_ms", "p99"), 0.25),
    Target("text tokens/s, 8 at a time", "1/s", ("eight_text", "tokens_per_s"), 1.2, True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `values` are by peer; the ratio is None where either side has no figure."""

    target: Target
    values: dict[str, float | None]
    ratio: float | None

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "no figure"
        return "hit" if self.target.is_hit(self.ratio) else "miss"

    @property
    def wanted(self) -> str:
        return f"{self.target.bound:g} or {'more' if self.target.more_is_better else 'less'}"


def rows(by_peer: Mapping[str, Figures], ours: str = "triptych", theirs: str = "vllm") -> list[Row]:
    found = []
    for target in TARGETS:
        values = {peer: target.read(figures) for peer, figures in by_peer.items()}
        mine, other = values.get(ours), values.get(theirs)
        found.append(Row(target, values, round(mine / other, 3) if mine is not None and other else None))
    return found

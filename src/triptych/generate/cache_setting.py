"""What a step cache is set to. Pure; the form in which calibration files hold it."""

from __future__ import annotations

import msgspec

FIRST_BLOCK = "first-block"
TEACACHE = "teacache"
STEP_CACHES = (FIRST_BLOCK, TEACACHE)
NO_CACHE = "none"  # what a request says to be drawn without the model's default cache
MAX_CONSECUTIVE_HITS = 3


class CacheSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`threshold`: a step is skipped while its measure stays below it.

    `order`: 0 adds again what the blocks added at the last computed step, 1 follows the line through the last two.
    `warm_up_share`: of the steps, those at the beginning, which always compute: there the picture is laid out.
    `coefficients`: of TeaCache's polynomial, highest power first; empty for the first-block cache.
    """

    cache: str
    threshold: float
    order: int = 0
    warm_up_share: float = 0.0
    max_consecutive_hits: int = MAX_CONSECUTIVE_HITS
    coefficients: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.cache not in STEP_CACHES:
            raise ValueError(f"cache must be one of {', '.join(STEP_CACHES)}, got {self.cache!r}")
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be 0 or more, got {self.threshold}")
        if self.order not in (0, 1):
            raise ValueError(f"order must be 0 or 1, got {self.order}")
        if not 0 <= self.warm_up_share < 1:
            raise ValueError(f"warm_up_share must be at least 0 and below 1, got {self.warm_up_share}")
        if self.max_consecutive_hits < 1:
            raise ValueError(f"max_consecutive_hits must be at least 1, got {self.max_consecutive_hits}")
        if (self.cache == TEACACHE) != bool(self.coefficients):
            raise ValueError(f"coefficients belong to {TEACACHE}, and it needs them")

    def __str__(self) -> str:
        warm_up = f", first {self.warm_up_share:.0%} computed" if self.warm_up_share else ""
        return f"{self.cache} {self.threshold:g}, order {self.order}{warm_up}"

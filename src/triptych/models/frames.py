"""Which frames of a video are looked at: a plan from the header alone, so that tokens are counted before decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from triptych.core.errors import InvalidMedia, InvalidRequest
from triptych.core.media import MediaHeader

OPTION_NAMES = frozenset({"fps", "num_frames", "max_frames"})


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """`frames_per_s` of the video's own time, at least `min_frames`, at most `max_frames`, a multiple of `multiple`."""

    frames_per_s: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    multiple: int = 1
    num_frames: int | None = None

    def with_options(self, options: dict[str, Any]) -> FrameSampling:
        """What a request asks for: `fps` or `num_frames`, and `max_frames` not above the model's own."""
        sampling = self
        for name, value in options.items():
            if name not in OPTION_NAMES:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise InvalidRequest(f"media option {name} must be a number above 0, got {value!r}")
            if name == "fps":
                sampling = replace(sampling, frames_per_s=float(value), num_frames=None)
            elif name == "num_frames":
                sampling = replace(sampling, num_frames=int(value))
            else:
                sampling = replace(sampling, max_frames=min(self.max_frames, int(value)))
        return sampling


@dataclass(frozen=True, slots=True)
class FramePlan:
    """`indices` into the video's frames and the seconds they are shown at; `interval_s` is the mean step."""

    indices: tuple[int, ...]
    times_s: tuple[float, ...]
    interval_s: float


def plan_frames(header: MediaHeader, sampling: FrameSampling) -> FramePlan:
    """Evenly spaced frames. Raises InvalidMedia for a video without frames or without a clock."""
    total = header.num_frames
    rate = header.frames_per_s or (total / header.duration_s if header.duration_s > 0 else 0.0)
    if total < 1 or rate <= 0:
        raise InvalidMedia(f"a video of {total} frames at {rate:g} frames a second")
    wanted = sampling.num_frames or total / rate * sampling.frames_per_s
    wanted = min(max(wanted, sampling.min_frames), sampling.max_frames, total)
    count = max(1, math.floor(wanted / sampling.multiple) * sampling.multiple)
    indices = tuple(min(total - 1, int(i * (total / count))) for i in range(count))
    return FramePlan(indices, tuple(index / rate for index in indices), total / rate / count)

"""SmolVLM's clips: which frames, and the words that its stock processor lays around them. From the header alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from num2words import num2words
from transformers.models.smolvlm.video_processing_smolvlm import (
    DEFAULT_MEDIA_OUTTRO,
    DEFAULT_VIDEO_INTRO,
    FRAME_TIMESTAMP_MESSAGE,
)

from triptych.core.errors import InvalidMedia
from triptych.core.media import MediaHeader
from triptych.models.folder import ModelFolder
from triptych.models.frames import FramePlan, FrameSampling

SKIP_S = 1.0  # left out at either end of a clip that is long enough


@dataclass(frozen=True, slots=True)
class ClipSettings:
    """`longest_edge_px` of a frame before it is squeezed to one tile."""

    sampling: FrameSampling
    longest_edge_px: int


def clip_settings(folder: ModelFolder, tile_px: int) -> ClipSettings:
    """From the folder's video processor, wherever it keeps it; else SmolVLM 2's own: one frame a second, up to 64."""
    nested = folder.read_json("processor_config.json").get("video_processor", {})
    named = folder.read_json("video_preprocessor_config.json")
    found: dict[str, Any] = folder.read_json("preprocessor_config.json") | nested | named
    wanted = found.get("video_sampling", {})
    sampling = FrameSampling(
        frames_per_s=float(wanted.get("fps", 1.0)), min_frames=1, max_frames=int(wanted.get("max_frames", 64))
    )
    return ClipSettings(sampling, int(wanted.get("video_size", {}).get("longest_edge", tile_px)))


def plan_clip(header: MediaHeader, sampling: FrameSampling) -> FramePlan:
    """Evenly spaced from the first frame to the last, without a second at either end of a long clip: the indices of
    the stock `sample_frames`. `num_frames` asks for that many, whatever the clip's length. Raises InvalidMedia."""
    total = header.num_frames
    rate = header.frames_per_s or (total / header.duration_s if header.duration_s > 0 else 0.0)
    if total < 1 or rate <= 0:
        raise InvalidMedia(f"a video of {total} frames at {rate:g} frames a second")
    duration_s = clip_duration_s(header)
    estimated = sampling.num_frames or round(sampling.frames_per_s * duration_s)
    first, last = 0, total - 1
    if duration_s - 2 * SKIP_S > sampling.max_frames * sampling.frames_per_s:
        first, last = int(SKIP_S * rate), min(int(total - SKIP_S * rate), total - 1)
        if first >= last:
            first, last = 0, total - 1
    indices = np.unique(np.linspace(first, last, max(1, min(estimated, sampling.max_frames)), dtype=int))
    return FramePlan(tuple(int(i) for i in indices), tuple(float(i / rate) for i in indices), duration_s / len(indices))


def clip_duration_s(header: MediaHeader) -> float:
    return header.duration_s or header.num_frames / header.frames_per_s


def clip_text(times_s: Sequence[float], duration_s: float, frame: str) -> str:
    """What stands for a clip in the prompt; `frame` is what stands for one picture that is a single tile."""
    intro = DEFAULT_VIDEO_INTRO.format(
        frame_count=num2words(len(times_s)), video_duration=str(timedelta(seconds=int(duration_s)))
    )
    stamps = [f"{int(time_s // 60):02d}:{int(time_s % 60):02d}" for time_s in times_s]
    frames = [FRAME_TIMESTAMP_MESSAGE.format(timestamp=stamp) + frame for stamp in stamps]
    return intro + "".join(frames) + DEFAULT_MEDIA_OUTTRO

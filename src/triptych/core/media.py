"""Media as values: what a request refers to, what a header says, what decoding yields.

Path: MediaRef (from the body) -> MediaBlob (bytes, header, identity; budget checked) -> Decoded* (pixels, samples).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt


class Modality(StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class MediaRef:
    """One media part of a request, as the caller wrote it. Nothing of it is trusted yet.

    `source` is a URL (https, data, file under a configured root) or the bytes themselves; None when only
    `media_id` (an alias inside the tenant) is given. `param` names the request field, for errors.
    """

    modality: Modality
    source: str | bytes | None
    media_id: str | None = None
    param: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MediaHeader:
    """What is known before decoding. Sizes are as a person sees them (after EXIF or container rotation)."""

    modality: Modality
    mime: str
    num_bytes: int
    width_px: int = 0
    height_px: int = 0
    num_frames: int = 1
    frames_per_s: float = 0.0
    duration_s: float = 0.0
    sample_rate_hz: int = 0
    num_channels: int = 0

    @property
    def num_pixels(self) -> int:
        return self.width_px * self.height_px


@dataclass(frozen=True, slots=True)
class MediaBlob:
    """Fetched, sniffed, within budget and named by its content; not decoded.

    `digest` is the 32-byte BLAKE3 of the encoded bytes and of nothing else: whoever caches a product of them adds what
    changes that product (decode parameters, processor, model revision, dtype, tenant) to the key.
    """

    header: MediaHeader
    data: bytes
    digest: bytes
    param: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    fetch_ms: float = 0.0


OnOpen = Callable[[int, MediaBlob], None]  # the item's place in the request, and the item


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """`full_px`: the (width, height) of the header, where a scaled decode gave fewer pixels; None: the pixels' own."""

    pixels: npt.NDArray[np.uint8]  # [H, W, 3] RGB
    full_px: tuple[int, int] | None = None

    @property
    def seen_px(self) -> tuple[int, int]:
        """(width, height) that sizes are counted by."""
        height_px, width_px = self.pixels.shape[:2]
        return self.full_px or (width_px, height_px)


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    frames: npt.NDArray[np.uint8]  # [T, H, W, 3] RGB
    times_s: npt.NDArray[np.float64]  # [T] presentation times
    frames_per_s: float  # of the container


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    samples: npt.NDArray[np.float32]  # [N] mono, -1 to 1
    sample_rate_hz: int


Decoded = DecodedImage | DecodedVideo | DecodedAudio


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """How to decode; every field that changes the result is part of a cache key (`key()`).

    `fit_px`: the consumer will shrink the picture to fit (width, height) anyway, so a scaled decode may be used.
    Video: `num_frames` evenly spaced, or `frames_per_s`, or `times_s`, in that order of precedence; at most
    `max_frames`. Audio: resampled to `sample_rate_hz`.
    """

    fit_px: tuple[int, int] | None = None
    background_rgb: tuple[int, int, int] = (255, 255, 255)
    num_frames: int | None = None
    frames_per_s: float | None = None
    times_s: tuple[float, ...] | None = None
    max_frames: int = 768
    sample_rate_hz: int = 16_000

    def key(self) -> bytes:
        return repr(self).encode()

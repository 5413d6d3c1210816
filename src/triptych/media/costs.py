"""Rough seconds that decoding takes on one core, from the header: for ordering the pool, not for promises. Pure."""

from __future__ import annotations

from triptych.core.media import DecodeSpec, MediaHeader, Modality
from triptych.media.budget import num_sampled_frames

PICTURE_PIXELS_PER_S = 100e6
FILM_PIXELS_PER_S = 400e6
FRAMES_PER_SEEK = 60  # decoded for one sampled frame, where jumps are possible
AUDIO_S_PER_S = 500.0


def decoded_bytes(header: MediaHeader, spec: DecodeSpec) -> int:
    """What a decode yields, at most: pixels of three bytes, samples of four."""
    if header.modality is Modality.AUDIO:
        return round(header.duration_s * spec.sample_rate_hz) * 4
    num_frames = num_sampled_frames(header, spec) if header.modality is Modality.VIDEO else 1
    return num_frames * header.num_pixels * 3


def decode_cost_s(header: MediaHeader, spec: DecodeSpec) -> float:
    if header.modality is Modality.AUDIO:
        return header.duration_s / AUDIO_S_PER_S
    if header.modality is Modality.IMAGE:
        return header.num_pixels / PICTURE_PIXELS_PER_S
    num_frames = min(header.num_frames, num_sampled_frames(header, spec) * FRAMES_PER_SEEK)
    return num_frames * header.num_pixels / FILM_PIXELS_PER_S

"""Bytes to header, bytes to pixels and samples. The only rooms where a codec library meets what a stranger sent.

Every function works in a pool thread, holds to a `DecodeGuard`, and raises leaves of `core.errors` alone.
"""

from __future__ import annotations

from collections.abc import Generator

from triptych.core.errors import InvalidMedia
from triptych.core.media import Decoded, DecodedVideo, DecodeSpec, MediaHeader, Modality
from triptych.media.budget import DecodeGuard
from triptych.media.decode.animation import decode_animation, frame_delays_s
from triptych.media.decode.audio import decode_audio, inspect_audio
from triptych.media.decode.image import decode_image
from triptych.media.decode.picture import inspect_picture, open_picture, picture_errors
from triptych.media.decode.source import ANIMATION_BYTES_A_READ
from triptych.media.decode.video import decode_video, inspect_video, sample_times
from triptych.media.sniff import Kind, check_modality, sniff


def inspect(data: bytes, modality: Modality, guard: DecodeGuard) -> MediaHeader:
    """What `data` is, by its own bytes. Raises UnsupportedMedia, InvalidMedia, BudgetExceeded."""
    kind = sniff(data)
    check_modality(kind, modality)
    if kind.is_picture:
        return inspect_picture(data, kind, modality, guard)
    return inspect_video(data, kind, guard) if modality is Modality.VIDEO else inspect_audio(data, kind, guard)


def decode(data: bytes, header: MediaHeader, spec: DecodeSpec, guard: DecodeGuard) -> Generator[None, None, Decoded]:
    """A generator whose value is the result; it yields where a pause or a cancel is possible."""
    kind = sniff(data)
    check_modality(kind, header.modality)
    if header.modality is Modality.IMAGE:
        return decode_image(data, kind, spec, guard)
    if header.modality is Modality.AUDIO:
        return (yield from decode_audio(data, kind, spec, guard))
    if kind.is_picture:
        return (yield from _decode_animation(data, kind, header, spec, guard))
    return (yield from decode_video(data, kind, header, spec, guard))


def _decode_animation(
    data: bytes, kind: Kind, header: MediaHeader, spec: DecodeSpec, guard: DecodeGuard
) -> Generator[None, None, DecodedVideo]:
    times_s = sample_times(header, spec)
    if not times_s:
        raise InvalidMedia("no frames were asked for")
    with picture_errors(kind):
        picture = open_picture(data, kind, ANIMATION_BYTES_A_READ)
        guard.see_picture(*picture.size)
        return (yield from decode_animation(picture, frame_delays_s(data, kind), times_s, spec.background_rgb, guard))


__all__ = ["decode", "inspect"]

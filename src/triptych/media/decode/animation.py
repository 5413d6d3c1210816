"""Animated GIF and WebP as video: frame times read from the file's blocks, frames composed by Pillow."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, islice

import numpy as np
from PIL.ImageFile import ImageFile

from triptych.core.errors import InvalidMedia
from triptych.core.media import DecodedVideo
from triptych.media.budget import DecodeGuard
from triptych.media.decode.rgb import to_rgb
from triptych.media.decode.source import Pieces
from triptych.media.sniff import GIF, WEBP, Kind

DEFAULT_DELAY_S = 0.1  # what browsers show where a file asks for 10 ms or less
MAX_ANIMATION_FRAMES = 10_000
TOLERANCE_S = 0.002  # forgives rounded times; delays are multiples of 1 or 10 ms


def frame_delays_s(data: bytes, kind: Kind) -> list[float]:
    """Seconds that each frame is shown; a still picture is one frame. Raises InvalidMedia."""
    try:
        walk = _gif_delays_ms(data) if kind is GIF else _webp_delays_ms(data)
        delays_ms = list(islice(walk, MAX_ANIMATION_FRAMES + 1))
    except (IndexError, struct.error) as error:
        raise InvalidMedia(f"the {kind.mime} file is cut off") from error
    if len(delays_ms) > MAX_ANIMATION_FRAMES:
        raise InvalidMedia(f"the animation has more than {MAX_ANIMATION_FRAMES} frames")
    return [delay_ms / 1e3 if delay_ms > 10 else DEFAULT_DELAY_S for delay_ms in delays_ms or [0]]


def _gif_delays_ms(data: bytes) -> Iterator[int]:
    """Walk the blocks. A graphic control extension gives the delay of the image after it."""
    at = 13 + _color_table_bytes(data[10])
    delay_ms = 0
    pieces = Pieces(len(data), GIF)
    while True:
        pieces.take()
        block = data[at]
        if block == 0x21:
            if data[at + 1] == 0xF9:
                delay_ms = 10 * struct.unpack_from("<H", data, at + 4)[0]
            at = _skip_sub_blocks(data, at + 2, pieces)
        elif block == 0x2C:
            yield delay_ms
            delay_ms = 0
            at = _skip_sub_blocks(data, at + 11 + _color_table_bytes(data[at + 9]), pieces)
        else:  # 0x3B ends the file; anything else ends what can be read
            return


def _color_table_bytes(flags: int) -> int:
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_sub_blocks(data: bytes, at: int, pieces: Pieces) -> int:
    while data[at]:
        pieces.take()
        at += 1 + data[at]
    return at + 1


def _webp_delays_ms(data: bytes) -> Iterator[int]:
    """Walk the RIFF chunks: each ANMF is a frame, its duration in 24 bits."""
    at = 12
    pieces = Pieces(len(data), WEBP)
    while at + 8 <= len(data):
        pieces.take()
        name, num_bytes = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        if name == b"ANMF":
            yield int.from_bytes(data[at + 20 : at + 23], "little")
        at += 8 + num_bytes + num_bytes % 2


def decode_animation(
    picture: ImageFile,
    delays_s: Sequence[float],
    times_s: Sequence[float],
    background_rgb: tuple[int, int, int],
    guard: DecodeGuard,
) -> Generator[None, None, DecodedVideo]:
    """The frames shown at `times_s`. Pauses (yields) between frames; call within `picture_errors`."""
    starts_s = [0.0, *accumulate(delays_s)][:-1]
    wanted = [max(0, bisect_right(starts_s, time_s + TOLERANCE_S) - 1) for time_s in times_s]
    frames = np.empty((len(times_s), picture.height, picture.width, 3), np.uint8)
    for index in range(max(wanted) + 1):
        picture.seek(index)
        guard.see_frame(*picture.size, starts_s[index])
        picture.load()
        places = [place for place, want in enumerate(wanted) if want == index]
        if places:
            frames[places] = to_rgb(picture, background_rgb)
        yield
    return DecodedVideo(frames, np.array([starts_s[index] for index in wanted]), len(delays_s) / sum(delays_s))

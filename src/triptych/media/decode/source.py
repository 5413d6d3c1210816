"""Bytes as files that watch over their reader: a codec library that loses itself in what a stranger wrote is stopped
at its next read, in the same thread.
"""

from __future__ import annotations

import io
import math
import threading
import time

from triptych.core.errors import InvalidMedia
from triptych.media.budget import DecodeGuard
from triptych.media.sniff import Kind

FREE_READS = 10_000
FREE_BLOCKS = 100_000
PICTURE_BYTES_A_READ = 128  # honest pictures are read in pieces of kilobytes, animations in blocks of 255 bytes
ANIMATION_BYTES_A_READ = 32
MAX_STALL_S = 5.0


class Pieces:
    """Counts the blocks that a walk of our own goes over. `take` raises InvalidMedia where there are too many."""

    def __init__(self, num_bytes: int, kind: Kind) -> None:
        self._kind = kind
        self._left = FREE_BLOCKS + num_bytes // ANIMATION_BYTES_A_READ

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise too_many_pieces(self._kind.mime)


class PictureFile(io.BytesIO):
    """For Pillow, whose parsers are loops in Python: a file of millions of empty blocks would hold the interpreter for
    minutes. Raises InvalidMedia at the read after the last one allowed."""

    def __init__(self, data: bytes, kind: Kind, bytes_a_read: int = PICTURE_BYTES_A_READ) -> None:
        super().__init__(data)
        self._mime = kind.mime
        self._reads_left = FREE_READS + len(data) // bytes_a_read

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise too_many_pieces(self._mime)
        return super().read(size)


class ContainerFile(io.BytesIO):
    """For FFmpeg: its demuxers may search for long without yielding anything. Raises TimeoutError at the first read
    after MAX_STALL_S of this thread's work in which `guard` has seen nothing new, and then stands at its end. Neither
    pauses between frames nor a busy machine count."""

    def __init__(self, data: bytes, guard: DecodeGuard) -> None:
        super().__init__(data)
        self._guard = guard
        self._place = (-1, 0)  # what was seen by then, and in which thread: a pause may end in another
        self._since_s = 0.0

    def read(self, size: int | None = -1, /) -> bytes:
        now_s, place = time.thread_time(), (self._guard.num_seen, threading.get_ident())
        if place != self._place:
            self._place, self._since_s = place, now_s
        elif now_s - self._since_s > MAX_STALL_S:
            self._since_s = math.inf
            raise TimeoutError("the demuxer yields nothing")
        if self._since_s == math.inf:
            return b""
        return super().read(size)


def too_many_pieces(mime: str) -> InvalidMedia:
    return InvalidMedia(f"the {mime} file is in too many small pieces to be read")

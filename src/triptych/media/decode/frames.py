"""Reads a film's frames in order of time, and jumps to a keyframe where that skips work and yields the same frames.

One `FrameReader` owns one open container, in one thread at a time. Times are seconds from the film's first frame.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from av.container.input import InputContainer
from av.video.frame import VideoFrame

from triptych.media.budget import DecodeGuard

# Demuxers whose index, or whose packets, give every keyframe's place exactly.
SEEKABLE = frozenset({"mp4", "matroska", "avi"})
MIN_SKIP_FRAMES = 12  # a shorter jump costs more than decoding on


MAX_FRAMES_PER_S = 240.0


@dataclass(frozen=True, slots=True)
class Keyframes:
    """`stamps[i]`: what to hand to the demuxer's seek; `times_s[i]`: when that keyframe is shown, ascending."""

    stamps: tuple[int, ...] = ()
    times_s: tuple[float, ...] = ()

    def before(self, time_s: float) -> int:
        """Index of the last keyframe at or before `time_s`, or -1."""
        return bisect_right(self.times_s, time_s) - 1


class FrameReader:
    """`advance_to` moves forward to the frame that is shown at a time. `tolerance_s` forgives rounded timestamps."""

    def __init__(
        self, container: InputContainer, stream: Any, keyframes: Keyframes, frame_s: float, guard: DecodeGuard
    ) -> None:
        self._container = container
        self._stream = stream
        self._keyframes = keyframes
        self._frame_s = frame_s
        self._guard = guard
        self.tolerance_s = min(frame_s, _finest_frame_s(stream)) / 4
        self._frames: Iterator[VideoFrame] = container.decode(stream)
        self._origin_s: float | None = None
        self._ahead: VideoFrame | None = None
        self._has_ended = False
        self.current: VideoFrame | None = None
        self.num_decoded = 0
        self.num_seeks = 0

    @property
    def current_s(self) -> float:
        return self.time_s(self.current) if self.current is not None else 0.0

    def time_s(self, frame: VideoFrame) -> float:
        return self._stamp_s(frame) - (self._origin_s or 0.0)

    def advance_to(self, time_s: float) -> Iterator[None]:
        """Make `current` the frame shown at `time_s` (not before an earlier call's), yielding between decoded frames.
        Past the end it is the last frame; None only when nothing could be decoded."""
        limit_s = time_s + self.tolerance_s
        if self._origin_s is None:
            self._pull()
            yield
        jump = self._keyframes.before(limit_s)
        if jump > 0 and self._is_worth_a_jump(self._keyframes.times_s[jump]):
            yield from self._jump(jump, limit_s)
        while self._ahead is not None and self.time_s(self._ahead) <= limit_s:
            self._pull()
            yield
        if self.current is None and self._ahead is not None:
            self._pull()

    def _pull(self) -> None:
        """One frame forward: `ahead` becomes `current`."""
        if self._ahead is not None:
            self.current = self._ahead
        self._ahead = self._next_frame()

    def _next_frame(self) -> VideoFrame | None:
        frame = next(self._frames, None)
        if frame is None:
            return None
        if self._origin_s is None:
            self._origin_s = self._stamp_s(frame)
        self.num_decoded += 1
        self._guard.see_frame(frame.width, frame.height, self.time_s(frame))
        return frame

    def _is_worth_a_jump(self, keyframe_s: float) -> bool:
        position_s = self.time_s(self._ahead) if self._ahead is not None else self.current_s
        return self._ahead is not None and keyframe_s - position_s > MIN_SKIP_FRAMES * self._frame_s

    def _jump(self, jump: int, limit_s: float) -> Iterator[None]:
        """To the keyframe, or to an earlier one where the container's index was late. Where that leads before the place
        we had, decode on from the film's start."""
        for index in (jump, jump - 1, 0):
            self._seek(self._keyframes.stamps[max(0, index)])
            self._ahead = None
            while True:
                frame = self._next_frame()
                yield
                # What is shown before the keyframe but comes after it refers to frames that were skipped.
                if frame is None or frame.key_frame:
                    break
            if frame is not None and self.time_s(frame) <= limit_s:
                self._ahead = frame
                return

    def _seek(self, stamp: int) -> None:
        self._container.seek(stamp, stream=self._stream, backward=True)
        self._frames = self._container.decode(self._stream)
        self.num_seeks += 1

    def _stamp_s(self, frame: VideoFrame) -> float:
        if frame.pts is None or frame.time_base is None:
            return (self._origin_s or 0.0) + self.num_decoded * self._frame_s
        return float(frame.pts * frame.time_base)


def _finest_frame_s(stream: Any) -> float:
    """The shortest time between frames that the container knows of: with a variable rate, far below the mean."""
    rates = [float(rate) for rate in (stream.base_rate, stream.average_rate) if rate]
    return 1 / min(MAX_FRAMES_PER_S, max(rates)) if rates else 1 / MAX_FRAMES_PER_S

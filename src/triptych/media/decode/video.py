"""Film to sampled frames with their times: as seen (rotation, pixel aspect), in RGB, by count, rate or timestamps.

A sampled time gets the frame that is shown at it, so a variable frame rate needs no special case, and the number of
frames delivered is the number that the header promised.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from av.container.input import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

from triptych.core.errors import InvalidMedia
from triptych.core.media import DecodedVideo, DecodeSpec, MediaHeader, Modality
from triptych.media.budget import DecodeGuard, num_sampled_frames
from triptych.media.decode.container import open_container, video_stream
from triptych.media.decode.frames import SEEKABLE, FrameReader, Keyframes
from triptych.media.decode.image import scaled_size
from triptych.media.sniff import Kind

HD_LINES = 720  # from here on, film without a stated matrix is BT.709, below it BT.601
_UNSPECIFIED_MATRIX = 2


@dataclass(frozen=True, slots=True)
class _Scan:
    """What the packets say, without decoding any."""

    num_frames: int
    duration_s: float
    keyframes: Keyframes


def inspect_video(data: bytes, kind: Kind, guard: DecodeGuard) -> MediaHeader:
    """Sizes as seen, frames counted in the container's index or packets. Decodes one frame, for its rotation and to
    know that it can be decoded. Raises InvalidMedia, UnsupportedMedia, BudgetExceeded."""
    with open_container(data, kind, guard) as container:
        stream = video_stream(container, kind, guard)
        guard.see_picture(stream.codec_context.width, stream.codec_context.height)
        num_frames, duration_s = _counted(container, stream)
        frame = next(container.decode(stream), None)
        if frame is None:
            raise InvalidMedia(f"the {kind.mime} file has no frame that can be decoded")
        width_px, height_px = _seen_size(frame, stream)
        quarter_turns = _quarter_turns(frame)
        rate = stream.average_rate or stream.guessed_rate
    if num_frames < 1 or duration_s <= 0:
        scan = _scan(data, kind, guard)
        num_frames, duration_s = scan.num_frames, scan.duration_s
    if duration_s <= 0 and rate:
        duration_s = num_frames / float(rate)
    if duration_s <= 0:
        raise InvalidMedia(f"the {kind.mime} file has {num_frames} frames and no clock")
    if quarter_turns % 2:
        width_px, height_px = height_px, width_px
    guard.see_picture(width_px, height_px)
    return MediaHeader(
        Modality.VIDEO,
        mime=kind.mime,
        num_bytes=len(data),
        width_px=width_px,
        height_px=height_px,
        num_frames=num_frames,
        frames_per_s=num_frames / duration_s,
        duration_s=duration_s,
    )


def sample_times(header: MediaHeader, spec: DecodeSpec) -> tuple[float, ...]:
    """The seconds at which frames are wanted; ascending unless the caller's own `times_s` are not."""
    count = num_sampled_frames(header, spec)
    if spec.num_frames is None and spec.times_s is not None and spec.frames_per_s is None:
        return spec.times_s
    if spec.num_frames is None and spec.frames_per_s is not None and count / spec.frames_per_s <= header.duration_s:
        wanted = max(1, round(header.duration_s * spec.frames_per_s))
        step_s = 1 / spec.frames_per_s if wanted == count else header.duration_s / count
        return tuple(i * step_s for i in range(count))
    return tuple(i * header.duration_s / count for i in range(count))


def decode_video(
    data: bytes, kind: Kind, header: MediaHeader, spec: DecodeSpec, guard: DecodeGuard
) -> Generator[None, None, DecodedVideo]:
    """Pauses (yields) between decoded frames. Raises InvalidMedia, UnsupportedMedia, BudgetExceeded."""
    times_s = sample_times(header, spec)
    if not times_s:
        raise InvalidMedia("no frames were asked for")
    keyframes = _keyframes(data, kind, guard)
    yield
    with open_container(data, kind, guard) as container:
        stream = video_stream(container, kind, guard)
        reader = FrameReader(container, stream, keyframes, 1 / header.frames_per_s, guard)
        painter = _Painter(header, spec)
        frames: npt.NDArray[np.uint8] = np.empty((len(times_s), painter.height_px, painter.width_px, 3), np.uint8)
        shown_s = np.zeros(len(times_s))
        last: tuple[VideoFrame, int] | None = None
        for i in sorted(range(len(times_s)), key=times_s.__getitem__):
            yield from reader.advance_to(times_s[i])
            if reader.current is None:
                raise InvalidMedia(f"the {kind.mime} file has no frame that can be decoded")
            if last is not None and last[0] is reader.current:
                frames[i] = frames[last[1]]
            else:
                frames[i] = painter.paint(reader.current)
            last = (reader.current, i)
            shown_s[i] = reader.current_s
            yield
    return DecodedVideo(frames, shown_s, header.frames_per_s)


class _Painter:
    """Turns decoded frames into RGB of one size, whatever size a frame has."""

    def __init__(self, header: MediaHeader, spec: DecodeSpec) -> None:
        self.width_px, self.height_px = header.width_px, header.height_px
        if spec.fit_px is not None:
            self.width_px, self.height_px = scaled_size(header.width_px, header.height_px, spec.fit_px)
        self._reformatter = VideoReformatter()

    def paint(self, frame: VideoFrame) -> npt.NDArray[np.uint8]:
        """[H, W, 3] uint8."""
        quarter_turns = _quarter_turns(frame)
        width_px, height_px = self.width_px, self.height_px
        if quarter_turns % 2:
            width_px, height_px = height_px, width_px
        is_smaller = width_px * height_px < frame.width * frame.height
        painted: npt.NDArray[Any] = self._reformatter.reformat(
            frame,
            width_px,
            height_px,
            "rgb24",
            src_colorspace=_matrix(frame),
            dst_color_range=ColorRange.JPEG,
            interpolation=Interpolation.AREA if is_smaller else Interpolation.BICUBIC,
            threads=1,
        ).to_ndarray()
        return np.rot90(painted, quarter_turns) if quarter_turns else painted


def _matrix(frame: VideoFrame) -> Colorspace | None:
    if frame.colorspace != _UNSPECIFIED_MATRIX:
        return None
    return Colorspace.ITU709 if min(frame.width, frame.height) >= HD_LINES else Colorspace.ITU601


def _quarter_turns(frame: VideoFrame) -> int:
    """How often to turn the stored frame by 90 degrees against the clock."""
    return round(frame.rotation / 90) % 4


def _seen_size(frame: VideoFrame, stream: Any) -> tuple[int, int]:
    """Before rotation, with square pixels."""
    aspect = stream.sample_aspect_ratio
    if aspect and aspect > 0 and aspect != 1:
        return max(1, round(frame.width * aspect)), frame.height
    return frame.width, frame.height


def _counted(container: InputContainer, stream: Any) -> tuple[int, float]:
    """Frames and seconds where the container's index has them; else zeros."""
    num_frames = stream.frames if stream.frames == len(stream.index_entries) else 0
    if stream.duration is not None and stream.time_base:
        return num_frames, float(stream.duration * stream.time_base)
    return num_frames, (container.duration or 0) / 1e6


def _scan(data: bytes, kind: Kind, guard: DecodeGuard) -> _Scan:
    stamps: list[int] = []
    key_stamps: list[int] = []
    with open_container(data, kind, guard) as container:
        stream = video_stream(container, kind, guard)
        for packet in container.demux(stream):
            if packet.size == 0:
                continue
            stamp = packet.pts if packet.pts is not None else packet.dts
            if stamp is None:
                continue
            stamps.append(stamp)
            if packet.is_keyframe:
                key_stamps.append(stamp)
        base = float(stream.time_base or 0)
    guard.see_coded_frames(len(stamps))
    if not stamps:
        return _Scan(0, 0.0, Keyframes())
    first, last = min(stamps), max(stamps)
    frame_s = (last - first) * base / max(1, len(stamps) - 1)
    key_stamps.sort()
    keyframes = Keyframes(tuple(key_stamps), tuple((stamp - first) * base for stamp in key_stamps))
    return _Scan(len(stamps), (last - first) * base + frame_s, keyframes)


def _keyframes(data: bytes, kind: Kind, guard: DecodeGuard) -> Keyframes:
    """Where a jump may lead: from the container's index, or from its packets."""
    if kind.opener not in SEEKABLE:
        return Keyframes()
    with open_container(data, kind, guard) as container:
        stream = video_stream(container, kind, guard)
        entries = stream.index_entries
        if stream.frames and stream.frames == len(entries) and stream.time_base:
            # An index holds decode times; the first one's distance to the first shown frame is about every one's.
            first = entries[0].timestamp
            stamps = [entry.timestamp for entry in entries if entry.is_keyframe]
            return Keyframes(tuple(stamps), tuple(float((stamp - first) * stream.time_base) for stamp in stamps))
    return _scan(data, kind, guard).keyframes

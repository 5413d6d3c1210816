"""Budgets as arithmetic over refs and headers (F3). Pure: every refusal is a BudgetExceeded naming the limit and both
values. Checked on the header first, and by `DecodeGuard` again while decoding, because a header can lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded
from triptych.core.media import DecodeSpec, MediaHeader, MediaRef, Modality

PADDING_S = 0.25  # coders fill their first and last frames; a header that states the limit itself is let through

_COUNT_LIMITS = {Modality.IMAGE: "max_images", Modality.VIDEO: "max_videos", Modality.AUDIO: "max_audios"}


def check_limit(tier: Tier, limit: str, requested: float, param: str | None = None) -> None:
    """Raise BudgetExceeded when `requested` is above the tier's field `limit`."""
    allowed = getattr(tier, limit)
    if requested > allowed:
        raise BudgetExceeded(limit, allowed=allowed, requested=requested, param=param)


def check_counts(refs: Iterable[MediaRef], tier: Tier) -> None:
    """Items by modality, before anything is fetched."""
    counts = Counter(ref.modality for ref in refs)
    for modality, limit in _COUNT_LIMITS.items():
        check_limit(tier, limit, counts[modality])


def check_header(header: MediaHeader, tier: Tier, param: str | None = None) -> None:
    """One item's size, by what its header says."""
    check_limit(tier, "max_item_bytes", header.num_bytes, param)
    if header.modality is not Modality.AUDIO:
        check_limit(tier, "max_width_px", header.width_px, param)
        check_limit(tier, "max_height_px", header.height_px, param)
        check_limit(tier, "max_item_pixels", header.num_pixels, param)
    if header.modality is Modality.VIDEO:
        check_limit(tier, "max_video_duration_s", header.duration_s, param)
        check_limit(tier, "max_video_coded_frames", header.num_frames, param)
    if header.modality is Modality.AUDIO:
        check_limit(tier, "max_audio_duration_s", header.duration_s, param)
        check_limit(tier, "max_audio_channels", header.num_channels, param)


def check_request(headers: Sequence[MediaHeader], tier: Tier) -> None:
    """All items together: bytes, and pixels with one frame of each video (the sampled ones are counted in `decode`)."""
    check_limit(tier, "max_request_media_bytes", sum(header.num_bytes for header in headers))
    check_limit(tier, "max_request_pixels", sum(header.num_pixels for header in headers))


def item_bytes_limit(tier: Tier, num_request_bytes: int = 0) -> tuple[str, int]:
    """The tighter of the two byte limits for the next item, by name and value, after `num_request_bytes` of others."""
    left = tier.max_request_media_bytes - num_request_bytes
    return ("max_item_bytes", tier.max_item_bytes) if tier.max_item_bytes <= left else ("max_request_media_bytes", left)


def num_sampled_frames(header: MediaHeader, spec: DecodeSpec) -> int:
    """How many frames `spec` asks of a video, by its header."""
    if spec.num_frames is not None:
        return spec.num_frames
    if spec.frames_per_s is not None:
        return min(spec.max_frames, max(1, round(header.duration_s * spec.frames_per_s)))
    if spec.times_s is not None:
        return len(spec.times_s)
    return min(spec.max_frames, max(1, header.num_frames))


def check_decode(header: MediaHeader, spec: DecodeSpec, tier: Tier, param: str | None = None) -> None:
    """What decoding would yield: sampled frames, and their pixels together."""
    if header.modality is Modality.VIDEO:
        num_frames = num_sampled_frames(header, spec)
        check_limit(tier, "max_video_frames", num_frames, param)
        check_limit(tier, "max_request_pixels", num_frames * header.num_pixels, param)


class DecodeGuard:
    """Counts what a decoder really yields. One a decode, in its thread; every method raises BudgetExceeded."""

    def __init__(self, tier: Tier, param: str | None = None) -> None:
        self._tier = tier
        self._param = param
        self.num_seen = 0  # pictures, frames and blocks of audio: whether a decoder gets on
        self.num_coded_frames = 0
        self._sample_rate_hz = 1
        self._num_samples = 0  # at this rate
        self._earlier_s = 0.0  # at other rates

    @property
    def max_item_pixels(self) -> int:
        return self._tier.max_item_pixels

    @property
    def audio_duration_s(self) -> float:
        return self._earlier_s + self._num_samples / self._sample_rate_hz

    def see_picture(self, width_px: int, height_px: int) -> None:
        """A picture or frame of this size came out of the decoder."""
        self.num_seen += 1
        check_limit(self._tier, "max_width_px", width_px, self._param)
        check_limit(self._tier, "max_height_px", height_px, self._param)
        check_limit(self._tier, "max_item_pixels", width_px * height_px, self._param)

    def see_frame(self, width_px: int, height_px: int, time_s: float) -> None:
        """The next frame of a video came out of the decoder, at `time_s` from its start."""
        self.num_coded_frames += 1
        check_limit(self._tier, "max_video_coded_frames", self.num_coded_frames, self._param)
        check_limit(self._tier, "max_video_duration_s", time_s, self._param)
        self.see_picture(width_px, height_px)

    def see_coded_frames(self, num_frames: int) -> None:
        """The container turned out to hold this many."""
        check_limit(self._tier, "max_video_coded_frames", num_frames, self._param)

    def see_samples(self, num_samples: int, sample_rate_hz: int, num_channels: int) -> None:
        """A block of audio came out of the decoder."""
        self.num_seen += 1
        if sample_rate_hz != self._sample_rate_hz:
            self._earlier_s, self._num_samples = self.audio_duration_s, 0
            self._sample_rate_hz = sample_rate_hz
        self._num_samples += num_samples
        if self.audio_duration_s > self._tier.max_audio_duration_s + PADDING_S:
            check_limit(self._tier, "max_audio_duration_s", self.audio_duration_s, self._param)
        check_limit(self._tier, "max_audio_channels", num_channels, self._param)

"""Sound to mono float samples at the model's rate: any container, resampled by soxr while decoding, bounded in seconds.

The mix is stated: mono and stereo are averaged; surround layouts weigh front 1, centre and surrounds 0.7071 and the
low-frequency channel 0 (ITU-R BS.775), divided by the sum; channels without known places are averaged.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import numpy.typing as npt
import soxr
from av.audio.frame import AudioFrame

from triptych.core.errors import InvalidMedia
from triptych.core.media import DecodedAudio, DecodeSpec, MediaHeader, Modality
from triptych.media.budget import DecodeGuard
from triptych.media.decode.container import audio_stream, open_container
from triptych.media.sniff import Kind

_SURROUND_WEIGHTS = {
    **dict.fromkeys(("FL", "FR"), 1.0),
    **dict.fromkeys(("FC", "BL", "BR", "BC", "SL", "SR", "FLC", "FRC"), 0.7071),
    **dict.fromkeys(("LFE", "LFE2"), 0.0),
}
MIN_RATE_HZ, MAX_RATE_HZ = 1000, 768_000  # a resampler's work grows with the ratio of the rates
_BLOCK_S = 1.0  # how much sound is mixed and resampled at a time


def inspect_audio(data: bytes, kind: Kind, guard: DecodeGuard) -> MediaHeader:
    """What the container says. The duration may be missing or wrong; decoding counts for itself."""
    with open_container(data, kind, guard) as container:
        stream = audio_stream(container, kind)
        duration_s = 0.0
        if stream.duration is not None and stream.time_base:
            duration_s = float(stream.duration * stream.time_base)
        elif container.duration is not None:
            duration_s = container.duration / 1e6
        sample_rate_hz, num_channels = stream.codec_context.sample_rate or 0, stream.codec_context.channels or 0
    if num_channels < 1:
        raise InvalidMedia(f"the {kind.mime} file has {num_channels} channels at {sample_rate_hz} Hz")
    _check_rate(sample_rate_hz, kind)
    return MediaHeader(
        Modality.AUDIO,
        mime=kind.mime,
        num_bytes=len(data),
        duration_s=max(0.0, duration_s),
        sample_rate_hz=sample_rate_hz,
        num_channels=num_channels,
    )


def decode_audio(data: bytes, kind: Kind, spec: DecodeSpec, guard: DecodeGuard) -> Generator[None, None, DecodedAudio]:
    """Pauses (yields) between blocks. Raises InvalidMedia, UnsupportedMedia, BudgetExceeded."""
    with open_container(data, kind, guard) as container:
        mixer = _Mixer(spec.sample_rate_hz)
        pending_s = 0.0
        for frame in container.decode(audio_stream(container, kind)):
            _check_rate(frame.sample_rate, kind)
            guard.see_samples(frame.samples, frame.sample_rate, frame.layout.nb_channels)
            mixer.push(frame)
            pending_s += frame.samples / frame.sample_rate
            if pending_s >= _BLOCK_S:
                mixer.settle()
                pending_s = 0.0
                yield
        samples = mixer.finish()
    if not samples.size:
        raise InvalidMedia(f"the {kind.mime} file has no sound in it")
    return DecodedAudio(samples, spec.sample_rate_hz)


def _check_rate(sample_rate_hz: int, kind: Kind) -> None:
    if not MIN_RATE_HZ <= sample_rate_hz <= MAX_RATE_HZ:
        raise InvalidMedia(
            f"the {kind.mime} file has {sample_rate_hz} samples a second; {MIN_RATE_HZ} to {MAX_RATE_HZ} are read"
        )


class _Mixer:
    """Mixes to mono and resamples in blocks, so that only the result is held whole."""

    def __init__(self, sample_rate_hz: int) -> None:
        self._rate_hz = sample_rate_hz
        self._source_rate_hz = 0
        self._resampler: soxr.ResampleStream | None = None
        self._mono: list[npt.NDArray[np.float32]] = []
        self._done: list[npt.NDArray[np.float32]] = []

    def push(self, frame: AudioFrame) -> None:
        if frame.sample_rate != self._source_rate_hz:
            self._flush()
            self._source_rate_hz = frame.sample_rate
        self._mono.append(mix_down(_channels(frame), [channel.name for channel in frame.layout.channels]))

    def settle(self, *, last: bool = False) -> None:
        """Resample what is pending."""
        block = np.concatenate(self._mono) if self._mono else np.zeros(0, np.float32)
        self._mono.clear()
        if self._source_rate_hz != self._rate_hz and self._source_rate_hz:
            if self._resampler is None:
                self._resampler = soxr.ResampleStream(self._source_rate_hz, self._rate_hz, 1, dtype="float32")
            block = self._resampler.resample_chunk(block, last=last)
        self._done.append(block)

    def finish(self) -> npt.NDArray[np.float32]:
        """[N] float32, every value finite and within -1 to 1."""
        self._flush()
        samples = np.concatenate(self._done) if self._done else np.zeros(0, np.float32)
        self._done.clear()
        np.nan_to_num(samples, copy=False, nan=0.0)
        return np.clip(samples, -1.0, 1.0, out=samples)

    def _flush(self) -> None:
        self.settle(last=True)
        self._resampler = None


def mix_down(channels: npt.NDArray[np.float32], names: list[str]) -> npt.NDArray[np.float32]:
    """[C, N] -> [N], by the weights that the module states."""
    if len(names) <= 2 or any(name not in _SURROUND_WEIGHTS for name in names):
        return _mean(channels)
    weights = np.array([_SURROUND_WEIGHTS[name] for name in names], np.float32)
    if not weights.any():
        return _mean(channels)
    mono: npt.NDArray[np.float32] = weights / weights.sum() @ channels
    return mono


def _mean(channels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    mono: npt.NDArray[np.float32] = channels.mean(axis=0, dtype=np.float32)
    return mono


def _channels(frame: AudioFrame) -> npt.NDArray[np.float32]:
    """A decoded block as [C, N] float32, -1 to 1, whatever its sample format."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - np.float32(128)) / np.float32(128)
    if samples.dtype.kind == "i":
        return samples.astype(np.float32) / np.float32(2 ** (8 * samples.dtype.itemsize - 1))
    return samples.astype(np.float32, copy=False)

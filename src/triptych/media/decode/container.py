"""Opens sound and film with the one FFmpeg demuxer that the first bytes name, from memory, no other file in reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
from av.container.input import InputContainer

from triptych.core.errors import InvalidMedia, UnsupportedMedia
from triptych.media.budget import DecodeGuard
from triptych.media.decode.source import ContainerFile
from triptych.media.sniff import Kind

# Decoders in wide use, and no others: FFmpeg has hundreds that nobody has looked at for years.
VIDEO_CODECS = frozenset(
    [
        "h264",
        "hevc",
        "vp8",
        "vp9",
        "av1",
        "libdav1d",
        "mpeg4",
        "mpeg2video",
        "mpeg1video",
        "mjpeg",
        "theora",
        "h263",
        "prores",
        "msmpeg4v3",
        "flv1",
        "wmv2",
    ]
)
AUDIO_CODECS = frozenset(
    [
        "aac",
        "mp3",
        "mp2",
        "opus",
        "vorbis",
        "flac",
        "alac",
        "ac3",
        "eac3",
        "speex",
        "amrnb",
        "amrwb",
        "adpcm_ms",
        "adpcm_ima_wav",
        "gsm_ms",
        "wmav2",
    ]
)


@contextmanager
def container_errors(kind: Kind) -> Iterator[None]:
    """What PyAV raises for bad bytes, as leaves of our tree."""
    try:
        yield
    except TimeoutError as error:
        raise InvalidMedia(f"the {kind.mime} file takes too long to read") from error
    except (av.error.FFmpegError, EOFError) as error:
        raise InvalidMedia(f"the {kind.mime} file is corrupt or cut off") from error
    except (ValueError, OverflowError, IndexError, TypeError, ZeroDivisionError, NotImplementedError) as error:
        raise InvalidMedia(f"the {kind.mime} file cannot be decoded") from error


@contextmanager
def open_container(data: bytes, kind: Kind, guard: DecodeGuard) -> Iterator[InputContainer]:
    """A demuxer over `data`, closed at the end. One thread at a time. Raises InvalidMedia, also where it reads on for
    MAX_STALL_S and `guard` sees nothing."""
    with (
        container_errors(kind),
        av.open(
            ContainerFile(data, guard),
            mode="r",
            format=kind.opener,
            options={"protocol_whitelist": "none", **_decoder_limits(guard)},
            metadata_errors="ignore",
        ) as container,
    ):
        assert isinstance(container, InputContainer)
        yield container


def _decoder_limits(guard: DecodeGuard) -> dict[str, str]:
    """Decoders hold no frame far over the budget: not the one by which FFmpeg looks for a film's size, nor one that
    comes later. A little is left for coded sizes, which are rounded up to whole blocks."""
    return {"max_pixels": str(guard.max_item_pixels * 5 // 4 + 65_536)}


def video_stream(container: InputContainer, kind: Kind, guard: DecodeGuard) -> Any:
    """The film's stream, not a cover picture. Raises UnsupportedMedia."""
    streams = [stream for stream in container.streams.video if not stream.disposition & stream.disposition.attached_pic]
    if not streams:
        raise UnsupportedMedia(f"the {kind.mime} file has no video in it")
    stream = _with_known_codec(streams[0], VIDEO_CODECS, kind)
    stream.codec_context.options = _decoder_limits(guard)
    return stream


def audio_stream(container: InputContainer, kind: Kind) -> Any:
    """The first sound stream. Raises UnsupportedMedia."""
    if not container.streams.audio:
        raise UnsupportedMedia(f"the {kind.mime} file has no sound in it")
    return _with_known_codec(container.streams.audio[0], AUDIO_CODECS, kind)


def _with_known_codec(stream: Any, known: frozenset[str], kind: Kind) -> Any:
    context = stream.codec_context
    name = context.codec.canonical_name if context is not None else "unknown"
    if name not in known and not name.startswith("pcm_"):
        raise UnsupportedMedia(f"the {kind.mime} file is coded in {name}, which is not decoded here")
    context.thread_count = 1
    return stream

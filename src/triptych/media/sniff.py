"""What bytes are, by their first bytes alone: no declared type is believed. Pure.

Each kind names the one decoder or demuxer that may open it, so that no library guesses a format of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.errors import UnsupportedMedia
from triptych.core.media import Modality

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO


@dataclass(frozen=True, slots=True)
class Kind:
    """`opener`: a Pillow format where `modalities` has IMAGE (`HEIF`: pillow-heif), else FFmpeg's demuxer."""

    mime: str
    opener: str
    modalities: frozenset[Modality]

    @property
    def is_picture(self) -> bool:
        return IMAGE in self.modalities


def _kind(mime: str, opener: str, *modalities: Modality) -> Kind:
    return Kind(mime, opener, frozenset(modalities))


JPEG = _kind("image/jpeg", "JPEG", IMAGE)
PNG = _kind("image/png", "PNG", IMAGE)
GIF = _kind("image/gif", "GIF", IMAGE, VIDEO)
WEBP = _kind("image/webp", "WEBP", IMAGE, VIDEO)
BMP = _kind("image/bmp", "BMP", IMAGE)
TIFF = _kind("image/tiff", "TIFF", IMAGE)
AVIF = _kind("image/avif", "AVIF", IMAGE)
HEIF = _kind("image/heif", "HEIF", IMAGE)
MP4 = _kind("video/mp4", "mp4", VIDEO, AUDIO)
MATROSKA = _kind("video/x-matroska", "matroska", VIDEO, AUDIO)
AVI = _kind("video/x-msvideo", "avi", VIDEO, AUDIO)
MPEG_TS = _kind("video/mp2t", "mpegts", VIDEO, AUDIO)
MPEG_PS = _kind("video/mpeg", "mpeg", VIDEO, AUDIO)
FLV = _kind("video/x-flv", "flv", VIDEO, AUDIO)
OGG = _kind("application/ogg", "ogg", VIDEO, AUDIO)
WAV = _kind("audio/wav", "wav", AUDIO)
W64 = _kind("audio/x-w64", "w64", AUDIO)
FLAC = _kind("audio/flac", "flac", AUDIO)
MP3 = _kind("audio/mpeg", "mp3", AUDIO)
AAC = _kind("audio/aac", "aac", AUDIO)
AIFF = _kind("audio/aiff", "aiff", AUDIO)
AMR = _kind("audio/amr", "amr", AUDIO)
CAF = _kind("audio/x-caf", "caf", AUDIO)

_PREFIXES: tuple[tuple[bytes, Kind], ...] = (
    (b"\xff\xd8\xff", JPEG),
    (b"\x89PNG\r\n\x1a\n", PNG),
    (b"GIF87a", GIF),
    (b"GIF89a", GIF),
    (b"II*\x00", TIFF),
    (b"MM\x00*", TIFF),
    (b"\x1a\x45\xdf\xa3", MATROSKA),
    (b"\x00\x00\x01\xba", MPEG_PS),
    (b"FLV\x01", FLV),
    (b"OggS", OGG),
    (b"riff\x2e\x91\xcf\x11", W64),
    (b"fLaC", FLAC),
    (b"#!AMR", AMR),
    (b"caff", CAF),
)
_RIFF = {b"WEBP": WEBP, b"WAVE": WAV, b"AVI ": AVI}
_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})


def sniff(data: bytes) -> Kind:
    """The kind of `data`. Raises UnsupportedMedia for what is not taken here."""
    for prefix, kind in _PREFIXES:
        if data.startswith(prefix):
            return kind
    found = _riff(data) or _iso_media(data) or _aiff(data) or _bmp(data) or _mpeg_ts(data) or _mpeg_audio(data)
    if found is None:
        raise UnsupportedMedia("the bytes are of no image, video or audio format that is served here")
    return found


def check_modality(kind: Kind, modality: Modality) -> None:
    """Raise UnsupportedMedia when `kind` is not what the request said it is."""
    if modality not in kind.modalities:
        raise UnsupportedMedia(
            f"{'an' if modality is not VIDEO else 'a'} {modality.value} was promised, not {kind.mime}"
        )


def _riff(data: bytes) -> Kind | None:
    return _RIFF.get(data[8:12]) if data[:4] in (b"RIFF", b"RF64") else None


def _aiff(data: bytes) -> Kind | None:
    return AIFF if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC") else None


def _iso_media(data: bytes) -> Kind | None:
    """ISO base media: the brands part pictures from films. Old QuickTime files begin with another box."""
    box = data[4:8]
    if box in (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"):
        return MP4
    if box != b"ftyp":
        return None
    end = min(len(data), int.from_bytes(data[:4], "big"), 256)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, end - 3, 4))}
    if data[8:12] in _AVIF_BRANDS or (brands & _AVIF_BRANDS and data[8:12] in _HEIF_BRANDS):
        return AVIF
    return HEIF if data[8:12] in _HEIF_BRANDS else MP4


def _bmp(data: bytes) -> Kind | None:
    header_bytes = int.from_bytes(data[14:18], "little")
    return BMP if data[:2] == b"BM" and header_bytes in (12, 40, 52, 56, 64, 108, 124) else None


def _mpeg_ts(data: bytes) -> Kind | None:
    packets = range(0, min(len(data), 188 * 4), 188)
    return MPEG_TS if len(data) >= 188 * 2 and all(data[at] == 0x47 for at in packets) else None


def _mpeg_audio(data: bytes) -> Kind | None:
    if data.startswith(b"ID3"):
        return MP3
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return None
    if data[1] & 0xF6 == 0xF0:
        return AAC
    layer, bit_rate, sample_rate = data[1] >> 1 & 3, data[2] >> 4, data[2] >> 2 & 3
    return MP3 if layer == 1 and bit_rate != 15 and sample_rate != 3 else None

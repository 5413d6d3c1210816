"""Bombs of every format: small files that unpack to very much are refused, within a bound on memory and time."""

import struct
import time
import zlib

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from tests.media import bombs
from tests.media.decoding import decode, inspect
from tests.media.made import RED, film, png, saved, sound, tone, wav
from tests.media.memory import MemoryBound
from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, InvalidMedia
from triptych.core.media import DecodeSpec, Modality

SIZES = ("max_width_px", "max_height_px", "max_item_pixels")
MINUTE = Tier(max_audio_duration_s=60.0, max_video_duration_s=60.0)


@pytest.fixture(autouse=True, scope="module")
def heif_writer():
    pillow_heif.register_heif_opener()


class soon:  # noqa: N801 - used as a context manager
    """Asserts that this thread was at work for less than a bound: waiting for a busy machine does not count."""

    def __init__(self, max_s):
        self.max_s = max_s

    def __enter__(self):
        self.started_s = time.thread_time()

    def __exit__(self, *_):
        assert time.thread_time() - self.started_s < self.max_s


# pictures


@pytest.mark.parametrize(
    "make",
    [
        bombs.png_bomb,
        bombs.png_21_kb,
        bombs.gif_bomb,
        bombs.webp_bomb,
        bombs.bmp_bomb,
        bombs.tiff_bomb,
        bombs.jpeg_bomb,
        bombs.avif_bomb,
        bombs.heif_bomb,
    ],
)
def test_picture_bombs_are_refused_at_the_header(make):
    """A small file that unpacks to hundreds of megabytes costs next to nothing, and the refusal names a limit."""
    data = make()
    with MemoryBound(40_000_000), pytest.raises(BudgetExceeded) as caught:
        inspect(data)
    assert caught.value.limit in SIZES


def test_lying_avif_is_refused_at_the_header():
    """By its size, or because the library does not believe it."""
    with MemoryBound(40_000_000), pytest.raises((BudgetExceeded, InvalidMedia)):
        inspect(bombs.avif_lie())


@pytest.mark.parametrize("make", [bombs.gif_bomb, bombs.webp_bomb])
def test_animation_bombs_are_refused_at_the_header(make):
    """The same files sent as video."""
    data = make()
    with MemoryBound(40_000_000), pytest.raises(BudgetExceeded) as caught:
        inspect(data, Modality.VIDEO)
    assert caught.value.limit in SIZES


def test_text_bomb_in_a_png_is_bounded():
    """Compressed text in a picture may not unpack without end."""
    text = b"Comment\0\0" + zlib.compress(b"a" * 100_000_000, 9)
    data = png(
        (1, 1, 8, 2),
        (b"zTXt", text),
        (b"iCCP", b"x\0\0" + zlib.compress(b"b" * 100_000_000, 9)),
        (b"IDAT", zlib.compress(b"\0" * 4)),
    )
    with MemoryBound(60_000_000), pytest.raises((InvalidMedia, BudgetExceeded)):
        decode(data)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_animation_that_grows_is_refused_when_it_does():
    """The canvas is small in the header, and 169 million pixels in the second frame."""
    data = bombs.growing_gif()
    assert inspect(data, Modality.VIDEO).width_px == 8
    with MemoryBound(40_000_000), pytest.raises((BudgetExceeded, InvalidMedia)):
        decode(data, Modality.VIDEO, DecodeSpec(num_frames=2))


def test_endless_animation_is_refused():
    """Frames are counted without being decoded, and no further than the limit."""
    with soon(1.0), pytest.raises(InvalidMedia, match="more than 10000 frames"):
        inspect(bombs.endless_gif(), Modality.VIDEO)


def _jpeg_of_pieces(piece, num_bytes):
    data = saved(Image.new("RGB", (16, 16)), "JPEG")
    return data[:2] + piece * (num_bytes // len(piece)) + data[2:]


def _png_of_pieces(name, num_bytes, *, after=False):
    empty = struct.pack(">I", 0) + name + struct.pack(">I", zlib.crc32(name))
    data = png((4, 4, 8, 2), (b"IDAT", zlib.compress((b"\0" * 13) * 4)))
    at = data.index(b"IEND") - 4 if after else data.index(b"IDAT") - 4
    return data[:at] + empty * (num_bytes // 12) + data[at:]


def _gif_of_pieces(piece, num_bytes):
    data = saved(Image.new("P", (4, 4)), "GIF")
    at = data.index(b"\x2c")
    return data[:at] + piece(num_bytes) + data[at:]


def _webp_of_pieces(num_bytes):
    data = saved(Image.new("RGB", (8, 8)), "WEBP", lossless=True)
    return b"RIFF" + struct.pack("<I", len(data) - 8 + num_bytes) + data[8:] + b"ABCD\0\0\0\0" * (num_bytes // 8)


PIECES = {
    "jpeg segments": (_jpeg_of_pieces, b"\xff\xe5\0\2"),
    "jpeg comments": (_jpeg_of_pieces, b"\xff\xfe\0\2"),
    "jpeg filling": (_jpeg_of_pieces, b"\xff"),
    "jpeg restarts": (_jpeg_of_pieces, b"\xff\xd0"),
    "png chunks": (_png_of_pieces, b"zzZz"),
    "png data": (_png_of_pieces, b"IDAT"),
    "png end": (lambda name, size: _png_of_pieces(name, size, after=True), b"zzZz"),
    "gif blocks": (_gif_of_pieces, lambda size: b"\x21\xfe\x00" * (size // 3)),
    "gif sub-blocks": (_gif_of_pieces, lambda size: b"\x21\xfe" + b"\x01a" * (size // 2) + b"\0"),
}


@pytest.mark.parametrize("name", PIECES)
def test_pictures_in_millions_of_pieces_are_refused_soon(name):
    """Pillow's parsers are loops in Python: 8 MB of empty blocks would hold the interpreter for half a minute."""
    make, piece = PIECES[name]
    data = make(piece, 8_000_000)
    with soon(3.0), MemoryBound(40_000_000), pytest.raises(InvalidMedia, match="too many small pieces"):
        decode(data)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _gif_of_pieces(lambda size: b"\x21\xfe\x00" * (size // 3), 8_000_000),
        lambda: _webp_of_pieces(8_000_000),
    ],
)
def test_animations_in_millions_of_pieces_are_refused_soon(make):
    """Our own walks over blocks are bounded too."""
    data = make()
    with soon(3.0), pytest.raises(InvalidMedia, match="too many small pieces"):
        inspect(data, Modality.VIDEO)


def test_honest_pictures_in_many_pieces_are_read():
    """A PNG whose pixels come in 8,000 chunks of a kilobyte, as some writers do, and a long GIF."""
    noise = np.random.default_rng(0).integers(0, 256, (1600, 1700, 3), np.uint8)
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in noise), 1)
    chunks = [(b"IDAT", packed[at : at + 1024]) for at in range(0, len(packed), 1024)]
    assert len(chunks) > 7500
    assert (decode(png((1700, 1600, 8, 2), *chunks)).pixels == noise).all()

    frames = [Image.fromarray(noise[100 * i : 100 * i + 100, :100, 0]) for i in range(16)] * 20
    gif = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)
    assert len(gif) > 2_000_000
    assert len(decode(gif, Modality.VIDEO, DecodeSpec(num_frames=320)).frames) == 320


@pytest.mark.parametrize("mode", ["RGBA", "I;16"])
def test_large_pictures_take_little_more_than_themselves(mode):
    """Blending and scaling work in bands: at its height a decode holds the file's samples and the result, not copies
    in wider numbers."""
    size, sample_bytes = (6000, 4000), 4 if mode == "RGBA" else 2
    samples = np.zeros((*size[::-1], 4), np.uint8) if mode == "RGBA" else np.zeros(size[::-1], np.uint16)
    samples[:100] = 77
    data = saved(Image.fromarray(samples), "PNG", compress_level=1)
    del samples
    pixels = size[0] * size[1]
    with MemoryBound(pixels * (sample_bytes + 3) + pixels * 4):
        assert decode(data).pixels.shape == (4000, 6000, 3)


# films


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
def test_film_of_huge_frames_is_refused_at_the_header(container):
    """A few kilobytes of 38-million-pixel frames: FFmpeg, too, is kept from decoding one to see its size."""
    data = bombs.wide_film(container)
    assert len(data) < 200_000
    with MemoryBound(40_000_000), pytest.raises(BudgetExceeded) as caught:
        inspect(data, Modality.VIDEO, Tier(max_item_pixels=4_000_000))
    assert caught.value.limit in SIZES


def test_film_that_grows_is_refused_when_it_does():
    """Small frames first, huge ones later: the decoder's own frames are measured."""
    data = bombs.widening_film()
    tier = Tier(max_item_pixels=1_000_000)
    with pytest.raises((BudgetExceeded, InvalidMedia)):
        decode(data, Modality.VIDEO, DecodeSpec(num_frames=5), tier)


def test_long_films_are_refused_at_the_header():
    """Hours in a few kilobytes, by the container's own word."""
    with pytest.raises(BudgetExceeded, match="max_video_duration_s is 60, the request has 107"):
        inspect(bombs.long_film(), Modality.VIDEO, MINUTE)
    with pytest.raises(BudgetExceeded, match="max_video_coded_frames is 100, the request has 180"):
        inspect(bombs.long_film(), Modality.VIDEO, Tier(max_video_coded_frames=100, max_video_duration_s=1e6))


# sounds

OPUS = dict(rate=48_000, sample_format="s16")
STATED = {
    "mp3, seven hours in 25 MB": bombs.hours_of_mp3,
    "mp3, seven hours with a first frame that says ten seconds": lambda: bombs.hours_of_mp3(claims_s=10),
    "flac, a hundred hours in 25 MB": bombs.hours_of_flac,
    "adts, three days in 25 MB, by its bit rate": bombs.hours_of_adts,
    "wav, two hours in 25 MB": bombs.hours_of_wav,
    "wav of unknown size": lambda: bombs.hours_of_wav(claimed_bytes=2**32 - 1),
    "wav of no size": lambda: bombs.hours_of_wav(claimed_bytes=0),
    "m4a": lambda: bombs.hours_of_packets("aac", "mp4", 2),
    "opus in ogg": lambda: bombs.hours_of_packets("libopus", "ogg", 2, **OPUS),
    "opus in webm": lambda: bombs.hours_of_packets("libopus", "webm", 2, **OPUS),
}
UNSTATED = {
    "flac of unknown length": lambda: bombs.hours_of_flac(claims_s=0),
    "flac that says five seconds": lambda: bombs.hours_of_flac(claims_s=5),
    "webm that says five seconds": lambda: bombs.shortened_webm(2, 5.0),
}


@pytest.mark.parametrize("name", STATED)
def test_hours_of_sound_are_refused_at_the_header(name):
    """The file says how long it is: nothing is decoded."""
    data = STATED[name]()
    with soon(2.0), MemoryBound(30_000_000), pytest.raises(BudgetExceeded) as caught:
        inspect(data, Modality.AUDIO)
    assert caught.value.limit == "max_audio_duration_s"
    assert caught.value.requested > 6000


@pytest.mark.parametrize("name", UNSTATED)
def test_hours_of_sound_that_hide_it_are_refused_while_decoding(name):
    """The header says less, or nothing: the decoder counts, and what it has made by then is bounded."""
    data = UNSTATED[name]()
    assert inspect(data, Modality.AUDIO, MINUTE).duration_s <= 5
    with MemoryBound(30_000_000), pytest.raises(BudgetExceeded) as caught:
        decode(data, Modality.AUDIO, tier=MINUTE)
    assert caught.value.limit == "max_audio_duration_s"
    assert 60 < caught.value.requested < 62


def test_longest_sound_takes_little_more_than_its_samples():
    """Up to the default limit of half an hour: 115 MB of samples, and once more while they are joined."""
    data = bombs.hours_of_flac(2_000_000, claims_s=0)
    with MemoryBound(150_000_000), pytest.raises(BudgetExceeded, match="max_audio_duration_s is 1800"):
        decode(data, Modality.AUDIO)


def test_sound_of_exactly_the_limit_is_served():
    """A file as long as the limit is not refused for a rounded sum, nor for what its coder pads."""
    tier = Tier(max_audio_duration_s=2.0)
    assert len(decode(wav(tone(2.0, 44_100), 44_100), Modality.AUDIO, tier=tier).samples) == 32_000
    aac = sound(tone(1.95, 44_100), codec="aac", container="mp4", rate=44_100, sample_format="fltp")
    assert decode(aac, Modality.AUDIO, tier=tier).samples.size


def test_demuxer_that_searches_without_end_is_stopped(monkeypatch):
    """25 MB of empty chunks behind a small one: FFmpeg would look at each for minutes."""
    monkeypatch.setattr("triptych.media.decode.source.MAX_STALL_S", 0.5)
    data = bombs.hours_of_wav(claimed_bytes=40_000)
    with soon(4.0), MemoryBound(30_000_000), pytest.raises(InvalidMedia, match="takes too long to read"):
        inspect(data, Modality.AUDIO)


@pytest.mark.parametrize("rate", [1, 999, 10**6, 2**31 - 1])
def test_absurd_sample_rates_are_refused(rate):
    """A resampler from two thousand million samples a second would be at work for a quarter of a minute."""
    data = bytearray(wav(np.zeros(4000)))
    data[24:28] = struct.pack("<I", rate)
    with soon(2.0), pytest.raises((InvalidMedia, BudgetExceeded)):
        decode(bytes(data), Modality.AUDIO)


def test_small_media_beside_these_are_served():
    """The bounds are above what is honest."""
    assert decode(saved(Image.new("RGB", (30, 20), RED), "JPEG", quality=95)).pixels.shape == (20, 30, 3)
    assert len(decode(film(10), Modality.VIDEO, DecodeSpec(num_frames=10)).frames) == 10

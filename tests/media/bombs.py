"""Small files that unpack to very much, one of each format. Hours of sound are made by repeating packets."""

import io
import struct
import zlib
from fractions import Fraction

import av
import numpy as np
from PIL import Image

from tests.media.made import film, png, saved, sound

HOUR_S = 3600


# pictures


def png_bomb():
    """A PNG of 13,000 x 13,000 zeros in 500 KB, 21 KB as a transfer packs it: 500 MB as RGB."""
    compressor = zlib.compressobj(9)
    row = b"\0" * (1 + 13_000 * 3)
    rows = b"".join(compressor.compress(row * 100) for _ in range(130)) + compressor.flush()
    assert len(zlib.compress(rows, 9)) < 21_000
    return png((13_000, 13_000, 8, 2), (b"IDAT", rows))


def png_21_kb():
    """21 KB on the disk itself: a palette picture of one bit a pixel, 500 MB as RGB."""
    compressor = zlib.compressobj(9)
    rows = b"".join(compressor.compress(b"\0" * (1 + 1625) * 100) for _ in range(130)) + compressor.flush()
    data = png((13_000, 13_000, 1, 0), (b"IDAT", rows))
    assert len(data) < 21_500
    return data


def gif_bomb():
    return b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0x80, 0, 0) + b"\0" * 6 + b"\x2c" + struct.pack(
        "<HHHHB", 0, 0, 65_535, 65_535, 0
    ) + b"\x02\x02\x44\x01\x00\x3b"  # fmt: skip


def webp_bomb():
    canvas = (16_383).to_bytes(3, "little") * 2
    body = (
        b"WEBP" + b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + canvas + b"ANIM" + struct.pack("<I", 6) + b"\0" * 6
    )
    frame = saved(Image.new("RGB", (8, 8)), "WEBP", lossless=True)[12:]
    anmf = (0).to_bytes(6, "little") + (7).to_bytes(3, "little") * 2 + b"\0" * 4 + frame
    body += b"ANMF" + struct.pack("<I", len(anmf)) + anmf
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp_bomb():
    return (
        b"BM"
        + struct.pack("<IHHI", 100, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 50_000, 50_000, 1, 24, 0, 0, 0, 0, 0, 0)
    )


def tiff_bomb():
    entries = [(256, 4, 1, 60_000), (257, 4, 1, 60_000), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1)]
    entries += [(273, 4, 1, 200), (277, 3, 1, 1), (278, 4, 1, 60_000), (279, 4, 1, 20)]
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return (b"II*\0" + struct.pack("<I", 8) + directory + b"\0" * 4).ljust(200, b"\0") + zlib.compress(b"\0" * 1000)


def jpeg_bomb():
    data = bytearray(saved(Image.new("RGB", (16, 16)), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", 65_500, 65_500)
    return bytes(data)


def avif_bomb():
    """Really that large: 81 million pixels in a few KB."""
    return saved(Image.new("L", (9_000, 9_000)), "AVIF", quality=10, speed=10)


def heif_bomb():
    """A small HEIF whose size box (`ispe`) claims 60,000 x 60,000."""
    return _with_size(saved(Image.new("RGB", (64, 64)), "HEIF", quality=10), 64, 60_000)


def avif_lie():
    """A small AVIF whose size box claims 16,000 x 16,000."""
    return _with_size(saved(Image.new("RGB", (64, 64)), "AVIF", quality=10), 64, 16_000)


def _with_size(data, old_px, new_px):
    stated = b"ispe\0\0\0\0" + struct.pack(">II", old_px, old_px)
    assert stated in data
    return data.replace(stated, b"ispe\0\0\0\0" + struct.pack(">II", new_px, new_px))


def growing_gif():
    """Two frames on an 8 x 8 canvas, the second of 13,000 x 13,000: the decoder enlarges the canvas for it."""
    frames = [Image.new("L", (8, 8), 200 * i) for i in range(2)]
    data = bytearray(saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100))
    second = data.index(b"\x2c", data.index(b"\x2c") + 10)
    data[second + 5 : second + 9] = struct.pack("<HH", 13_000, 13_000)
    return bytes(data)


# films


def wide_film(container="mp4"):
    """A film of few bytes whose every frame has 38 million pixels, 57 MB as FFmpeg holds it."""
    return film(2, size=(6144, 6144), container=container, paint=lambda i: np.zeros((6144, 6144, 3), np.uint8))


def widening_film():
    """An MPEG-TS that begins small and goes on at 38 million pixels a frame: nothing at its start says so."""
    small = film(3, size=(64, 64), container="mpegts", gop=1, b_frames=0)
    return small + wide_film("mpegts")


def endless_gif():
    """Ten thousand and one frames of one pixel."""
    frame = b"\x21\xf9\x04\x04\x0a\x00\x00\x00\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0" * 6 + frame * 10_001 + b"\x3b"


def long_film(hours=3):
    """One frame a minute for hours: few bytes, a long time."""
    return film(hours * 60, size=(64, 64), rate=1, stamps=[60 * i for i in range(hours * 60)])


# sounds, hours of them, up to 25 MB


def hours_of_mp3(num_bytes=25_000_000, claims_s=None):
    """8 kbit/s: seven hours in 25 MB. `claims_s`: a Xing header that says so many seconds."""
    minute = sound(np.zeros((8_000 * 60, 1)), codec="libmp3lame", container="mp3", rate=8_000, sample_format="fltp")
    body = minute[minute.index(b"\xff\xe3", 10) :]
    xing = body.find(b"Info") if body.find(b"Info") >= 0 else body.find(b"Xing")
    length = body.index(b"\xff\xe3", 20)
    head = b""
    if claims_s is not None:
        assert 0 < xing < length
        head = bytearray(body[:length])
        head[xing + 8 : xing + 12] = struct.pack(">I", claims_s * 8_000 // 576)
    frames = body[length:]
    return bytes(head) + frames * (num_bytes // len(frames))


def hours_of_packets(codec, container, hours, *, rate=8_000, sample_format="fltp", packet_s=None, claims_s=None):
    """One packet of silence, `hours` long: encoded once, written again and again."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono", format=sample_format)
        stream.bit_rate = 6_000
        if codec == "libopus":
            stream.options = {"frame_duration": "60", "vbr": "on"}
        output.start_encoding()
        packets = [p for samples in _silence(stream, rate, sample_format) for p in stream.encode(samples)]
        packet = packets[2]
        data, step = bytes(packet), packet.duration or stream.codec_context.frame_size
        for i in range(int(hours * HOUR_S * rate / stream.codec_context.frame_size)):
            copy = av.Packet(data)
            copy.stream, copy.time_base = stream, packet.time_base
            copy.pts = copy.dts = i * step
            copy.duration = step
            output.mux(copy)
    return file.getvalue()


def _silence(stream, rate, sample_format):
    size = stream.codec_context.frame_size
    for i in range(4):
        kind = np.int16 if sample_format.startswith("s16") else np.float32
        frame = av.AudioFrame.from_ndarray(np.zeros((1, size), kind), format=sample_format, layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, i * size, Fraction(1, rate)
        yield frame


def hours_of_adts(num_bytes=25_000_000):
    """AAC frames one after another, 40 bytes for an eighth of a second: a day in 25 MB, and no duration stated."""
    second = sound(np.zeros((8_000 * 8, 1)), codec="aac", container="adts", rate=8_000, sample_format="fltp")
    return second * (num_bytes // len(second))


def hours_of_flac(num_bytes=25_000_000, claims_s=100 * HOUR_S):
    """Silence packs to 14 bytes for half a second: days in 25 MB. `claims_s`: what the header says; 0 is "unknown"."""
    minute = sound(np.zeros((8_000 * 60, 1)), rate=8_000)
    first = minute.index(b"\xff\xf8")
    data = bytearray(minute[:first] + minute[first:] * (num_bytes // (len(minute) - first)))
    at = 8 + 13  # the total of samples in STREAMINFO: 36 bits
    samples = int(claims_s * 8_000)
    data[at] = data[at] & 0xF0 | samples >> 32
    data[at + 1 : at + 5] = struct.pack(">I", samples & 0xFFFFFFFF)
    return bytes(data)


def hours_of_wav(num_bytes=25_000_000, claimed_bytes=None):
    """IMA ADPCM at 8 kHz: 1.7 hours in 25 MB. `claimed_bytes`: what the data chunk says of its size."""
    block_bytes, samples = 256, 505
    head = struct.pack("<HHIIHHHH", 0x11, 1, 8_000, 8_000 * block_bytes // samples, block_bytes, 4, 2, samples)
    body = bytes(block_bytes) * (num_bytes // block_bytes)
    size = len(body) if claimed_bytes is None else claimed_bytes
    head = b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<I", len(head)) + head
    return head + b"data" + struct.pack("<I", size) + body


def shortened_webm(hours, claims_s):
    """WebM whose Duration element says `claims_s`, without cues to tell otherwise."""
    data = bytearray(hours_of_packets("libopus", "webm", hours, rate=48_000, sample_format="s16"))
    at = data.index(b"\x44\x89\x88") + 3  # Duration, 8 bytes of float, in milliseconds
    data[at : at + 8] = struct.pack(">d", claims_s * 1000)
    return bytes(data)

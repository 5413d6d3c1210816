"""The arithmetic of budgets, over any headers; and bombs of every kind, refused within a bound on memory."""

import struct
import zlib

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.media.decoding import decode, inspect
from tests.media.made import png, saved, sound
from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, InvalidMedia
from triptych.core.media import DecodeSpec, MediaHeader, MediaRef, Modality
from triptych.media import budget

MODALITIES = st.sampled_from(list(Modality))
HEADERS = st.builds(
    MediaHeader,
    modality=MODALITIES,
    mime=st.just("x/y"),
    num_bytes=st.integers(0, 2**36),
    width_px=st.integers(1, 50_000),
    height_px=st.integers(1, 50_000),
    num_frames=st.integers(1, 10**6),
    frames_per_s=st.floats(0.1, 240),
    duration_s=st.floats(0, 10_000),
    sample_rate_hz=st.integers(1, 200_000),
    num_channels=st.integers(1, 64),
)
SPECS = st.builds(
    DecodeSpec,
    num_frames=st.none() | st.integers(1, 2000),
    frames_per_s=st.none() | st.floats(0.01, 60),
    times_s=st.none() | st.lists(st.floats(0, 100), min_size=1, max_size=50).map(tuple),
    max_frames=st.integers(1, 1000),
)


def refusal(check, *args):
    try:
        check(*args)
    except BudgetExceeded as error:
        return error
    return None


@given(st.lists(MODALITIES, max_size=60))
def test_counts_are_by_modality(modalities):
    """A refusal names the modality's limit and the number sent; within the limits there is none."""
    tier = Tier(max_images=5, max_videos=3, max_audios=2)
    error = refusal(budget.check_counts, [MediaRef(modality, b"") for modality in modalities], tier)

    counts = {limit: modalities.count(kind) for kind, limit in budget._COUNT_LIMITS.items()}
    over = {limit for limit, count in counts.items() if count > getattr(tier, limit)}
    assert (error is not None) == bool(over)
    if error:
        assert error.limit in over
        assert error.requested == counts[error.limit]


@given(HEADERS)
def test_header_passes_exactly_when_every_limit_holds(header):
    """No limit is forgotten and none is invented; a refusal states the values."""
    tier = Tier(max_width_px=9000, max_height_px=9000, max_item_pixels=10**7, max_item_bytes=2**30)
    picture = header.modality is not Modality.AUDIO
    values = {"max_item_bytes": header.num_bytes}
    if picture:
        values |= {"max_width_px": header.width_px, "max_height_px": header.height_px}
        values |= {"max_item_pixels": header.width_px * header.height_px}
    if header.modality is Modality.VIDEO:
        values |= {"max_video_duration_s": header.duration_s, "max_video_coded_frames": header.num_frames}
    if header.modality is Modality.AUDIO:
        values |= {"max_audio_duration_s": header.duration_s, "max_audio_channels": header.num_channels}
    over = {limit for limit, value in values.items() if value > getattr(tier, limit)}

    error = refusal(budget.check_header, header, tier, "messages.0")

    assert (error is not None) == bool(over)
    if error:
        assert error.limit in over
        assert (error.allowed, error.requested) == (getattr(tier, error.limit), values[error.limit])
        assert error.param == "messages.0"


@given(st.lists(HEADERS, max_size=8))
def test_request_is_the_sum_of_its_items(headers):
    """Bytes and pixels of all items together."""
    tier = Tier(max_request_media_bytes=2**37, max_request_pixels=3 * 10**9)
    num_bytes, num_pixels = sum(h.num_bytes for h in headers), sum(h.num_pixels for h in headers)

    error = refusal(budget.check_request, headers, tier)

    assert (error is None) == (num_bytes <= 2**37 and num_pixels <= 3 * 10**9)


@given(HEADERS, SPECS)
def test_sampled_frames_never_pass_the_spec(header, spec):
    """At least one frame, at most what the spec allows, and the tier's limits hold over what passes."""
    count = budget.num_sampled_frames(header, spec)
    tier = Tier(max_video_frames=100, max_request_pixels=10**9)

    assert count >= 1
    if spec.num_frames is None and spec.times_s is None:
        assert count <= spec.max_frames
    if header.modality is Modality.VIDEO and refusal(budget.check_decode, header, spec, tier) is None:
        assert count <= 100
        assert count * header.num_pixels <= 10**9


@given(st.integers(0, 2**31))
def test_item_limit_is_the_tighter_one(num_request_bytes):
    """The next item may take what is left of the request, and never more than an item may."""
    tier = Tier(max_item_bytes=2**25, max_request_media_bytes=2**27)
    name, allowed = budget.item_bytes_limit(tier, num_request_bytes)

    assert allowed == min(2**25, 2**27 - num_request_bytes)
    assert name == ("max_item_bytes" if allowed == 2**25 else "max_request_media_bytes")


# bombs


class MemoryBound:
    """Asserts that the process' memory high-water mark grew by less than a bound while the block ran."""

    def __init__(self, max_growth_bytes):
        self.max_growth_bytes = max_growth_bytes

    def __enter__(self):
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        self.before_bytes = psutil.Process().memory_info().rss

    def __exit__(self, *_):
        with open("/proc/self/status") as status:
            peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        growth_bytes = peak_kb * 1024 - self.before_bytes
        assert growth_bytes < self.max_growth_bytes, growth_bytes


def png_bomb():
    """A PNG of 13,000 x 13,000 zeros in a few KB: 500 MB as RGB."""
    compressor = zlib.compressobj(9)
    row = b"\0" * (1 + 13_000 * 3)
    rows = b"".join(compressor.compress(row * 100) for _ in range(130)) + compressor.flush()
    packed = zlib.compress(rows, 9)
    assert len(packed) < 21_000
    return png((13_000, 13_000, 8, 2), (b"IDAT", rows))


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
    return saved(Image.new("L", (9_000, 9_000)), "AVIF", quality=10, speed=10)


@pytest.mark.parametrize("make", [png_bomb, gif_bomb, webp_bomb, bmp_bomb, tiff_bomb, jpeg_bomb, avif_bomb])
def test_picture_bombs_are_refused_at_the_header(make):
    """A small file that unpacks to hundreds of megabytes costs next to nothing, and the refusal names a limit."""
    data = make()
    with MemoryBound(40_000_000), pytest.raises(BudgetExceeded) as caught:
        inspect(data)
    assert caught.value.limit in ("max_width_px", "max_height_px", "max_item_pixels")


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


def test_audio_bomb_is_refused_within_memory():
    """Five hours of silence in a small file: refused by its header; and within the same bound when the header is
    believed and the decoder counts."""
    data = sound(np.zeros((48_000 * 600, 1), np.float32), codec="flac", rate=48_000)
    tier = Tier(max_audio_duration_s=60.0)
    with MemoryBound(40_000_000), pytest.raises(BudgetExceeded, match="max_audio_duration_s"):
        inspect(data, Modality.AUDIO, tier)

    blind = bytearray(data)
    at = 8 + 13  # the total of samples in FLAC's STREAMINFO: 36 bits
    blind[at] &= 0xF0
    blind[at + 1 : at + 5] = b"\0\0\0\0"
    with MemoryBound(40_000_000), pytest.raises(BudgetExceeded, match="max_audio_duration_s"):
        decode(bytes(blind), Modality.AUDIO, tier=tier)

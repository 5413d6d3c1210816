"""Mutated real files of every format: each is decoded or refused by one of our leaves, never a crash, never a 500."""

import gzip

import numpy as np
import pillow_heif
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.media.decoding import decode
from tests.media.made import film, photo, rgb16_png, saved, sound, tone, wav
from tests.media.servers import loopback_policy, response, server
from triptych.core.config import FetchConfig, Tier
from triptych.core.errors import BudgetExceeded, ForbiddenSource, InvalidRequest, SourceUnavailable
from triptych.core.media import DecodeSpec, Modality
from triptych.media.fetch import ByteLimit, Fetcher
from triptych.media.policy import Policy

# Pillow warns of broken metadata that it passes over; the picture is served.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

TIER = Tier(max_item_pixels=4_000_000, max_request_pixels=8_000_000, max_audio_duration_s=60, max_video_duration_s=60)
SPEC = DecodeSpec(num_frames=3, fit_px=(64, 64))


def _corpus():
    picture = Image.fromarray(photo(64, 48))
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures = {
        kind: saved(picture, kind, **options)
        for kind, options in {
            "JPEG": {"exif": exif},
            "PNG": {"exif": exif},
            "GIF": {},
            "WEBP": {"exif": exif},
            "BMP": {},
            "TIFF": {"compression": "tiff_lzw"},
            "AVIF": {},
        }.items()
    }
    pictures["JPEG progressive"] = saved(picture.convert("CMYK"), "JPEG", progressive=True)
    pictures["HEIF"] = saved(picture, "HEIF", exif=exif.tobytes())
    pictures["PNG 16 bit"] = rgb16_png(photo(64, 48).astype(np.uint16) * 257)
    pictures["PNG palette"] = saved(picture.quantize(16), "PNG", transparency=3)
    pictures["TIFF jpeg"] = saved(picture, "TIFF", compression="jpeg")
    pictures["BMP palette"] = saved(picture.quantize(16), "BMP")
    frames = [Image.fromarray(photo(32, 24, i)) for i in range(3)]
    films = {
        kind: saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=80) for kind in ("GIF", "WEBP")
    }
    films |= {container: film(12, container=container, gop=4) for container in ("mp4", "matroska", "mpegts")}
    films |= {"avi": film(12, codec="mpeg4", container="avi"), "vp9": film(12, codec="libvpx-vp9", container="webm")}
    films["flv"] = film(12, container="flv")
    sounds = {"wav": wav(tone(0.3)), "flac": sound(tone(0.3))}
    sounds["mp3"] = sound(tone(0.3), codec="libmp3lame", container="mp3", sample_format="fltp")
    sounds["aac"] = sound(tone(0.3), codec="aac", container="mp4", sample_format="fltp")
    sounds["adts"] = sound(tone(0.3), codec="aac", container="adts", sample_format="fltp")
    sounds["aiff"] = sound(tone(0.3), codec="pcm_s16be", container="aiff")
    sounds["adpcm"] = sound(tone(0.3), codec="adpcm_ima_wav", container="wav", sample_format="s16p")
    sounds["webm"] = sound(tone(0.3, 48_000), codec="libopus", container="webm", rate=48_000)
    sounds["opus"] = sound(tone(0.3, 48_000), codec="libopus", container="ogg", rate=48_000)
    named = ((Modality.IMAGE, pictures), (Modality.VIDEO, films), (Modality.AUDIO, sounds))
    return {f"{kind.value} {name}": (kind, data) for kind, files in named for name, data in files.items()}


pillow_heif.register_heif_opener()  # to write one; the reader under test does not need it
CORPUS = _corpus()


def mutate(data, seed, count, cut):
    """`count` bytes changed, most of them near the start where headers are; sometimes cut, sometimes spliced."""
    random = np.random.default_rng(seed)
    mutated = bytearray(data)
    for _ in range(count):
        at = int(len(mutated) * random.random() ** random.choice([1, 3, 6]))
        mutated[at] = random.choice([0, 255, int(random.integers(256)), mutated[at] ^ (1 << int(random.integers(8)))])
    if cut == 1:
        del mutated[int(random.integers(1, len(mutated))) :]
    elif cut == 2:
        a, b = sorted(int(each) for each in random.integers(0, len(mutated), 2))
        mutated[a:b] = mutated[a:b] * 2
    return bytes(mutated)


def check(data, modality):
    """Decoded within budget, or refused as the caller's fault."""
    try:
        found = decode(data, modality, SPEC, TIER)
    except (InvalidRequest, BudgetExceeded):
        return
    array = {Modality.IMAGE: "pixels", Modality.VIDEO: "frames", Modality.AUDIO: "samples"}[modality]
    values = getattr(found, array)
    assert values.size
    assert np.isfinite(values).all()


@pytest.mark.parametrize("name", CORPUS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), count=st.integers(0, 20), cut=st.integers(0, 2))
def test_mutated_files_are_decoded_or_refused(name, seed, count, cut):
    """A short run over every format."""
    modality, data = CORPUS[name]
    check(mutate(data, seed, count, cut), modality)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CORPUS)
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), count=st.integers(0, 40), cut=st.integers(0, 2))
def test_mutated_files_at_length(name, seed, count, cut):
    """A long run over every format."""
    modality, data = CORPUS[name]
    check(mutate(data, seed, count, cut), modality)


ANSWERS = (
    response(b"x" * 3000, etag='"1"', content_type="image/png"),
    response(gzip.compress(b"y" * 3000), content_encoding="gzip"),
    response(status=302, location="/elsewhere"),
    response(status=302, location="https://example.com:444/a?b#c"),
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\nworld!\r\n0\r\na: b\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + response(b"z"),
)


async def fetch_mutants(seeds):
    """Each seed is one server's answer, mutated; what comes back is bytes, or one of our leaves."""
    random = np.random.default_rng(1)
    bodies = [mutate(ANSWERS[seed % len(ANSWERS)], seed, int(random.integers(0, 8)), seed % 3) for seed in seeds]

    async def answer(path, headers, writer):
        writer.write(
            bodies[int(path[1:])] if path[1:].isdigit() and int(path[1:]) < len(bodies) else response(b"other")
        )
        return False

    async with server(answer) as served:
        fetcher = Fetcher(Policy(loopback_policy(served.port)), FetchConfig(max_retries=0, response_cache_bytes=10**6))
        try:
            for i in range(len(bodies)):
                try:
                    found = await fetcher.fetch(f"{served.url}/{i}", ByteLimit("max_item_bytes", 5000), max_s=0.3)
                except (SourceUnavailable, ForbiddenSource, BudgetExceeded, InvalidRequest):
                    continue
                assert len(found) <= 5000
        finally:
            await fetcher.close()


async def test_mutated_answers_of_servers_are_bodies_or_refusals():
    """Broken heads, lengths, chunks, encodings and locations: never another error, never over the limit."""
    await fetch_mutants(range(120))


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_mutated_answers_of_servers_at_length():
    """The same, longer."""
    await fetch_mutants(range(1000, 4000))

"""The media plane against its yardsticks, both sides in the same run. `python bench/media.py [--quick]`

Pictures a second from JPEG bytes to model-ready pixels against Pillow; 16 frames out of a long film against decoding
all; 16 URLs of 50 ms latency against one; what a scaled decode saves and changes; the time of a hit against that of a
miss. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import av
import numpy as np
import simplejpeg
import uvloop
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.media.made import film, photo, saved
from tests.media.servers import loopback_config, response, server

from triptych.cache import ByteLru
from triptych.core.config import MediaConfig, Tier
from triptych.core.media import DecodeSpec, MediaRef, Modality
from triptych.media.budget import DecodeGuard
from triptych.media.decode.image import decode_image
from triptych.media.plane import MediaPlane
from triptych.media.sniff import JPEG

FIT_PX = (512, 384)
TIER = Tier()


def report(name: str, **values: object) -> None:
    print(json.dumps({"bench": name, **values}), flush=True)


def median_s(work: Callable[[], object], repeats: int) -> float:
    times_s = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s)


def shrink(pixels: np.ndarray | Image.Image) -> np.ndarray:
    """What the model's processor does with either side's picture."""
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    return np.asarray(picture.resize(FIT_PX, Image.Resampling.BICUBIC))


async def bench_pictures(num_pictures: int, repeats: int) -> None:
    """12-megapixel photographs on two threads either way."""
    data = saved(Image.fromarray(photo(4000, 3000)), "JPEG", quality=90)

    def by_pillow(_: int) -> np.ndarray:
        return shrink(Image.open(io.BytesIO(data)).convert("RGB"))

    with ThreadPoolExecutor(2) as threads:
        pillow_s = median_s(lambda: list(threads.map(by_pillow, range(num_pictures))), repeats)
        async with MediaPlane(MediaConfig(decode_workers=2)) as plane:
            loop = asyncio.get_running_loop()
            # Different bytes, or single flight would decode them once.
            refs = [MediaRef(Modality.IMAGE, data + bytes([i])) for i in range(num_pictures)]
            plane_s = []
            for _ in range(repeats):
                started_s = time.perf_counter()
                blobs = await plane.open(refs, tier=TIER, tenant="bench")

                async def one(blob):
                    decoded = await plane.decode(blob, DecodeSpec(fit_px=FIT_PX), tier=TIER)
                    return await loop.run_in_executor(threads, shrink, decoded.pixels)

                ours = await asyncio.gather(*(one(blob) for blob in blobs))
                plane_s.append(time.perf_counter() - started_s)
    difference = np.abs(ours[0].astype(int) - by_pillow(0))
    report(
        "jpeg_12mp_to_512x384",
        pillow_per_s=round(num_pictures / pillow_s, 2),
        plane_per_s=round(num_pictures / statistics.median(plane_s), 2),
        ratio=round(pillow_s / statistics.median(plane_s), 2),
        mean_difference=round(float(difference.mean()), 3),
        max_difference=int(difference.max()),
    )


async def bench_film(seconds: int) -> None:
    """16 frames, evenly spaced, out of a 640x360 film; against decoding every frame and keeping 16."""
    still = [np.roll(photo(640, 360), 9 * i, axis=1) for i in range(30)]
    data = film(seconds * 30, size=(640, 360), gop=60, paint=lambda i: still[i % 30], options={"crf": "30"})

    def decode_all() -> list[np.ndarray]:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            every = seconds * 30 // 16
            return [f.to_ndarray(format="rgb24") for i, f in enumerate(container.decode(stream)) if i % every == 0][:16]

    all_s = median_s(decode_all, 1)
    async with MediaPlane() as plane:
        (blob,) = await plane.open([MediaRef(Modality.VIDEO, data)], tier=TIER, tenant="bench")
        started_s = time.perf_counter()
        frames = (await plane.decode(blob, DecodeSpec(num_frames=16), tier=TIER)).frames
        sampled_s = time.perf_counter() - started_s
    assert len(frames) == 16
    report(
        "film_16_frames",
        film_s=seconds,
        film_bytes=len(data),
        decode_all_s=round(all_s, 3),
        sampled_s=round(sampled_s, 3),
        ratio=round(all_s / sampled_s, 2),
        sampled_frames_per_s=round(16 / sampled_s, 1),
    )


def serve_pictures(ready: Connection, size_px: int = 512) -> None:
    """A server in a process of its own, so that its work is not taken for ours: 16 pictures, 50 ms before each."""
    pictures = [saved(Image.fromarray(photo(size_px, size_px, seed)), "JPEG", quality=85) for seed in range(16)]

    async def answer(path: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.05)
        writer.write(response(pictures[int(path[1:]) % 16]))
        return True

    async def run() -> None:
        async with server(answer) as served:
            ready.send(served.port)
            await asyncio.Event().wait()

    uvloop.run(run())


async def bench_urls(repeats: int) -> None:
    """From request to decoded pixels: 16 URLs, 50 ms latency each, against one. `loop_ms_a_url`: what a URL costs the
    event loop, in CPU time."""
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=serve_pictures, args=(theirs,), daemon=True)
    process.start()
    port = await asyncio.to_thread(ours.recv)
    async with MediaPlane(loopback_config(port)) as plane:

        async def request(count: int) -> tuple[float, float, float]:
            refs = [MediaRef(Modality.IMAGE, f"http://127.0.0.1:{port}/{i}") for i in range(count)]
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            async with asyncio.TaskGroup() as group:  # as a request does: see prompt/intake.py
                decode = partial(plane.decode, spec=DecodeSpec(), tier=TIER)
                await plane.open(
                    refs, tier=TIER, tenant="bench", on_open=lambda _, blob: group.create_task(decode(blob))
                )
                opened_s = time.perf_counter() - started_s
            return opened_s, time.perf_counter() - started_s, time.thread_time() - started_cpu_s

        await request(16)
        one = [await request(1) for _ in range(repeats)]
        many = [await request(16) for _ in range(repeats)]
    process.terminate()
    process.join()
    open_one_s, one_s, _ = (statistics.median(each) for each in zip(*one, strict=True))
    open_many_s, many_s, loop_s = (statistics.median(each) for each in zip(*many, strict=True))
    report(
        "urls_16_against_1",
        one_ms=round(one_s * 1e3, 1),
        sixteen_ms=round(many_s * 1e3, 1),
        ratio=round(many_s / one_s, 2),
        open_ratio=round(open_many_s / open_one_s, 2),
        loop_ms_a_url=round(loop_s / 16 * 1e3, 3),
    )


SHRINKS: tuple[tuple[str, tuple[int, int], tuple[tuple[int, int], ...], Image.Resampling], ...] = (
    # what the stock processors do with a photograph of 4000 x 3000: sizes in turn, and their filter
    ("CLIP 336, shortest edge", (448, 336), ((448, 336),), Image.Resampling.BICUBIC),
    ("SigLIP 384 x 384", (512, 384), ((384, 384),), Image.Resampling.BICUBIC),
    ("SmolVLM, one tile of 512", (683, 512), ((2048, 1536), (512, 512)), Image.Resampling.LANCZOS),
    ("Qwen2-VL, 256 visual tokens", (504, 392), ((504, 392),), Image.Resampling.BICUBIC),
)


def bench_scaled(num_pictures: int) -> None:
    """Scaled JPEG decode: what it saves, and how far the model's input is from the full decode's, in levels of 255,
    beside how far another setting of the same decoder (fast transform, plain chroma) is."""
    photographs = [saved(Image.fromarray(photo(4000, 3000, seed)), "JPEG", quality=90) for seed in range(num_pictures)]
    for name, fit_px, sizes, kind in SHRINKS:
        rows = []
        for data in photographs:
            full, full_s = timed_decode(data, DecodeSpec())
            scaled, scaled_s = timed_decode(data, DecodeSpec(fit_px=fit_px))
            other = simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
            wanted, found, beside = (shrunk(each, sizes, kind) for each in (full, scaled, other))
            difference = np.abs(found - wanted)
            rows.append((full_s, scaled_s, difference.mean(), difference.max(), np.abs(beside - wanted).mean()))
        means = np.mean(rows, axis=0)
        report(
            "scaled_decode",
            processor=name,
            decode_cpu_ms=round(means[0] * 1e3, 1),
            scaled_cpu_ms=round(means[1] * 1e3, 1),
            mean_difference=round(means[2], 3),
            max_difference=int(means[3]),
            other_decoder_mean_difference=round(means[4], 3),
        )


def timed_decode(data: bytes, spec: DecodeSpec) -> tuple[np.ndarray, float]:
    started_s = time.thread_time()
    pixels = decode_image(data, JPEG, spec, DecodeGuard(TIER)).pixels
    return pixels, time.thread_time() - started_s


def shrunk(pixels: np.ndarray, sizes: tuple[tuple[int, int], ...], kind: Image.Resampling) -> np.ndarray:
    picture = Image.fromarray(pixels)
    for size in sizes:
        picture = picture.resize(size, kind)
    return np.asarray(picture).astype(np.int16)


async def bench_hit() -> None:
    """What a request pays for a picture whose product is cached: open by bytes (header and digest), and a lookup."""
    data = saved(Image.fromarray(photo(2000, 1500)), "JPEG", quality=90)
    cache: ByteLru[bytes, int] = ByteLru(1000)
    async with MediaPlane() as plane:
        refs = [MediaRef(Modality.IMAGE, data)]
        hits_s, misses_s = [], []
        for _ in range(30):
            started_s = time.perf_counter()
            (blob,) = await plane.open(refs, tier=TIER, tenant="bench")
            cache.put(blob.digest, 1, 1)
            cache.lookup(blob.digest)
            hits_s.append(time.perf_counter() - started_s)
            await plane.decode(blob, DecodeSpec(), tier=TIER)
            misses_s.append(time.perf_counter() - started_s)
    cache.put(b"key", 1, 1)
    lookup_s = median_s(lambda: [cache.lookup(b"key") for _ in range(1000)], 5) / 1000
    report(
        "cache_hit",
        picture_bytes=len(data),
        open_and_hit_ms=round(statistics.median(hits_s) * 1e3, 3),
        open_and_decode_ms=round(statistics.median(misses_s) * 1e3, 3),
        lookup_us=round(lookup_s * 1e6, 3),
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and a shorter film")
    quick = parser.parse_args().quick
    report("machine", cpus=os.cpu_count(), load=os.getloadavg()[0])
    await bench_pictures(8, 2 if quick else 5)
    await bench_film(120 if quick else 600)
    await bench_urls(5 if quick else 20)
    bench_scaled(1 if quick else 4)
    await bench_hit()


if __name__ == "__main__":
    uvloop.run(main())  # the loop that serves

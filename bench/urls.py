"""Time to first token of 16 URLs in one request against one, 50 ms of latency each, through a server.

    python -m bench.urls [MODEL] [--repeats 15]

The pictures are asked about before, so that every cache holds them: what is measured is the fetch and what the server
does for sixteen items in place of one, not sixteen runs of an encoder. Prints one JSON object, medians of alternating
requests, with the stages of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe, get_context
from pathlib import Path

import msgspec

from bench.load import Client
from bench.media import serve_pictures
from bench.servers import free_port, started

SIZE_PX = 224  # sixteen of them fit the embedded model's context
CONFIG = """
[media.policy]
schemes = ["http", "data"]
ports = [{pictures}]
allowed_networks = ["127.0.0.0/8"]
"""


@contextmanager
def picture_server() -> Iterator[int]:
    """Its port."""
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=serve_pictures, args=(theirs, SIZE_PX), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def chat(model: str, pictures_port: int, count: int) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{pictures_port}/{i}"}} for i in range(count)]
    text = {"type": "text", "text": "What is there?"}
    return msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": "user", "content": [*parts, text]}],
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "include_stages": True},
        }
    )


async def measure(url: str, model: str, pictures_port: int, repeats: int) -> dict[str, object]:
    bodies = {count: chat(model, pictures_port, count) for count in (1, 16)}
    ttft_ms: dict[int, list[float]] = {1: [], 16: []}
    stage_ms: dict[int, list[dict[str, float]]] = {1: [], 16: []}
    async with Client(url) as client:
        for turn in range(repeats + 2):
            for count, body in bodies.items():
                record = await client.send(f"{count}", body)
                if record.error:
                    raise SystemExit(record.error)
                if turn >= 2:
                    ttft_ms[count].append(record.ttft_s * 1e3)
                    stage_ms[count].append(record.stages or {})
    one, many = (statistics.median(ttft_ms[count]) for count in (1, 16))
    return {
        "bench": "ttft_urls_16_against_1",
        "one_ms": round(one, 1),
        "sixteen_ms": round(many, 1),
        "ratio": round(many / one, 2),
        "one_stages_ms": medians(stage_ms[1]),
        "sixteen_stages_ms": medians(stage_ms[16]),
    }


def medians(stages: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each.get(name, 0.0) for each in stages), 1) for name in stages[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="tiny-vl")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, picture_server() as pictures_port:
        config = Path(folder) / "triptych.toml"
        config.write_text(CONFIG.format(pictures=pictures_port))
        port = free_port()
        command = [
            str(Path(sys.executable).with_name("triptych")),
            "serve",
            args.model,
            "--config",
            str(config),
            "--port",
            str(port),
        ]
        with started(command, f"http://127.0.0.1:{port}/ready", os.environ, Path(folder) / "log", timeout_s=180):
            found = asyncio.run(measure(f"http://127.0.0.1:{port}", args.model, pictures_port, args.repeats))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

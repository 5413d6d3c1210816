"""Whether one model's work moves another's: text streams and `/health` of `triptych serve`, alone and while it draws.

    python -m bench.isolation [--rounds 3] [--seconds 12] [--pictures 8] [--out FILE.json]

One server, the two embedded models. Rounds alternate: text alone, text beside pictures. Two streams of text are in
flight all the while, `--pictures` pictures in the second half of a round, each with two previews. `/health` is asked
every 20 ms: it does nothing, so what it takes is what the front's event loop is late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from bench import peers
from bench.load import Client, Record, steady_beside
from bench.servers import free_port, started
from bench.summary import percentiles_ms
from bench.work import WorkSpec, bodies

TEXT_MODEL, PICTURE_MODEL = "tiny-vl", "tiny-image"
NUM_STREAMS = 2
NUM_PREVIEWS = 2
HEALTH_EVERY_S = 0.02
END_TOKEN_ID = 2  # of tiny-vl


@dataclass(slots=True)
class Seen:
    """What the client saw while one kind of round lasted, all rounds together."""

    records: list[Record] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    num_pictures: int = 0
    picture_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    def figures(self) -> dict[str, Any]:
        good = [record for record in self.records if record.error is None]
        return {
            "num_texts": len(good),
            "errors": sorted({record.error for record in self.records if record.error})[:3],
            "itl_ms": percentiles_ms([gap_s for record in good for gap_s in record.gaps_s]),
            "ttft_ms": percentiles_ms([record.ttft_s for record in good]),
            "text_tokens_per_s": sum(record.num_output_tokens for record in good) / self.wall_s,
            "health_ms": percentiles_ms(self.health_s),
            "pictures_per_s": self.num_pictures / self.wall_s,
            "picture_ms": percentiles_ms(self.picture_s),
        }


class Load:
    """Everything that is asked of one server."""

    def __init__(self, url: str, client: Client, session: aiohttp.ClientSession) -> None:
        self._url, self._client, self._session = url, client, session
        self._texts = [_never_ending(body) for body in bodies(TEXT_MODEL, WorkSpec("text", num_output_tokens=96), 64)]

    async def round(self, seconds: float, num_pictures: int, seen: Seen) -> None:
        begun_s = self._client.now_s()
        lasting = asyncio.create_task(_last(seconds))
        beside = [asyncio.create_task(self._watch_health(lasting, seen))]
        beside += [asyncio.create_task(self._draw(lasting, index, seen)) for index in range(num_pictures)]
        seen.records += await steady_beside(self._client, "text", self._texts, NUM_STREAMS, [lasting])
        if not any(record.error is None for record in seen.records):
            raise RuntimeError(f"no text: {seen.records[0].error}")
        await asyncio.gather(*beside)
        seen.wall_s += self._client.now_s() - begun_s

    async def _watch_health(self, lasting: asyncio.Task[Any], seen: Seen) -> None:
        while not lasting.done():
            begun_s = self._client.now_s()
            async with self._session.get(f"{self._url}/health") as response:
                await response.read()
            seen.health_s.append(self._client.now_s() - begun_s)
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _draw(self, lasting: asyncio.Task[Any], seed: int, seen: Seen) -> None:
        while not lasting.done():
            body = {"model": PICTURE_MODEL, "prompt": "two red circles", "seed": seed, "stream": True}
            begun_s = self._client.now_s()
            async with self._session.post(
                f"{self._url}/v1/images/generations", json=body | {"partial_images": NUM_PREVIEWS}
            ) as response:
                if response.status != 200 or b"image_generation.completed" not in await response.read():
                    raise RuntimeError(f"no picture: status {response.status}")
            seen.picture_s.append(self._client.now_s() - begun_s)
            seen.num_pictures += 1
            seed += 1000


def _never_ending(body: bytes) -> bytes:
    """Past the end of its answer the model would go on with tokens that have no text, and no gap would be seen."""
    return json.dumps(json.loads(body) | {"logit_bias": {str(END_TOKEN_ID): -100}}).encode()


async def _last(seconds: float) -> list[Record]:
    await asyncio.sleep(seconds)
    return []


@asynccontextmanager
async def load(url: str) -> AsyncIterator[Load]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with Client(url) as client, aiohttp.ClientSession(timeout=timeout) as session:
        yield Load(url, client, session)


async def measure(url: str, *, rounds: int, seconds: float, num_pictures: int) -> dict[str, Any]:
    alone, beside = Seen(), Seen()
    async with load(url) as asked:
        await asked.round(3.0, num_pictures, Seen())  # first steps of each batch are slower
        for _ in range(rounds):
            await asked.round(seconds, 0, alone)
            await asked.round(seconds, num_pictures, beside)
    return {"alone": alone.figures(), "beside pictures": beside.figures()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--pictures", type=int, default=8, help="in flight at once")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "triptych.cli", "serve", "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        with started(command, f"{url}/ready", peers.environment(), log, timeout_s=180) as start_s:
            found = asyncio.run(measure(url, rounds=args.rounds, seconds=args.seconds, num_pictures=args.pictures))
    found |= {"start_s": start_s, "num_pictures_in_flight": args.pictures, "num_streams": NUM_STREAMS}
    show(found)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def show(found: dict[str, Any]) -> None:
    table = Table(title="two models in one server: ms, p50 / p99 / longest")
    for column in ("", "alone", "beside pictures"):
        table.add_column(column, justify="right" if column else "left")
    sides = (found["alone"], found["beside pictures"])
    for name, label in (("itl_ms", "between pieces of text"), ("ttft_ms", "to the first"), ("health_ms", "/health")):
        table.add_row(label, *(" / ".join(f"{side[name][p]:.1f}" for p in ("p50", "p99", "max")) for side in sides))
    table.add_row("text tokens/s", *(f"{side['text_tokens_per_s']:.0f}" for side in sides))
    table.add_row("pictures/s", *(f"{side['pictures_per_s']:.2f}" for side in sides))
    Console().print(table)


if __name__ == "__main__":
    main()

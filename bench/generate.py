"""Diffusion serving against the stock diffusers pipeline, in the same process, on the same weights and threads.

    python bench/generate.py [--model FOLDER] [--kind unet] [--threads 1] [--seed 0] [--out generate.json]

Stock serves one request at a time, first come first served, as a plain server over the pipeline does. Without `--model`
a random one is made, since speed does not depend on what the weights say: `unet` is a small Stable Diffusion 1.x (77
text tokens, calls so small that their overhead is most of a step), `sd3` a Stable Diffusion 3 of about 2 M parameters
(333 text tokens a branch: two cores are full at one row).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel

from triptych.core.config import GenerateConfig
from triptych.core.events import FinishReason
from triptych.generate.engine import GenerateEngine
from triptych.generate.events import GenerateFinal
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.load import load_kind
from triptych.generate.request import GenerateRequest
from triptych.testing.toy_diffusion import TOYS, make_diffusion_folder

WIDTH = 128


@dataclass(frozen=True)
class Row:
    """`goal` is the highest ratio allowed, or the lowest when `higher_is_better`."""

    work: str
    ours: float
    stock: float
    unit: str
    goal: float
    higher_is_better: bool = False

    @property
    def ratio(self) -> float:
        return self.ours / self.stock

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.goal if self.higher_is_better else self.ratio <= self.goal


def make_model(folder: Path, kind: str) -> Path:
    if kind == "unet":
        return make_diffusion_folder("stable_diffusion", folder)
    torch.manual_seed(0)
    pipeline = TOYS["stable_diffusion_3"]()
    transformer = SD3Transformer2DModel(
        sample_size=64,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        caption_projection_dim=WIDTH,
        joint_attention_dim=pipeline.transformer.config.joint_attention_dim,
        pooled_projection_dim=pipeline.transformer.config.pooled_projection_dim,
        pos_embed_max_size=96,
    ).eval()
    pipeline.register_modules(transformer=transformer)
    pipeline.save_pretrained(folder)
    return folder


class Bench:
    """Both servers over one loaded pipeline."""

    def __init__(self, kind: Kind, engine: GenerateEngine, seed: int) -> None:
        self.kind = kind
        self.engine = engine
        self.random = random.Random(seed)
        self._count = 0
        self._stock_lock = asyncio.Lock()

    def request(self, size_px: int = 32, num_steps: int = 10, guidance_scale: float = 5.0) -> GenerateRequest:
        self._count += 1
        return GenerateRequest(
            request_id=f"r{self._count}",
            prompt="two green circles above a red square",
            width_px=size_px,
            height_px=size_px,
            num_steps=num_steps,
            guidance_scale=guidance_scale,
            seed=self._count,
        )

    async def ours(self, request: GenerateRequest) -> None:
        async for event in self.engine.submit(request):
            if isinstance(event, GenerateFinal) and event.reason is not FinishReason.STOP:
                raise RuntimeError(f"{request.request_id}: {event.error}")

    async def stock(self, request: GenerateRequest) -> None:
        async with self._stock_lock:
            await asyncio.to_thread(self._stock, request)

    def _stock(self, request: GenerateRequest) -> Any:
        return self.kind.pipeline(
            prompt=request.prompt,
            width=request.width_px,
            height=request.height_px,
            num_inference_steps=request.num_steps,
            guidance_scale=request.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(request.seed),
        )

    async def timed(self, serve: Callable[[GenerateRequest], Awaitable[None]], request: GenerateRequest) -> float:
        started_s = time.perf_counter()
        await serve(request)
        return time.perf_counter() - started_s


async def one_request(bench: Bench, repeats: int = 5) -> Row:
    ours, stock = [], []
    for _ in range(repeats):
        ours.append(await bench.timed(bench.ours, bench.request()))
        stock.append(await bench.timed(bench.stock, bench.request()))
    return Row("one request, 10 steps, 32 px, median", median(ours), median(stock), "s", 0.95)


async def burst(bench: Bench, size: int = 16, repeats: int = 3) -> Row:
    rates: dict[str, list[float]] = {"ours": [], "stock": []}
    for _ in range(repeats):
        forms = [((32, 48)[i % 2], (4, 8, 12, 16)[i // 2 % 4], (5.0, 1.0)[i % 3 == 0]) for i in range(size)]
        requests = [bench.request(*form) for form in forms]
        for name, serve in (("ours", bench.ours), ("stock", bench.stock)):
            started_s = time.perf_counter()
            await asyncio.gather(*(serve(request) for request in requests))
            rates[name].append(size / (time.perf_counter() - started_s))
    work = f"{size} at once, mixed steps, sizes, guidance, median"
    return Row(work, median(rates["ours"]), median(rates["stock"]), "pictures/s", 2.0, True)


async def poisson(bench: Bench, stock_s: float, count: int = 16) -> Row:
    rate = 0.7 / stock_s
    gaps = [bench.random.expovariate(rate) for _ in range(count)]
    steps = [bench.random.choice((5, 10, 15)) for _ in range(count)]
    tails = {}
    for name, serve in (("ours", bench.ours), ("stock", bench.stock)):
        tasks = []
        for gap, num_steps in zip(gaps, steps, strict=True):
            await asyncio.sleep(gap)
            tasks.append(asyncio.create_task(bench.timed(serve, bench.request(num_steps=num_steps))))
        tails[name] = sorted(await asyncio.gather(*tasks))[int(0.95 * (count - 1))]
    return Row(f"Poisson at 70% of stock's rate, {count} requests, p95", tails["ours"], tails["stock"], "s", 0.5)


async def short_behind_long(bench: Bench, repeats: int = 3) -> Row:
    alone, behind = [], []
    for _ in range(repeats):
        alone.append(await bench.timed(bench.ours, bench.request(num_steps=4)))
        long = asyncio.create_task(bench.ours(bench.request(num_steps=50)))
        await asyncio.sleep(4 * alone[-1])
        behind.append(await bench.timed(bench.ours, bench.request(num_steps=4)))
        assert not long.done(), "the long job ended first: it held nobody up"
        await long
    return Row("4 steps behind 50, over 4 steps alone (ours)", median(behind), median(alone), "s", 2.0)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def as_table(rows: list[Row]) -> str:
    lines = ["| work | ours | stock | ratio | goal | met |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        sign = ">=" if row.higher_is_better else "<="
        met = "yes" if row.is_met else "no"
        lines.append(
            f"| {row.work} | {row.ours:.3f} {row.unit} | {row.stock:.3f} {row.unit} | {row.ratio:.2f} "
            f"| {sign} {row.goal} | {met} |"
        )
    return "\n".join(lines)


async def run(folder: Path, seed: int) -> dict[str, Any]:
    kind = load_kind(folder, name=folder.name)
    engine = GenerateEngine(kind, GenerateConfig())
    await engine.start()
    bench = Bench(kind, engine, seed)
    try:
        for serve in (bench.ours, bench.stock):  # warm both
            await serve(bench.request(num_steps=3))
            await serve(bench.request(48, num_steps=3))
        rows = [await one_request(bench)]
        for work in (burst(bench), poisson(bench, rows[0].stock), short_behind_long(bench)):
            print(as_table(rows[-1:]), flush=True)
            rows.append(await work)
    finally:
        await engine.close()
    print(as_table(rows))
    table = engine.step_table()
    for size, steps in table.items():
        print(f"{size}: " + ", ".join(f"{n} branches {ms:.1f} ms ({ms / n:.2f} each)" for n, ms in steps.items()))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak resident memory of the process: {peak_mib:.0f} MiB; threads: {torch.get_num_threads()}")
    forms = [asdict(row) | {"ratio": row.ratio, "is_met": row.is_met} for row in rows]
    return {"rows": forms, "step_table": table, "peak_mib": peak_mib, "threads": torch.get_num_threads()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a diffusers folder; a random one is made without it")
    parser.add_argument("--kind", choices=("unet", "sd3"), default="unet", help="of the random model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as root:
        figures = asyncio.run(run(arguments.model or make_model(Path(root) / "random", arguments.kind), arguments.seed))
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

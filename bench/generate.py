"""Diffusion serving against the stock diffusers pipeline, in the same process, on the same weights and threads.

    python -m bench.generate [--model FOLDER] [--kind unet] [--arrivals 120] [--out generate.json]

Stock serves one request at a time, first come first served, as a plain server over the pipeline does, on one core or on
all of them, whichever a first look finds faster for it. Memory that is freed is kept for both. Without `--model`
a random one is made, since speed does not depend on what the weights say: `unet` is a small Stable Diffusion 1.x (77
text tokens, calls so small that their overhead is most of a step), `sd3` a Stable Diffusion 3 of about 2 M parameters
(333 text tokens a branch: two cores are full at one row). Only the step cache depends on the weights: its row takes the
calibration beside the model, or makes one for the row's own requests. Where the calibration names a default, the second
and third row are there once more with it, as the server draws then.

Peak memory is the process's, reset before each part (Linux); the weights are in it on both sides. The last table is one
step at growing batches and sizes: where a branch gets no cheaper, batching has stopped to pay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `triptych serve`; read when torch is loaded

import msgspec
import torch
from diffusers import SD3Transformer2DModel

from triptych.core.config import GenerateConfig
from triptych.core.events import FinishReason
from triptych.generate.calibrate import calibrate, load_calibration
from triptych.generate.engine import GenerateEngine
from triptych.generate.events import GenerateFinal
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.load import load_kind
from triptych.generate.kinds.pixart import PixArt
from triptych.generate.request import GenerateRequest
from triptych.generate.runner import StepRunner
from triptych.generate.schedule import BatchSizer, StepTable, ways_of
from triptych.generate.step_workers import StepWorkers
from triptych.models.cpu_threads import on_cores
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
    peak_mib: dict[str, float] = field(default_factory=dict)  # ours, stock

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


class PeakMemory:
    """Highest resident memory of this process by who was at work, MiB."""

    def __init__(self) -> None:
        self.mib: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        yield
        status = Path("/proc/self/status").read_text()
        peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        self.mib[name] = max(self.mib.get(name, 0.0), peak_kib / 1024)


class Bench:
    """Both servers over one loaded pipeline. `sizes_px`: the usual size, and the other one of mixed work."""

    def __init__(self, kind: Kind, engine: GenerateEngine, seed: int, sizes_px: tuple[int, int]) -> None:
        self.kind = kind
        self.engine = engine
        self.sizes_px = sizes_px
        self.random = random.Random(seed)
        self.stock_threads = torch.get_num_threads()
        self._count = 0
        self._stock_lock = asyncio.Lock()

    def request(
        self,
        size_px: int | None = None,
        num_steps: int = 10,
        guidance_scale: float = 5.0,
        step_cache: str | None = None,
        num_previews: int = 0,
    ) -> GenerateRequest:
        self._count += 1
        size_px = size_px or self.sizes_px[0]
        return GenerateRequest(
            request_id=f"r{self._count}",
            prompt=f"two green circles above a red square, take {self._count}",  # no text is encoded ahead
            width_px=size_px,
            height_px=size_px,
            num_steps=num_steps,
            guidance_scale=guidance_scale,
            seed=self._count,
            step_cache=step_cache,
            num_previews=num_previews,
        )

    async def ours(self, request: GenerateRequest) -> GenerateFinal:
        async for event in self.engine.submit(request):
            if isinstance(event, GenerateFinal) and event.reason is FinishReason.STOP:
                return event
        raise RuntimeError(f"{request.request_id}: no picture")

    async def stock(self, request: GenerateRequest) -> None:
        async with self._stock_lock:
            await asyncio.to_thread(self._stock, request)

    async def choose_stock_threads(self, repeats: int = 3) -> None:
        """One core or all: the least time of a few requests in turn."""
        seconds: dict[int, list[float]] = {torch.get_num_threads(): [], 1: []}
        for _ in range(repeats):
            for self.stock_threads in seconds:
                seconds[self.stock_threads].append(await self.timed(self.stock, self.request(num_steps=4)))
        self.stock_threads = min(seconds, key=lambda num_threads: min(seconds[num_threads]))

    def _stock(self, request: GenerateRequest) -> Any:
        with on_cores(self.stock_threads):
            return self._run_stock(request)

    def _run_stock(self, request: GenerateRequest) -> Any:
        as_asked = {"use_resolution_binning": False, "clean_caption": False}
        return self.kind.pipeline(
            **(as_asked if isinstance(self.kind, PixArt) else {}),
            prompt=request.prompt,
            width=request.width_px,
            height=request.height_px,
            num_inference_steps=request.num_steps,
            guidance_scale=request.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(request.seed),
        )

    async def timed(self, serve: Callable[[GenerateRequest], Awaitable[Any]], request: GenerateRequest) -> float:
        started_s = time.perf_counter()
        await serve(request)
        return time.perf_counter() - started_s


async def one_request(bench: Bench, repeats: int = 5) -> Row:
    ours, stock, peak = [], [], PeakMemory()
    for _ in range(repeats):
        with peak.of("ours"):
            ours.append(await bench.timed(bench.ours, bench.request()))
        with peak.of("stock"):
            stock.append(await bench.timed(bench.stock, bench.request()))
    work = f"one request, 10 steps, {bench.sizes_px[0]} px, median"
    return Row(work, median(ours), median(stock), "s", 0.95, peak_mib=peak.mib)


async def burst(bench: Bench, step_cache: str | None = None, size: int = 16, repeats: int = 3) -> Row:
    rates: dict[str, list[float]] = {"ours": [], "stock": []}
    peak = PeakMemory()
    for _ in range(repeats):
        forms = [(bench.sizes_px[i % 2], (4, 8, 12, 16)[i // 2 % 4], (5.0, 1.0)[i % 3 == 0]) for i in range(size)]
        requests = [bench.request(*form, step_cache=step_cache) for form in forms]
        for name, serve in (("ours", bench.ours), ("stock", bench.stock)):
            started_s = time.perf_counter()
            with peak.of(name):
                await asyncio.gather(*(serve(request) for request in requests))
            rates[name].append(size / (time.perf_counter() - started_s))
    work = f"{size} at once, mixed steps, sizes, guidance{_with(step_cache)}, median"
    return Row(work, median(rates["ours"]), median(rates["stock"]), "pictures/s", 2.0, True, peak.mib)


async def poisson(bench: Bench, stock_s: float, count: int, step_cache: str | None = None) -> Row:
    """The same arrivals for both. Fewer than some hundred tell more of their luck than of the servers: by simulation,
    the ratio of 16 arrivals lies between 0.49 and 0.78 where that of many is 0.45."""
    rate = 0.7 / stock_s
    gaps = [bench.random.expovariate(rate) for _ in range(count)]
    steps = [bench.random.choice((5, 10, 15)) for _ in range(count)]
    tails, peak = {}, PeakMemory()
    for name, serve in (("ours", bench.ours), ("stock", bench.stock)):
        tasks = []
        with peak.of(name):
            for gap, num_steps in zip(gaps, steps, strict=True):
                await asyncio.sleep(gap)
                request = bench.request(num_steps=num_steps, step_cache=step_cache)
                tasks.append(asyncio.create_task(bench.timed(serve, request)))
            tails[name] = sorted(await asyncio.gather(*tasks))[int(0.95 * (count - 1))]
    work = f"Poisson at 70% of stock's rate, {count} requests{_with(step_cache)}, p95"
    return Row(work, tails["ours"], tails["stock"], "s", 0.5, peak_mib=peak.mib)


def _with(step_cache: str | None) -> str:
    return f", ours with its default {step_cache}" if step_cache else ""


async def short_behind_long(bench: Bench, repeats: int = 3) -> Row:
    alone, behind, peak = [], [], PeakMemory()
    for _ in range(repeats):
        with peak.of("ours"):
            alone.append(await bench.timed(bench.ours, bench.request(num_steps=4)))
            long = asyncio.create_task(bench.ours(bench.request(num_steps=50)))
            await asyncio.sleep(4 * alone[-1])
            behind.append(await bench.timed(bench.ours, bench.request(num_steps=4)))
            assert not long.done(), "the long job ended first: it held nobody up"
            await long
    work = "4 steps behind 50, over 4 steps alone (ours)"
    return Row(work, median(behind), median(alone), "s", 2.0, peak_mib=peak.mib)


async def step_caches(bench: Bench, repeats: int = 5, num_steps: int = 20) -> list[Row]:
    """End to end, ours with each calibrated cache over ours without it, at `num_steps` or the fewest that it was
    calibrated at; nothing where no setting is inside the gate."""
    kind, rows = bench.kind, []
    if kind.blocks and not kind.step_caches:
        found = calibrate(kind, [bench.request(num_steps=num_steps) for _ in range(2)])
        kind.step_caches = {name: one.setting for name, one in found.caches.items() if one.setting is not None}
    for name, setting in kind.step_caches.items():
        plain, cached, hits, peak = [], [], [], PeakMemory()
        num_steps = max(num_steps, kind.step_cache_min_steps.get(name, 1))
        for _ in range(repeats):
            plain.append(await bench.timed(bench.ours, bench.request(num_steps=num_steps)))
            with peak.of("ours"):
                started_s = time.perf_counter()
                final = await bench.ours(bench.request(num_steps=num_steps, step_cache=name))
                cached.append(time.perf_counter() - started_s)
            hits.append(final.counters["cache_hits"] / final.counters["cache_lookups"])
        work = f"{setting}, {median(hits):.0%} hits, over no cache (ours), {num_steps} steps, median"
        rows.append(Row(work, 1 / median(cached), 1 / median(plain), "pictures/s", 1.5, True, peak.mib))
    return rows


async def preview_cost(bench: Bench) -> str:
    final = await bench.ours(bench.request(num_previews=3))
    counters = final.counters
    step_ms = counters["step_ms"] / counters["steps"]
    return f"a preview costs {counters['preview_ms'] / 3:.2f} ms, a step of this request {step_ms:.2f} ms"


@torch.inference_mode()
def sweep(bench: Bench, repeats: int = 3) -> tuple[StepTable, str]:
    """Least step time, ms, by size, branches and way; and the knee of each size by the sizer's own rule."""
    ways = ways_of(torch.get_num_threads())
    workers = StepWorkers(max(way.num_workers for way in ways))
    sizer, runner, multiple = BatchSizer(ways=ways), StepRunner(bench.kind, workers=workers), bench.kind.latent_px
    text = bench.kind.encode_text("two green circles", is_negative=False)
    lines = [
        "| size | latent tokens | ms a branch at 1, 2, 4, 8, 16 | workers x threads | batching pays up to |",
        "| --- |" + " --- |" * 4,
    ]
    for factor in (0.5, 1, 2, 4):
        size_px = max(1, round(bench.sizes_px[0] * factor) // multiple) * multiple
        request = bench.request(size_px, guidance_scale=1.0)
        for num_branches in (1, 2, 4, 8, 16):
            rows = [bench.kind.prepare(request, (text,)) for _ in range(num_branches)]
            tokens = bench.kind.branch_tokens(request)
            for way in [way for _ in range(repeats) for way in ways if way.num_workers <= num_branches]:
                started_s = time.perf_counter()
                runner.predict(rows, way)
                step_ms = (time.perf_counter() - started_s) * 1e3
                sizer.observe(str(size_px), num_branches, tokens, way, step_ms)
        times = sizer.table()[str(size_px)].ms
        each = ", ".join(f"{min(by_way.values()) / n:.2f}" for n, by_way in times.items())
        fastest = ", ".join(min(by_way, key=lambda way: by_way[way]) for by_way in times.values())
        lines.append(f"| {size_px} px | {tokens} | {each} | {fastest} | {sizer.knee(str(size_px))} branches |")
    workers.close()
    return sizer.table(), "\n".join(lines)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def as_table(rows: list[Row]) -> str:
    lines = ["| work | ours | stock | ratio | goal | met | peak MiB, ours / stock |", "| --- |" + " --- |" * 6]
    for row in rows:
        sign = ">=" if row.higher_is_better else "<="
        met = "yes" if row.is_met else "no"
        peaks = " / ".join(f"{row.peak_mib[name]:.0f}" for name in ("ours", "stock") if name in row.peak_mib)
        lines.append(
            f"| {row.work} | {row.ours:.3f} {row.unit} | {row.stock:.3f} {row.unit} | {row.ratio:.2f} "
            f"| {sign} {row.goal} | {met} | {peaks} |"
        )
    return "\n".join(lines)


async def run(folder: Path, seed: int, num_arrivals: int, is_random: bool) -> dict[str, Any]:
    kind = load_kind(folder, name=folder.name)
    load_calibration(folder, kind)
    engine = GenerateEngine(kind, GenerateConfig())
    await engine.start()
    side_px = kind.default_size_px()[0]
    bench = Bench(kind, engine, seed, (32, 48) if is_random else (side_px, side_px // 2))
    try:
        for serve in (bench.ours, bench.stock):  # warm both
            for size_px in bench.sizes_px:
                await serve(bench.request(size_px, num_steps=3))
        await bench.choose_stock_threads()
        rows = [await one_request(bench)]
        for work in (burst(bench), poisson(bench, rows[0].stock, num_arrivals), short_behind_long(bench)):
            print(as_table(rows[-1:]), flush=True)
            rows.append(await work)
        if cache := kind.default_step_cache:
            rows += [await burst(bench, cache), await poisson(bench, rows[0].stock, num_arrivals, cache)]
        print(as_table(rows[-1:]), flush=True)
        rows += await step_caches(bench)
        preview = await preview_cost(bench)
    finally:
        await engine.close()
    sweep_table, sweep_text = sweep(bench)
    is_distilled = ", one branch a row: guidance is distilled into it" if kind.is_distilled else ""
    threads = f"{torch.get_num_threads()} threads, stock on {bench.stock_threads}"
    print(f"\n{type(kind.pipeline).__name__}{is_distilled}, {threads}\n\n{as_table(rows)}")
    print(f"\n{preview}\n\n{sweep_text}")
    forms = [asdict(row) | {"ratio": row.ratio, "is_met": row.is_met} for row in rows]
    return {
        "rows": forms,
        "step_table": msgspec.to_builtins(engine.step_table(), str_keys=True),
        "sweep": msgspec.to_builtins(sweep_table, str_keys=True),
        "threads": torch.get_num_threads(),
        "stock_threads": bench.stock_threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a diffusers folder; a random one is made without it")
    parser.add_argument("--kind", choices=("unet", "sd3"), default="unet", help="of the random model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arrivals", type=int, default=120, help="of the Poisson row")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as root:
        folder = arguments.model or make_model(Path(root) / "random", arguments.kind)
        figures = asyncio.run(run(folder, arguments.seed, arguments.arrivals, is_random=arguments.model is None))
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

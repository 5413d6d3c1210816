"""The engine end to end on toy models: pictures, cancels, faults, previews, limits, one final event each."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from triptych.core.config import GenerateConfig
from triptych.core.errors import Conflict, DeadlineExceeded, InternalError, ModelFault, Overloaded
from triptych.core.events import FinishReason
from triptych.generate.engine import GenerateEngine
from triptych.generate.events import GenerateEvent, GenerateFinal, PreviewEvent, StepEvent
from triptych.generate.flight import preview_steps
from triptych.generate.kinds.base import Kind
from triptych.generate.request import GenerateRequest
from triptych.generate.schedule import sizer
from triptych.generate.stages import GenerateStage

from .conftest import Toys, request_of

CONFIG = GenerateConfig(warm_up=False)


@asynccontextmanager
async def engine_of(kind: Kind, config: GenerateConfig = CONFIG) -> AsyncIterator[GenerateEngine]:
    engine = GenerateEngine(kind, config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def events_of(engine: GenerateEngine, request: GenerateRequest) -> list[GenerateEvent]:
    return [event async for event in engine.submit(request)]


async def final_of(engine: GenerateEngine, request: GenerateRequest) -> GenerateFinal:
    final = (await events_of(engine, request))[-1]
    assert isinstance(final, GenerateFinal)
    return final


async def test_a_request_ends_in_one_picture(toys: Toys):
    """Steps in order, then one final event with the picture; the stages add up to the whole."""
    async with engine_of(toys.kind("stable_diffusion_3")) as engine:
        events = await events_of(engine, request_of(num_steps=5))

    final = events[-1]
    assert [event.step for event in events if isinstance(event, StepEvent)] == [1, 2, 3, 4, 5]
    assert (final.reason, final.frames.shape) == (FinishReason.STOP, (1, 32, 32, 3))
    assert sum(isinstance(event, GenerateFinal) for event in events) == 1
    assert set(final.stage_ms) == {stage.value for stage in GenerateStage}
    assert final.counters["step_ms"] <= final.stage_ms["denoise_ms"] + 1.0


async def test_a_picture_does_not_depend_on_its_neighbours(toys: Toys):
    """Sixteen mixed requests at once: each picture is the one it gets alone."""
    requests = [
        request_of(
            str(index),
            seed=index,
            num_steps=2 + index % 5,
            width_px=(32, 48)[index % 2],
            guidance_scale=(1.0, 4.0, 7.0)[index % 3],
        )
        for index in range(16)
    ]
    async with engine_of(toys.kind("stable_diffusion_3")) as engine:
        crowded = await asyncio.gather(*(final_of(engine, request) for request in requests))
        alone = [await final_of(engine, dataclasses.replace(request, request_id="alone")) for request in requests]
        stats = await engine.stats()

    assert max(final.counters["mean_batch_rows"] for final in crowded) > 1
    assert stats["generate_row_steps"] > stats["engine_steps"]
    for one, other in zip(crowded, alone, strict=True):
        assert np.abs(one.frames.astype(int) - other.frames).max() <= 1


async def test_a_cancelled_row_leaves_and_others_go_on(toys: Toys):
    """One of two is cancelled mid-run: it ends as cancelled within a step or two, the other gets its picture."""
    async with engine_of(toys.kind("stable_diffusion_3")) as engine:
        other = asyncio.create_task(final_of(engine, request_of("other", num_steps=30)))
        seen: list[GenerateEvent] = []
        async for event in engine.submit(request_of("victim", num_steps=150)):
            seen.append(event)
            if len(seen) == 3:
                engine.cancel("victim")

        assert seen[-1].reason == FinishReason.CANCELLED
        assert len(seen) < 100
        assert (await other).reason == FinishReason.STOP
        assert (await engine.stats())["generate_in_flight"] == 0


async def test_closing_the_stream_cancels(toys: Toys):
    """A consumer that goes away takes its row out of the batch."""
    async with engine_of(toys.kind("stable_diffusion_3")) as engine:
        stream = engine.submit(request_of("gone", num_steps=150))
        await anext(stream)
        await stream.aclose()
        for _ in range(400):
            if not (await engine.stats())["generate_in_flight"]:
                break
            await asyncio.sleep(0.01)

        stats = await engine.stats()
    assert (stats["generate_in_flight"], stats["generate_cancelled"]) == (0, 1)


class Faulty:
    """A kind whose denoiser, for one seed's prompt, answers NaN, raises, or whose VAE runs out of memory."""

    def __init__(self, kind: Kind, fault: str, step: int = 1) -> None:
        self._kind, self._fault, self._step = kind, fault, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def prepare(self, request: GenerateRequest, branches: Any) -> Any:
        row = self._kind.prepare(request, branches)
        if request.request_id == "victim":
            row.branches[0]["pooled_projections"] = torch.full_like(row.branches[0]["pooled_projections"], 1e30)
        return row

    def forward(self, latents: Any, timestep: Any, cond: dict[str, torch.Tensor], request: GenerateRequest) -> Any:
        hit = cond["pooled_projections"].amax(dim=1) >= 1e30
        if self._fault == "raise" and bool(hit.any()):
            raise RuntimeError("bad row")
        clean = {**cond, "pooled_projections": cond["pooled_projections"].where(~hit[:, None], torch.zeros(()))}
        out = self._kind.forward(latents, timestep, clean, request)
        return out.where(~hit[:, None, None, None], torch.tensor(float("nan")))


@pytest.mark.parametrize("fault", ["nan", "raise"])
async def test_a_faulty_row_fails_alone(toys: Toys, fault: str):
    """NaN or an exception of one row: that request gets ModelFault, its neighbours the pictures they get without it."""
    kind = toys.kind("stable_diffusion_3")
    async with engine_of(Faulty(kind, fault)) as engine:
        finals = await asyncio.gather(
            *(final_of(engine, request_of(name, seed=seed)) for seed, name in enumerate(("a", "victim", "b")))
        )
        alone = [await final_of(engine, request_of(f"{name}-alone", seed=seed)) for seed, name in ((0, "a"), (2, "b"))]

    assert isinstance(finals[1].error, ModelFault)
    for one, other in zip((finals[0], finals[2]), alone, strict=True):
        assert one.reason == FinishReason.STOP
        assert np.abs(one.frames.astype(int) - other.frames).max() <= 1


async def test_a_batch_out_of_memory_runs_apart_and_smaller(toys: Toys, monkeypatch: pytest.MonkeyPatch):
    """When a joint step runs out of memory, every row still gets its picture and later batches are smaller."""
    kind = toys.kind("stable_diffusion_3")
    sizes: list[int] = []
    real = kind.forward

    def forward(latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(latents))
        if len(latents) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(latents, *rest)

    async with engine_of(kind) as engine:
        monkeypatch.setattr(kind, "forward", forward)
        requests = [request_of(str(index), num_steps=6) for index in range(4)]
        finals = await asyncio.gather(*(final_of(engine, request) for request in requests))

    assert {final.reason for final in finals} == {FinishReason.STOP}
    assert sum(size > 2 for size in sizes) == 1


@pytest.mark.parametrize("num_failures", [1, 2])
async def test_out_of_memory_at_decode_is_tried_in_tiles(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, num_failures: int
):
    """The first failure is retried in tiles; a second one is a clear error, and the engine lives on."""
    kind = toys.kind("stable_diffusion_3")
    real, calls = kind.vae.decode, []

    def decode(*args: Any, **options: Any) -> Any:
        calls.append(kind.vae.use_tiling)
        if len(calls) <= num_failures:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
        return real(*args, **options)

    async with engine_of(kind) as engine:
        monkeypatch.setattr(kind.vae, "decode", decode)
        first = await final_of(engine, request_of("first"))
        second = await final_of(engine, request_of("second"))

    assert calls[:2] == [False, True]
    assert (FinishReason.STOP if num_failures == 1 else FinishReason.ERROR) == first.reason
    assert first.error is None or "out of memory while decoding" in first.error.message
    assert second.reason == FinishReason.STOP
    assert not kind.vae.use_tiling


async def test_full_engine_refuses(toys: Toys):
    """One more than `max_waiting` gets Overloaded with a time to come back, and those inside are not disturbed."""
    async with engine_of(toys.kind("stable_diffusion_3"), GenerateConfig(warm_up=False, max_waiting=2)) as engine:
        inside = [asyncio.create_task(final_of(engine, request_of(name, num_steps=20))) for name in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            engine.submit(request_of("c"))
        with pytest.raises(Conflict):
            engine.submit(request_of("a"))
        finals = await asyncio.gather(*inside)
        stats = await engine.stats()

    assert caught.value.retry_after_s > 0
    assert {FinishReason.STOP} == {final.reason for final in finals}
    assert stats["generate_refused_queue_full"] == 1


async def test_deadline_ends_a_request(toys: Toys):
    """A request past its deadline ends with DeadlineExceeded, not with a picture nobody waits for."""
    async with engine_of(toys.kind("stable_diffusion_3")) as engine:
        final = await final_of(engine, request_of(num_steps=150, deadline_s=1e-3, arrival_s=1e-3))

    assert isinstance(final.error, DeadlineExceeded)


async def test_a_step_loop_that_stops_ends_every_request(toys: Toys, monkeypatch: pytest.MonkeyPatch):
    """A mistake outside a row's own step: those who wait get an error, the next are refused, and the engine closes."""
    engine = GenerateEngine(toys.kind("pixart"), CONFIG)
    await engine.start()
    streams = [engine.submit(request_of(str(index), num_steps=30)) for index in range(3)]
    monkeypatch.setattr(engine._loop._scheduler, "plan", lambda: 1 / 0)
    finals = [[event async for event in stream][-1] for stream in streams]
    for final in finals:
        assert isinstance(final, GenerateFinal)
        assert "the step loop stopped" in final.error.message
    with pytest.raises(InternalError, match="has to be started again"):
        engine.submit(request_of("late"))
    assert (await engine.stats())["engine_up"] == 0
    await asyncio.wait_for(engine.close(), 20)


async def test_close_ends_what_is_open(toys: Toys):
    """Closing the engine gives every open request its one final event."""
    engine = GenerateEngine(toys.kind("stable_diffusion_3"), CONFIG)
    await engine.start()
    tasks = [asyncio.create_task(final_of(engine, request_of(str(i), num_steps=150))) for i in range(5)]
    await asyncio.sleep(0.05)
    await engine.close()

    assert {FinishReason.CANCELLED} == {final.reason for final in await asyncio.gather(*tasks)}
    with pytest.raises(Overloaded):
        engine.submit(request_of("late"))


@pytest.mark.parametrize(
    "name", ["stable_diffusion", "stable_diffusion_3", "flux", "pixart", "qwen_image", "wan", "ltx"]
)
async def test_previews_come_in_order_at_the_latent_size(toys: Toys, name: str):
    """Three previews are sent, evenly spread, each smaller than the picture and none after the final event."""
    size: dict[str, Any] = {"wan": dict(width_px=64, num_frames=5), "ltx": dict(width_px=64, num_frames=9)}.get(
        name, {}
    )
    kind = toys.kind(name)
    async with engine_of(kind) as engine:
        request = request_of(num_steps=8, num_previews=3, **size)
        events = await events_of(engine, request)

    previews = [event for event in events if isinstance(event, PreviewEvent)]
    assert [(event.index, event.step) for event in previews] == [(0, 2), (1, 4), (2, 6)]
    assert (request.height_px // kind.vae_px, request.width_px // kind.vae_px, 3) == previews[0].pixels.shape
    assert events[-1].counters["preview_ms"] > 0
    assert events[-1].counters["first_preview_ms"] > 0


@pytest.mark.parametrize(
    ("num_previews", "num_steps", "expected"),
    [(0, 8, set()), (3, 8, {2, 4, 6}), (3, 2, {1}), (1, 1, set()), (3, 4, {1, 2, 3})],
)
def test_preview_steps_are_spread_and_before_the_end(num_previews: int, num_steps: int, expected: set[int]):
    """Previews are evenly spread, at most one a step, never at the last."""
    assert expected == preview_steps(num_previews, num_steps)


async def test_warm_up_measures_the_knee(toys: Toys):
    """Start-up leaves measured step times for one branch and more, of the default size and of half its sides."""
    async with engine_of(toys.kind("pixart"), GenerateConfig(max_step_branches=8)) as engine:
        table = engine.step_table()

    assert {"64x64", "32x32"} == set(table)
    for size, branch_tokens in (("64x64", 256), ("32x32", 64)):
        assert table[size].branch_tokens == branch_tokens
        assert {1, 2} <= set(table[size].ms)


async def test_warm_up_tries_every_way_of_two_cores(toys: Toys, monkeypatch: pytest.MonkeyPatch):
    """With two cores, two branches are measured on one worker with both, on two workers, and on a single core: all of
    them where none was hopeless for one branch, which a busy machine may make any of them."""
    monkeypatch.setattr(sizer, "HOPELESS", math.inf)
    async with engine_of(toys.kind("pixart"), GenerateConfig(max_step_branches=2, num_threads=2)) as engine:
        torch.set_num_threads(1)  # the engine set it for the process
        table = engine.step_table()
        final = await final_of(engine, request_of())

    assert set(table["64x64"].ms[2]) == {"1x2", "2x1", "1x1"}
    assert set(table["64x64"].ms[1]) == {"1x2", "1x1"}
    assert final.reason is FinishReason.STOP

"""An engine behind the wire: the same pictures to the bit, the same refusals, and one final event whatever happens. The
far end is on a thread here; `test_process.py` has it in a process."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triptych.core.config import GenerateConfig
from triptych.core.errors import Conflict, InternalError, ModelFault, Overloaded, TriptychError, leaves
from triptych.core.events import FinishReason
from triptych.generate import wire
from triptych.generate.engine import GenerateEngine
from triptych.generate.events import GenerateEvent, GenerateFinal, PreviewEvent, StepEvent
from triptych.generate.kinds.base import Kind
from triptych.generate.remote import RemoteGenerateEngine, serve_engine
from triptych.generate.request import GenerateRequest
from triptych.generate.run import GenerateHandle, Run

from .conftest import Toys, request_of
from .test_engine import CONFIG, Faulty, engine_of

LONG = 2000  # steps: a second or more on a toy
NUM_RANDOM = 8


class Far:
    """The process's side on a thread; `served` is what `serve_engine` returned, None when it was killed."""

    def __init__(self, address: str, engine: GenerateEngine) -> None:
        self.engine = engine
        self.served: bool | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(address),))
        self._thread.start()

    async def _serve(self, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.create_task(serve_engine(address, self.engine))
        try:
            self.served = await self._serving
        except asyncio.CancelledError:
            await self.engine.close()

    def kill(self) -> None:
        """Nothing is said any more."""
        self._loop.call_soon_threadsafe(self._serving.cancel)

    async def ended(self) -> None:
        await asyncio.to_thread(self._thread.join, 20)
        assert not self._thread.is_alive()


@asynccontextmanager
async def linked(
    folder: Path, kind: Kind, config: GenerateConfig = CONFIG
) -> AsyncIterator[tuple[RemoteGenerateEngine, Far]]:
    address = f"ipc://{folder}/engine"
    near = RemoteGenerateEngine(address, max_waiting=config.max_waiting)
    far = Far(address, GenerateEngine(kind, config))
    try:
        await near.start()
        await near.begin()
        yield near, far
    finally:
        await near.close()
        await far.ended()


async def events_of(engine: GenerateHandle, request: GenerateRequest) -> list[GenerateEvent]:
    return [event async for event in engine.submit(request)]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


EDGE = np.pad(np.full((32, 16), 255, np.uint8), ((0, 0), (0, 16)))
PICTURE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "picture": ("stable_diffusion_3", dict(num_previews=3, num_steps=8, negative_prompt="a dog")),
    "edit": ("stable_diffusion_3", dict(init_image=PICTURE, strength=0.7, num_steps=6)),
    "edit under a mask": ("pixart", dict(init_image=PICTURE, mask=EDGE, num_steps=6)),
    "clip": ("ltx", dict(width_px=64, num_frames=9, num_previews=1)),
}


@pytest.mark.parametrize("case", REQUESTS)
async def test_a_picture_is_the_same_behind_the_wire(toys: Toys, tmp_path: Path, case: str):
    """Steps, previews in order and frames: equal to the bit to those of the engine itself."""
    name, changes = REQUESTS[case]
    request = request_of(**changes)
    async with engine_of(toys.kind(name)) as engine:
        here, traits = await events_of(engine, request), engine.traits
    async with linked(tmp_path, toys.kind(name)) as (near, far):
        there = await events_of(near, request)
        assert near.traits == traits
        assert (await near.stats())["generated_pictures"] == 1

    assert [type(event) for event in there] == [type(event) for event in here]
    for one, other in zip(there, here, strict=True):
        if isinstance(one, StepEvent):
            assert one == other
        elif isinstance(one, PreviewEvent):
            assert (one.index, one.step) == (other.index, other.step)
            assert np.array_equal(one.pixels, other.pixels)
    assert there[-1].reason is FinishReason.STOP
    assert np.array_equal(there[-1].frames, here[-1].frames)
    assert there[-1].stage_ms.keys() == here[-1].stage_ms.keys()
    assert there[-1].counters.keys() == here[-1].counters.keys()
    assert far.served is True


async def test_step_times_are_measured_when_it_is_told_to(toys: Toys, tmp_path: Path):
    """Loaded, it says what it can do and waits: others may be loading."""
    near = RemoteGenerateEngine(f"ipc://{tmp_path}/engine", max_waiting=1)
    far = Far(f"ipc://{tmp_path}/engine", GenerateEngine(toys.kind("pixart"), GenerateConfig(max_step_branches=2)))
    await near.start()
    assert near.traits.name == "pixart"
    assert not far.engine.step_table()
    await near.begin()
    assert far.engine.step_table()["64x64"].ms
    await near.close()
    await far.ended()


async def test_a_cancelled_row_leaves_and_others_go_on(toys: Toys, tmp_path: Path):
    """Cancelled by id, or by closing the stream: the row is free, the neighbour gets its picture."""
    async with linked(tmp_path, toys.kind("stable_diffusion_3")) as (near, far):
        other = asyncio.create_task(events_of(near, request_of("other", num_steps=30)))
        gone = near.submit(request_of("gone", num_steps=LONG))
        await anext(gone)
        await gone.aclose()
        seen: list[GenerateEvent] = []
        async for event in near.submit(request_of("victim", num_steps=LONG)):
            seen.append(event)
            if len(seen) == 3:
                near.cancel("victim")

        assert seen[-1].reason is FinishReason.CANCELLED
        assert len(seen) < LONG
        assert (await other)[-1].reason is FinishReason.STOP
        await until(lambda: not far.engine._flights)
        assert (await near.stats())["generate_cancelled"] == 2


async def test_a_full_engine_refuses_at_once(toys: Toys, tmp_path: Path):
    """As the engine itself does: Overloaded with a time to come back, Conflict for an open id, whole calls or none; a
    place is free again when its final event has come."""
    config = GenerateConfig(warm_up=False, max_waiting=2)
    async with linked(tmp_path, toys.kind("stable_diffusion_3"), config) as (near, _):
        inside = [near.submit(request_of(name, num_steps=20)) for name in ("a", "b")]
        with pytest.raises(Overloaded) as caught:
            near.submit(request_of("c"))
        with pytest.raises(Conflict):
            near.submit(request_of("a"))
        finals = [[event async for event in stream][-1] for stream in inside]
        with pytest.raises(Overloaded):
            Run(near, [request_of(name, num_steps=LONG) for name in ("d", "e", "f")])
        await until(lambda: not near._open)
        again = await events_of(near, request_of("a"))
        stats = await near.stats()

    assert caught.value.retry_after_s > 0
    assert [final.reason for final in (*finals, again[-1])] == [FinishReason.STOP] * 3
    assert stats["generate_refused_queue_full"] == 2
    assert stats["generate_in_flight"] == 0


async def test_errors_come_as_themselves(toys: Toys, tmp_path: Path):
    """A row that fails in the model is that leaf of the tree here too; an unknown question is an error of its own."""
    async with linked(tmp_path, Faulty(toys.kind("stable_diffusion_3"), "nan")) as (near, _):
        events = await events_of(near, request_of("victim"))
        with pytest.raises(InternalError, match="no question 'weather'"):
            await near._channel.ask("weather")

    assert type(events[-1].error) is ModelFault


async def test_a_lost_process_ends_every_request(toys: Toys, tmp_path: Path):
    """One final event that says so, also for whoever has not read yet; later requests and questions are refused."""
    async with linked(tmp_path, toys.kind("stable_diffusion_3")) as (near, far):
        streams = [near.submit(request_of(str(index), num_steps=LONG)) for index in range(3)]
        await anext(streams[0])
        far.kill()
        near.lost("the engine stopped")
        rests = [[event async for event in stream] for stream in streams]
        with pytest.raises(InternalError, match="the engine stopped"):
            near.submit(request_of("late"))
        with pytest.raises(InternalError, match="the engine stopped"):
            await near.stats()

    for rest in rests:
        assert [event.error.message for event in rest if isinstance(event, GenerateFinal)] == ["the engine stopped"]


async def test_a_step_loop_that_stops_ends_the_process(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A mistake of ours: those who wait hear of it, and the process ends, so that another one is started."""
    async with linked(tmp_path, toys.kind("stable_diffusion_3")) as (near, far):
        streams = [near.submit(request_of(str(index), num_steps=LONG)) for index in range(3)]
        await anext(streams[0])
        monkeypatch.setattr(far.engine._loop._scheduler, "plan", lambda: 1 / 0)
        finals = [[event async for event in stream][-1] for stream in streams]
        await far.ended()
        near.lost("the engine stopped")  # as its keeper does

    assert far.served is False
    assert {final.error.message for final in finals} == {"the step loop stopped: ZeroDivisionError"}


async def test_closing_ends_what_is_open(toys: Toys, tmp_path: Path):
    """Closing cancels, with the engine's own final events."""
    async with linked(tmp_path, toys.kind("stable_diffusion_3")) as (near, _):
        streams = [near.submit(request_of(str(index), num_steps=LONG)) for index in range(3)]
        await anext(streams[0])
    finals = [[event async for event in stream][-1] for stream in streams]

    assert [final.reason for final in finals] == [FinishReason.CANCELLED] * 3


@pytest.mark.parametrize("seed", range(4))
async def test_each_accepted_request_has_one_final_event(toys: Toys, tmp_path: Path, seed: int):
    """Random lengths, cancels, clients that leave, and now and then a lost process: never none, never two."""
    rng = random.Random(seed)
    finals: dict[str, list[GenerateFinal]] = {}

    async def follow(stream: AsyncIterator[GenerateEvent], name: str) -> None:
        finals[name] = [event async for event in stream if isinstance(event, GenerateFinal)]

    async with linked(tmp_path, toys.kind("stable_diffusion_3")) as (near, far):
        readers, leavers = [], []
        for index in range(NUM_RANDOM):
            stream = near.submit(request_of(str(index), seed=index, num_steps=rng.choice((1, 3, 20))))
            if rng.random() < 0.2:
                leavers.append(stream)
            else:
                readers.append(asyncio.create_task(follow(stream, str(index))))
            await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.3:
                near.cancel(str(rng.randrange(index + 1)))
        for stream in leavers:
            await anext(stream)
            await stream.aclose()
        if seed % 2:
            far.kill()
            near.lost("the engine stopped")
        await asyncio.wait_for(asyncio.gather(*readers), 30)
        await until(lambda: not near._open and not far.engine._flights)

    assert len(finals) == NUM_RANDOM - len(leavers)
    assert {len(found) for found in finals.values()} == {1}


def test_every_error_survives_the_wire():
    """Code, message, field and time to come back of each leaf of the tree."""
    for leaf in leaves():
        error = TriptychError.__new__(leaf)
        TriptychError.__init__(error, "words", param="size")
        if isinstance(error, Overloaded):
            error.retry_after_s = 7.5
        final = GenerateFinal("r", FinishReason.ERROR, error=error)
        back = wire.read_to_front(wire.pack(wire.Events([final]))).events[0].error

        assert type(back).code == leaf.code
        assert (back.message, back.param) == ("words", "size")
        assert getattr(back, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_a_picture_that_is_not_its_frames_is_refused():
    """A header that lies about its frames raises; nothing is read past the end."""
    header, picture, mask = wire.pack(wire.Submit(request_of(init_image=PICTURE, mask=EDGE)))
    back = wire.read_to_engine([header, picture, mask]).request

    assert np.array_equal(back.init_image, PICTURE)
    assert np.array_equal(back.mask, EDGE)
    with pytest.raises(InternalError, match="bytes for an array"):
        wire.read_to_engine([header, picture, mask[:-1]])
    with pytest.raises(InternalError, match="in frame 2 of 2"):
        wire.read_to_engine([header, picture])

"""The warm-up: every kind of media that a model takes goes the whole way, and nothing of it is left to be seen."""

import asyncio
from dataclasses import replace

import pytest

from triptych.core.config import EngineConfig, MediaConfig
from triptych.core.events import FinalEvent
from triptych.core.media import Modality
from triptych.models.registry import load_served_model
from triptych.prompt.builder import load_prompt_builder
from triptych.understand.engine import InProcessEngine
from triptych.warm_up import WarmUp

from .conftest import EXTRACTOR, tiny_audio, write_folder

FACTS = {
    "dtype": "float32", "device": "cpu", "runner": "eager", "runner_reason": "", "tower": "eager", "tower_reason": "",
}  # fmt: skip
CONFIG = EngineConfig(dtype="float32", kv_cache_bytes=4 * 2**20, block_size_tokens=16)


class Watched:
    """An engine that keeps the requests it was given, their ends, and its statistics before it forgot them."""

    def __init__(self, engine):
        self.engine = engine
        self.requests, self.finals, self.before = [], [], {}

    async def submit(self, request):
        self.requests.append(request)
        async for event in self.engine.submit(request):
            if isinstance(event, FinalEvent):
                self.finals.append(event)
            yield event

    async def forget(self):
        self.before = await self.engine.stats()
        await self.engine.forget()


async def warmed(folder):
    builder = load_prompt_builder(str(folder), dtype="float32")
    served = load_served_model(folder, "float32", "cpu")
    engine = InProcessEngine(served, CONFIG, load_tokenizer=lambda: builder.tokenizer)
    quiet = builder.stats()
    watched = Watched(engine)
    await engine.start()
    try:
        fresh = await engine.stats()
        warm_up = WarmUp("tiny", builder, MediaConfig())
        await warm_up(watched)
        await warm_up(watched)  # an engine that was started again is given the same
        after = await engine.stats()
    finally:
        await engine.close()
        builder.close()
    assert builder.stats() == quiet
    for stats in (fresh, after):
        del stats["device_memory_used_bytes"]  # the process has grown, whatever was forgotten
    return watched, fresh, after


async def test_pictures_and_clips_leave_no_trace(qwen_folder):
    """Text, a picture and a clip are answered; caches, counters and what is held are those of a fresh engine."""
    watched, fresh, after = await warmed(qwen_folder)

    kinds = {item.modality for request in watched.requests for item in request.items}
    assert kinds == {Modality.IMAGE, Modality.VIDEO}
    assert [final.num_output_tokens for final in watched.finals[:3]] == [3, 3, 3]
    assert watched.before["encoder_cache_entries"] == 2
    assert fresh == after


async def test_sounds_too(tmp_path):
    """A model that hears is warmed with a sound."""
    model, words = tiny_audio()
    folder = write_folder(tmp_path, model, words, preprocessor=EXTRACTOR)

    watched, fresh, after = await warmed(folder)

    assert {item.modality for request in watched.requests for item in request.items} == {Modality.AUDIO}
    assert watched.before["encoder_cache_misses"] == 1
    assert fresh == after


async def test_ready_waits_for_it(monkeypatch, qwen_folder):
    """The house is ready only when the engine has answered; until then the door says that the model is loading."""
    from triptych import launch
    from triptych.core.config import Config, ModelConfig
    from triptych.core.errors import Overloaded
    from triptych.models.registry import read_model_info

    answered = asyncio.Event()

    class Slow:
        def __init__(self, model, *, warm_up):
            self.warm_up = warm_up
            self.info = replace(read_model_info(model.path), extra=FACTS)

        async def start(self):
            await self.warm_up(self)

        async def submit(self, request):
            await answered.wait()
            yield FinalEvent(request.request_id, "stop")

        async def forget(self):
            pass

        async def flush(self, cache):
            return 0

        async def close(self):
            pass

    monkeypatch.setattr(launch, "EngineProcess", Slow)
    house = launch.House(Config(models=(ModelConfig(path=str(qwen_folder)),)))
    starting = asyncio.create_task(house.start())
    await asyncio.sleep(0.5)
    with pytest.raises(Overloaded, match="loading"):
        house.front.enter()
    answered.set()
    await starting
    assert house.front.ready
    await house.close()

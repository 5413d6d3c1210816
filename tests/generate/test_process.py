"""A server whose drawing engine is a process: pictures through it, and the process killed in the middle of them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.http.tiny_folder import make_tiny_text
from triptych import launch
from triptych.cluster.generate_process import GenerateProcess
from triptych.core.config import Config, EngineConfig, GenerateConfig, HttpConfig, ModelConfig, Tier
from triptych.generate.build import build_engine

from .conftest import Toys, request_of

SHORT = {"prompt": "two green circles", "size": "32x32", "num_inference_steps": 4, "guidance_scale": 5.0, "seed": 7}
LONG = SHORT | {"num_inference_steps": 5000}
FACTS = dict.fromkeys(("dtype", "device", "runner", "runner_reason", "tower", "tower_reason"), "-")
DRAWING = GenerateConfig(warm_up=False, num_threads=1, max_waiting=4)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def http(toys: Toys, temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    text = make_tiny_text(tmp_path_factory.mktemp("models") / "tiny-text")
    config = Config(
        models=(
            ModelConfig(path=str(text), engine=EngineConfig(num_threads=1, warm_up=False)),
            ModelConfig(path=str(toys.folder("stable_diffusion_3")), name="pictures", generate=DRAWING),
        ),
        http=HttpConfig(port=0, access_log=False),
        tiers={"default": Tier(max_steps=10_000)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        with launch.background_server(config) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client
    assert not child("engine_main")
    assert not child("generate_main")
    assert list(temporary.iterdir()) == []


def child(module: str) -> psutil.Process | None:
    children = psutil.Process().children()
    return next((found for found in children if f"triptych.cluster.{module}" in found.cmdline()), None)


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.05)


def in_flight(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("triptych_generate_in_flight")).split()[-1])


def pixels(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))))


def test_a_picture_is_that_of_the_engine_in_process(http: httpx.Client, toys: Toys):
    """The same model, request and number of threads give the same pixels, drawn there or here."""

    async def here() -> np.ndarray:
        engine = build_engine(toys.folder("stable_diffusion_3"), name="pictures", config=DRAWING)
        await engine.start()
        request = request_of(prompt=SHORT["prompt"], seed=SHORT["seed"])
        final = [event async for event in engine.submit(request)][-1]
        await engine.close()
        return final.frames[0]

    assert np.array_equal(pixels(http.post("/v1/images/generations", json=SHORT)), asyncio.run(here()))


def test_a_bad_request_is_refused_by_the_models_traits(http: httpx.Client):
    """What the model can do is known in the front."""
    answer = http.post("/v1/images/generations", json=SHORT | {"size": "33x32"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "size")
    assert "text-to-image" in http.get("/v1/models/pictures").json()["tasks"]


def test_it_steps_back_for_the_others(http: httpx.Client):
    """Its niceness is the configured one above the front's; the engine that answers has the front's."""
    front = psutil.Process().nice()

    assert child("generate_main").nice() == min(19, front + DRAWING.niceness)
    assert child("engine_main").nice() == front
    with pytest.raises(ValueError, match="niceness must be between 0 and 19, got 20"):
        GenerateConfig(niceness=20)


def test_a_client_that_leaves_frees_its_row_and_a_full_engine_refuses(http: httpx.Client):
    """Four streams fill the engine, a fifth is told to come again; hanging up empties it."""
    streams = [http.stream("POST", "/v1/images/generations", json=LONG | {"stream": True}) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda stream: stream.__enter__(), streams))
    assert {answer.status_code for answer in answers} == {200}
    refused = http.post("/v1/images/generations", json=SHORT)
    for stream in streams:
        stream.__exit__(None, None, None)
    wait_for(lambda: in_flight(http) == 0)

    assert refused.status_code in (429, 503)
    assert float(refused.headers["retry-after"]) > 0
    assert 'refused_queue_full_total{model="pictures"} 1.0' in http.get("/metrics").text


def test_a_killed_process_takes_its_pictures_with_it_and_nothing_else(http: httpx.Client):
    """Each open call ends with one error; text, /health and the front go on; then a new process draws as before."""
    before = pixels(http.post("/v1/images/generations", json=SHORT))
    killed, answering = child("generate_main"), child("engine_main")

    def stream(number: int) -> list[dict[str, Any]]:
        body = LONG | {"seed": number, "stream": True, "partial_images": 1}
        return events_of(http.post("/v1/images/generations", json=body))

    with ThreadPoolExecutor(4) as pool:
        open_streams = [pool.submit(stream, number) for number in range(2)]
        whole = pool.submit(http.post, "/v1/images/generations", json=LONG)
        message = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 300, "ignore_eos": True}
        wait_for(lambda: in_flight(http) == 3)
        text = pool.submit(http.post, "/v1/chat/completions", json=message)
        killed.kill()
        ended = [open_stream.result() for open_stream in open_streams]
        not_ready = http.get("/ready")
        turned_away = http.post("/v1/images/generations", json=SHORT)
        assert http.get("/health").status_code == 200
        assert text.result().json()["usage"]["completion_tokens"] == 300
        assert whole.result().json()["error"]["message"] == "the engine stopped"

    for events in ended:
        assert [event["error"]["message"] for event in events if "error" in event] == ["the engine stopped"]
        assert "error" in events[-1]
    assert "engine of pictures does not answer" in not_ready.text
    assert (turned_away.status_code, turned_away.json()["error"]["message"]) == (503, "the engine is starting again")
    assert int(turned_away.headers["retry-after"]) > 1  # as long as loading took the last time
    wait_for(lambda: http.get("/ready").status_code == 200, 120)
    assert np.array_equal(pixels(http.post("/v1/images/generations", json=SHORT)), before)
    metrics = http.get("/metrics").text
    assert 'triptych_engine_restarts_total{model="pictures"} 1.0' in metrics
    assert 'triptych_engine_restarts_total{model="tiny-text"} 0.0' in metrics
    assert child("engine_main") == answering


def test_stopping_while_it_loads_waits_for_nothing(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begun: list[asyncio.subprocess.Process] = []
    spawn = asyncio.create_subprocess_exec

    async def start_and_stop() -> None:
        spawned = asyncio.Event()

        async def spawning(*args: Any, **options: Any) -> asyncio.subprocess.Process:
            begun.append(await spawn(*args, **options))
            spawned.set()
            return begun[0]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", spawning)
        starting = asyncio.create_task(
            GenerateProcess(ModelConfig(path=str(toys.folder("stable_diffusion_3")))).start()
        )
        await spawned.wait()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

    asyncio.run(start_and_stop())

    assert [process.returncode for process in begun] == [-signal.SIGKILL]
    assert list(tmp_path.iterdir()) == []


async def test_models_load_side_by_side_and_are_measured_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, toys: Toys, tmp_path: Path
):
    """The one that draws starts at once, and has to wait before it measures until the one that answers is up."""
    told: list[str] = []
    answers, loads = asyncio.Event(), asyncio.Event()

    class Answering:
        info = SimpleNamespace(extra=FACTS)

        def __init__(self, model: ModelConfig, **options: Any) -> None: ...

        async def start(self) -> None:
            await answers.wait()
            told.append("answers")

        async def flush(self, cache: str) -> int:
            return 0

        async def close(self) -> None: ...

    class Drawing:
        def __init__(self, model: ModelConfig, *, quiet: Callable[[], Awaitable[object]]) -> None:
            self._quiet = quiet

        async def start(self) -> None:
            loads.set()
            await self._quiet()
            told.append("measures")

        async def close(self) -> None: ...

    monkeypatch.setattr(launch, "EngineProcess", Answering)
    monkeypatch.setattr(launch, "GenerateProcess", Drawing)
    text = ModelConfig(path=str(make_tiny_text(tmp_path / "text")), engine=EngineConfig(warm_up=False))
    house = launch.House(Config(models=(text, ModelConfig(path=str(toys.folder("stable_diffusion_3"))))))
    starting = asyncio.create_task(house.start())
    await asyncio.wait_for(loads.wait(), 20)
    await asyncio.sleep(0.05)
    assert (told, house.front.ready) == ([], False)
    answers.set()
    await starting
    await house.close()

    assert told == ["answers", "measures"]
    assert list(house.service.engines) == ["stable_diffusion_3"]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

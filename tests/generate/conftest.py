"""Toy diffusers folders, made once a session, and requests for them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn
from starlette.applications import Starlette

from triptych.core.clock import MonotonicClock
from triptych.core.config import Config, GenerateConfig, Tier
from triptych.generate.engine import GenerateEngine
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.load import load_kind
from triptych.generate.request import GenerateRequest
from triptych.generate.service import GenerateService
from triptych.http.app import build_app
from triptych.http.front import Front
from triptych.media.plane import MediaPlane
from triptych.testing.toy_diffusion import make_diffusion_folder


class Toys:
    """Folders and loaded kinds by name, made on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kinds: dict[str, Kind] = {}

    def folder(self, kind: str) -> Path:
        folder = self._root / kind
        return folder if folder.exists() else make_diffusion_folder(kind, folder)

    def kind(self, kind: str) -> Kind:
        if kind not in self._kinds:
            self._kinds[kind] = load_kind(self.folder(kind), name=kind)
        return self._kinds[kind]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Toys are so small that a second thread only adds barriers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


def request_of(request_id: str = "r", **changes: Any) -> GenerateRequest:
    form: dict[str, Any] = dict(
        request_id=request_id,
        prompt="two green circles above a red square",
        width_px=32,
        height_px=32,
        num_steps=4,
        guidance_scale=5.0,
        seed=7,
    )
    return GenerateRequest(**(form | changes))


@dataclass
class Door:
    """A server on loopback with a toy picture model and a toy clip model; `engine` is the picture model's."""

    url: str
    service: GenerateService
    engine: GenerateEngine
    client: openai.OpenAI

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def in_flight(self) -> int:
        return len(self.engine._flights)


@pytest.fixture(scope="session")
def door(toys: Toys, one_thread: None) -> Iterator[Door]:
    config = Config(tiers={"default": Tier(max_generated_pixels=128 * 128, max_images_per_request=4)})
    clock = MonotonicClock()
    media = MediaPlane(config.media, clock)
    options = GenerateConfig(warm_up=False, max_waiting=12)
    kinds = {"pictures": "stable_diffusion_3", "clips": "ltx"}
    engines = {name: GenerateEngine(toys.kind(kind), options) for name, kind in kinds.items()}
    service = GenerateService(engines, clock)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await media.start()
        for engine in engines.values():
            await engine.start()
        yield
        await service.close()
        for engine in engines.values():
            await engine.close()
        await media.close()

    app = build_app(Front(config, [], media, drawing=service, clock=clock), lifespan)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield Door(url, service, engines["pictures"], client)
    server.should_exit = True
    thread.join(20)
    listener.close()
    assert not thread.is_alive()

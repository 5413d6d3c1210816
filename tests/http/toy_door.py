"""A real uvicorn on loopback, with the toy model behind the door, and the stock `openai` client in front of it."""

import asyncio
import base64
import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import httpx
import openai
import uvicorn
from PIL import Image

from triptych.core.config import Config
from triptych.http.app import build_app
from triptych.http.front import Front
from triptych.http.seams import Served
from triptych.prompt import Detokenizer, ToolCallStream, ToolStyle
from triptych.testing.toy_engine import ToyEngine, ToyTokenizer, toy_embed, toy_token_bytes
from triptych.testing.toy_prompts import MAX_TOKENS, ToyMedia, ToyPrompts


async def _flush() -> int:
    return 3


def toy_served(engine: ToyEngine, name: str = "toy") -> Served:
    return Served(
        name=name,
        engine=engine,
        prompts=ToyPrompts(),
        max_tokens=MAX_TOKENS,
        text_stream=lambda stop: Detokenizer(ToyTokenizer(), stop),
        token_bytes=toy_token_bytes,
        tool_stream=lambda: ToolCallStream(ToolStyle.HERMES),
        modalities=("image",),
        embed=toy_embed,
        flushers={"processor": _flush},
    )


@dataclass
class Running:
    """A server under test."""

    url: str
    front: Front
    engine: ToyEngine
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    def client(self, key: str = "none") -> openai.OpenAI:
        if key not in self.clients:
            self.clients[key] = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)
        return self.clients[key]

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **options)


@contextmanager
def running_server(config: Config, engine: ToyEngine, **served: object) -> Iterator[Running]:
    front = Front(config, [replace(toy_served(engine), **served)], ToyMedia())
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(front), log_level="warning", access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    running = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", front, engine)
    try:
        yield running
    finally:
        for client in running.clients.values():
            client.close()
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def png_url(width_px: int = 8, height_px: int = 8, colour: str = "red") -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width_px, height_px), colour).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def picture_message(text: str, **more: object) -> dict[str, object]:
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": png_url()}, **more}, {"type": "text", "text": text}],
    }

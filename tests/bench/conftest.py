"""A toy server on loopback for the load client to talk to."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from bench.toy_server import toy_front

from triptych.http.app import build_app
from triptych.testing.toy_engine import ToyTimes


@contextmanager
def running_toy(times: ToyTimes) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(toy_front(times)), log_level="warning", access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def toy_url() -> Iterator[Callable[..., str]]:
    """Start a toy server with these times (seconds); all are stopped at the end."""
    with ExitStack() as stack:
        yield lambda **times: stack.enter_context(running_toy(ToyTimes(**times)))

"""What every engine process does around its engine: its `ModelConfig` is a JSON line on stdin, a failure to load one on
stdout. It ends when told to, or when stdin closes: the front is gone then."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from triptych.core.config import ModelConfig
from triptych.core.errors import TriptychError

T = TypeVar("T")


class LoadFailure(msgspec.Struct):
    """Why an engine did not come up."""

    code: str
    message: str


def run_child(load: Callable[[ModelConfig], T], serve: Callable[[T], int]) -> int:
    """`serve` what `load` gives. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the front says when to stop
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=ModelConfig)
    threading.Thread(target=end_with_the_front, daemon=True).start()
    try:
        loaded = load(config)
    except Exception as error:
        code = error.code if isinstance(error, TriptychError) else "internal_error"
        sys.stdout.buffer.write(msgspec.json.encode(LoadFailure(code, f"{error}" or type(error).__name__)) + b"\n")
        sys.stdout.flush()
        return 1
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads the pipe from now on: what is printed is log
    return serve(loaded)


def end_with_the_front() -> None:
    """Not through `sys.stdin`, whose lock, held by a thread that reads, aborts an interpreter that ends."""
    while os.read(0, 4096):
        pass
    os._exit(2)

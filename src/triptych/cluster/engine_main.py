"""An engine's own process: `python -m triptych.cluster.engine_main ADDRESS [FD]`, its `ModelConfig` a JSON line on
stdin, FD the shared memory that it inherits.

It ends when told to, or when stdin closes: the front is gone then. A failure while loading is one JSON line on stdout.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import transformers

from triptych.core.clock import MonotonicClock
from triptych.core.config import ModelConfig
from triptych.core.errors import InvalidRequest, TriptychError
from triptych.core.events import EngineEvent
from triptych.models.base import ServedModel
from triptych.models.cpu_threads import keep_freed_memory
from triptych.models.facts import load_with_facts
from triptych.models.registry import find_folder
from triptych.understand.build import build_core
from triptych.understand.core import EngineCore
from triptych.understand.grammar import GrammarCompiler
from triptych.understand.remote import serve_engine


class LoadFailure(msgspec.Struct):
    """Why an engine did not come up."""

    code: str
    message: str


def main(address: str, shared_fd: str | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the front says when to stop
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=ModelConfig)
    threading.Thread(target=end_with_the_front, daemon=True).start()
    keep_freed_memory()
    if config.engine.num_threads:
        torch.set_num_threads(config.engine.num_threads)
    try:
        served = load(config)
        build = core_builder(served, config)
    except Exception as error:
        code = error.code if isinstance(error, TriptychError) else "internal_error"
        sys.stdout.buffer.write(msgspec.json.encode(LoadFailure(code, f"{error}" or type(error).__name__)) + b"\n")
        sys.stdout.flush()
        return 1
    serve_engine(address, served.info, build, None if shared_fd is None else int(shared_fd))
    return 0


def load(config: ModelConfig) -> ServedModel:
    transformers.utils.logging.disable_progress_bar()  # a log is no terminal
    engine = config.engine
    return load_with_facts(config.path, dtype=engine.dtype, device=engine.device, runner=engine.runner)


def core_builder(served: ServedModel, config: ModelConfig) -> Callable[[Callable[[EngineEvent], None]], EngineCore]:
    def grammar() -> GrammarCompiler:
        tokenizer = load_tokenizer(config)
        # a tokenizer may know more tokens than the model's head; what the head lacks is cut from the mask
        num_tokens = max(served.info.vocab_size, len(tokenizer))
        try:
            return GrammarCompiler(tokenizer, num_tokens, served.info.eos_token_ids)
        except ValueError as error:
            raise InvalidRequest(f"no grammar can be held with this model's tokenizer: {error}") from error

    return lambda emit: build_core(served, config.engine, grammar=grammar, clock=MonotonicClock(), emit=emit)


def load_tokenizer(config: ModelConfig) -> Any:
    return find_folder(config.path).tokenizer


def end_with_the_front() -> None:
    """Not through `sys.stdin`, whose lock, held by a thread that reads, aborts an interpreter that ends."""
    while os.read(0, 4096):
        pass
    os._exit(2)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

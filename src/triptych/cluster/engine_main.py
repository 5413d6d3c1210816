"""The process of an engine that answers: `python -m triptych.cluster.engine_main ADDRESS [FD]`, FD the shared memory
that it inherits; see `child.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers

from triptych.cluster.child import run_child
from triptych.core.clock import MonotonicClock
from triptych.core.config import ModelConfig
from triptych.core.errors import InvalidRequest
from triptych.core.events import EngineEvent
from triptych.models.base import ModelInfo, ServedModel
from triptych.models.cpu_threads import keep_freed_memory
from triptych.models.facts import load_with_facts
from triptych.models.registry import find_folder
from triptych.understand.build import build_core
from triptych.understand.core import EngineCore
from triptych.understand.grammar import GrammarCompiler
from triptych.understand.remote import serve_engine

Build = Callable[[Callable[[EngineEvent], None]], EngineCore]


def main(address: str, shared_fd: str | None = None) -> int:
    def serve(prepared: tuple[ModelInfo, Build]) -> int:
        serve_engine(address, *prepared, None if shared_fd is None else int(shared_fd))
        return 0

    return run_child(prepare, serve)


def prepare(config: ModelConfig) -> tuple[ModelInfo, Build]:
    keep_freed_memory()
    if config.engine.num_threads:
        torch.set_num_threads(config.engine.num_threads)
    served = load(config)
    return served.info, core_builder(served, config)


def load(config: ModelConfig) -> ServedModel:
    transformers.utils.logging.disable_progress_bar()  # a log is no terminal
    engine = config.engine
    return load_with_facts(config.path, dtype=engine.dtype, device=engine.device, runner=engine.runner)


def core_builder(served: ServedModel, config: ModelConfig) -> Build:
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""An engine process on the toy model: `python -m triptych.testing.toy_engine_process ADDRESS CONFIG [FD]`. For
tests of the wire. With shared memory it ends when stdin closes, as the real one does."""

from __future__ import annotations

import sys
import threading

import msgspec

from triptych.cluster.child import end_with_the_front
from triptych.core.clock import MonotonicClock
from triptych.core.config import EngineConfig
from triptych.testing.toy_model import ToyModel
from triptych.understand.build import build_core
from triptych.understand.grammar import GrammarCompiler
from triptych.understand.remote import serve_engine


def main(address: str, config_json: str = "{}", shared_fd: str | None = None) -> None:
    if shared_fd is not None:
        threading.Thread(target=end_with_the_front, daemon=True).start()
    served = ToyModel()
    config = msgspec.json.decode(config_json, type=EngineConfig)

    def no_grammar() -> GrammarCompiler:
        raise NotImplementedError("the toy model has no tokenizer")

    serve_engine(
        address,
        served.info,
        lambda emit: build_core(served, config, grammar=no_grammar, clock=MonotonicClock(), emit=emit),
        None if shared_fd is None else int(shared_fd),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

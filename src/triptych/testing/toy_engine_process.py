"""An engine process on the toy model: `python -m triptych.testing.toy_engine_process ADDRESS`. For tests of the
wire."""

from __future__ import annotations

import sys

import msgspec

from triptych.core.clock import MonotonicClock
from triptych.core.config import EngineConfig
from triptych.testing.toy_model import ToyModel
from triptych.understand.build import build_core
from triptych.understand.grammar import GrammarCompiler
from triptych.understand.remote import serve_engine


def main(address: str, config_json: str = "{}") -> None:
    served = ToyModel()
    config = msgspec.json.decode(config_json, type=EngineConfig)

    def no_grammar() -> GrammarCompiler:
        raise NotImplementedError("the toy model has no tokenizer")

    serve_engine(
        address,
        served.info,
        lambda emit: build_core(served, config, grammar=no_grammar, clock=MonotonicClock(), emit=emit),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

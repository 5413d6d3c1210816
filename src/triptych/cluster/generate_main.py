"""The process of an engine that draws: `python -m triptych.cluster.generate_main ADDRESS`; see `child.py`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from triptych.cluster.child import run_child
from triptych.core.config import ModelConfig
from triptych.generate.build import build_engine
from triptych.generate.engine import GenerateEngine
from triptych.generate.remote import serve_engine


def main(address: str) -> int:
    return run_child(load, lambda engine: int(not asyncio.run(serve_engine(address, engine))))


def load(config: ModelConfig) -> GenerateEngine:
    os.nice(config.generate.niceness)  # before there are threads that compute: each has its own
    return build_engine(Path(config.path), name=config.name or "", config=config.generate)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

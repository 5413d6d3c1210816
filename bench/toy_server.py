"""The real door over the toy engine, in a process of its own: what HTTP, validation and streaming cost by themselves.

python -m bench.toy_server PORT
"""

from __future__ import annotations

import sys

import uvicorn
import uvloop

from triptych.core.config import Config, HttpConfig
from triptych.http.app import build_app
from triptych.http.front import Front
from triptych.http.seams import Served
from triptych.prompt import Detokenizer
from triptych.testing.toy_engine import ToyEngine, ToyTimes, ToyTokenizer, toy_token_bytes
from triptych.testing.toy_prompts import MAX_TOKENS, ToyMedia, ToyPrompts

MODEL_NAME = "toy"


def toy_front(times: ToyTimes | None = None) -> Front:
    served = Served(
        name=MODEL_NAME,
        engine=ToyEngine(times or ToyTimes()),
        prompts=ToyPrompts(),
        max_tokens=MAX_TOKENS,
        text_stream=lambda stop: Detokenizer(ToyTokenizer(), stop),
        token_bytes=toy_token_bytes,
        modalities=("image",),
    )
    return Front(Config(http=HttpConfig(access_log=False)), [served], ToyMedia())


def main(port: str) -> None:
    config = uvicorn.Config(build_app(toy_front()), host="127.0.0.1", port=int(port), log_config=None, access_log=False)
    uvloop.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main(*sys.argv[1:])

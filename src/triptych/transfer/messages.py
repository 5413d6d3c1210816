"""What every engine process understands, whatever it computes; `understand.wire` and `generate.wire` add their own."""

from __future__ import annotations

from typing import Any

import msgspec


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """`what` is one of the questions that the engine knows (stats); `argument` a cache's name, say."""

    ask_id: int
    what: str
    argument: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Cancel what runs, send the final events, exit."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    ask_id: int
    result: Any = None
    error_code: str | None = None
    error_message: str = ""


_encoder = msgspec.msgpack.Encoder()


def pack(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)

"""What crosses between the front and an engine that draws: msgpack headers, pictures as frames beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from triptych.core.errors import Overloaded, TriptychError, from_wire
from triptych.generate.events import GenerateEvent
from triptych.generate.request import GenerateRequest, ModelTraits
from triptych.transfer.frames import ArrayPacker, ArrayRef, ArrayUnpacker, Frame
from triptych.transfer.messages import Answer, Ask, Cancel


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: GenerateRequest


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded, and can do this. `start` is to be asked before the first request."""

    traits: ModelTraits


class Events(msgspec.Struct, frozen=True, tag="events"):
    events: list[GenerateEvent]


ToEngine = Submit | Cancel | Ask
ToFront = Events | Answer | Ready


class _WireError(msgspec.Struct, frozen=True, array_like=True):
    code: str
    message: str
    param: str | None
    retry_after_s: float


def pack(message: ToEngine | ToFront) -> list[Frame]:
    """The message's frames. Pictures are not copied: they may not change any more."""
    packer = ArrayPacker()

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return packer.array(value)
        if isinstance(value, TriptychError):
            retry_after_s = value.retry_after_s if isinstance(value, Overloaded) else 1.0
            return _WireError(value.code, value.message, value.param, retry_after_s)
        raise NotImplementedError(type(value).__name__)

    header = msgspec.msgpack.encode(message, enc_hook=plain)
    return [header, *packer.frames]


def read_to_engine(frames: Sequence[Frame]) -> ToEngine:
    message: ToEngine = _read(frames, ToEngine)
    return message


def read_to_front(frames: Sequence[Frame]) -> ToFront:
    message: ToFront = _read(frames, ToFront)
    return message


def _read(frames: Sequence[Frame], kind: Any) -> Any:
    unpacker = ArrayUnpacker(frames, copy=False)

    def build(kind: type, value: Any) -> Any:
        if kind is TriptychError:
            error = msgspec.convert(value, _WireError)
            return from_wire(error.code, error.message, error.param, error.retry_after_s)
        return unpacker.array(msgspec.convert(value, ArrayRef))

    return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=build)

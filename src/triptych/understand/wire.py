"""What crosses between the front and an engine process: msgpack headers, arrays beside them. Never pickle.

A message is a list of frames: the header first, then the arrays' bytes, which the header names by `ArrayRef`. A large
array is in shared memory instead, where there is room; it then has a slot, and no frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from triptych.core.errors import InternalError
from triptych.core.events import EmbeddingEvent, FinalEvent, TokenEvent
from triptych.core.media import Modality
from triptych.core.prepared import EncoderItem, PreparedRequest, Span
from triptych.core.sampling import SamplingParams
from triptych.transfer.shared_memory import DTYPES, Placed

MIN_SHARED_BYTES = 4 * 2**20  # below this, a frame costs no more than a slot and its release (bench/handover.py)

Place = Callable[[np.ndarray], Placed | None]
Open = Callable[[Placed, str, tuple[int, ...]], np.ndarray]


class ArrayRef(msgspec.Struct, frozen=True, array_like=True):
    """In frame `frame` of the message, or, where that is 0, in the slot `placed`."""

    frame: int
    dtype: str
    shape: tuple[int, ...]
    placed: Placed | None = None


class WireItem(msgspec.Struct, frozen=True):
    key: bytes
    modality: Modality
    num_embeds: int
    features: dict[str, ArrayRef] | None
    embeds: ArrayRef | None
    batch_key: str
    num_tokens_encoder: int
    cost_flops: float


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    spans: list[tuple[int, int, int, int]]
    items: list[WireItem]
    positions: ArrayRef | None
    position_offset: int
    whole_spans: bool
    cache_salt: bytes
    eos_token_ids: tuple[int, ...]
    arrival_s: float
    handoff_s: float
    deadline_s: float | None
    priority: int
    wants_embedding: bool


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """`what`: stats, flush or forget; `argument`: the cache's name for flush."""

    ask_id: int
    what: str
    argument: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Cancel what runs, send the final events, exit."""


class Events(msgspec.Struct, frozen=True, tag="events"):
    events: list[TokenEvent | EmbeddingEvent | FinalEvent]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    ask_id: int
    result: Any = None
    error_code: str | None = None
    error_message: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine has loaded its model. `info` are the fields of `ModelInfo` that the front needs."""

    info: dict[str, Any]


class Released(msgspec.Struct, frozen=True, tag="released"):
    """The engine reads these slots no longer."""

    slot_ids: list[int]


ToEngine = Submit | Cancel | Ask | Stop
ToFront = Events | Answer | Ready | Released

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


def _nowhere(array: np.ndarray) -> Placed | None:
    return None


def no_slots(placed: Placed, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    raise InternalError("an array in shared memory, which this process does not have")


def pack(message: ToEngine | ToFront) -> bytes:
    return _encoder.encode(message)


def read_to_engine(header: bytes) -> ToEngine:
    return _to_engine.decode(header)


def read_to_front(header: bytes) -> ToFront:
    return _to_front.decode(header)


def pack_request(request: PreparedRequest, place: Place = _nowhere) -> list[bytes | memoryview]:
    """Frames for one `Submit`; arrays are not copied, but for those that `place` takes into shared memory."""
    frames: list[bytes | memoryview] = []

    def refer(array: np.ndarray) -> ArrayRef:
        assert array.dtype.name in DTYPES, array.dtype
        placed = place(array)
        if placed is not None:
            return ArrayRef(0, array.dtype.name, array.shape, placed)
        frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return ArrayRef(len(frames), array.dtype.name, array.shape)

    items = [
        WireItem(
            item.key,
            item.modality,
            item.num_embeds,
            None if item.features is None else {name: refer(array) for name, array in item.features.items()},
            None if item.embeds is None else refer(item.embeds),
            item.batch_key,
            item.num_tokens_encoder,
            item.cost_flops,
        )
        for item in request.items
    ]
    header = Submit(
        request.request_id,
        request.token_ids,
        request.sampling,
        [(span.start, span.length, span.item_idx, span.embed_offset) for span in request.spans],
        items,
        None if request.positions is None else refer(request.positions),
        request.position_offset,
        request.whole_spans,
        request.cache_salt,
        request.eos_token_ids,
        request.arrival_s,
        request.handoff_s,
        request.deadline_s,
        request.priority,
        request.wants_embedding,
    )
    return [pack(header), *frames]


def unpack_request(message: Submit, frames: Sequence[Any], open_slot: Open = no_slots) -> PreparedRequest:
    """`frames` are the message's, header included. Raises InternalError for a header that lies about its frames or
    slots."""

    def array(ref: ArrayRef) -> np.ndarray:
        if ref.placed is not None:
            return open_slot(ref.placed, ref.dtype, ref.shape)
        if ref.dtype not in DTYPES or not 0 < ref.frame < len(frames):
            raise InternalError(f"array of dtype {ref.dtype} in frame {ref.frame} of {len(frames)}")
        dtype = np.dtype(ref.dtype)
        buffer = bytearray(frames[ref.frame])  # a copy of our own: writable, and the frame can go
        if len(buffer) != math.prod(ref.shape) * dtype.itemsize:
            raise InternalError(f"{len(buffer)} bytes for an array of {ref.dtype} {ref.shape}")
        return np.frombuffer(buffer, dtype).reshape(ref.shape)

    items = tuple(
        EncoderItem(
            item.key,
            item.modality,
            item.num_embeds,
            None if item.features is None else {name: array(ref) for name, ref in item.features.items()},
            None if item.embeds is None else array(item.embeds),
            item.batch_key,
            item.num_tokens_encoder,
            item.cost_flops,
        )
        for item in message.items
    )
    return PreparedRequest(
        message.request_id,
        message.token_ids,
        message.sampling,
        tuple(Span(*span) for span in message.spans),
        items,
        None if message.positions is None else array(message.positions),
        message.position_offset,
        message.whole_spans,
        message.cache_salt,
        message.eos_token_ids,
        message.arrival_s,
        message.handoff_s,
        message.deadline_s,
        message.priority,
        message.wants_embedding,
    )

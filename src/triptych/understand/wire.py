"""What crosses between the front and an engine process: msgpack headers, arrays beside them. Never pickle.

A message is a list of frames: the header first, then the arrays' bytes, which the header names by `ArrayRef`. A large
array is in shared memory instead, where there is room; it then has a slot, and no frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from triptych.core.errors import InternalError
from triptych.core.events import EmbeddingEvent, EmbeddingsDropped, FeaturesWanted, FinalEvent, TokenEvent
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
    is_withheld: bool


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


class Supply(msgspec.Struct, frozen=True, tag="supply"):
    """What `FeaturesWanted` asked for: items by their index in the request."""

    request_id: str
    items: dict[int, WireItem]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """`what`: stats, flush or forget; `argument`: the cache's name for flush."""

    ask_id: int
    what: str
    argument: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Cancel what runs, send the final events, exit."""


class Events(msgspec.Struct, frozen=True, tag="events"):
    events: list[TokenEvent | EmbeddingEvent | FinalEvent | FeaturesWanted | EmbeddingsDropped]


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


ToEngine = Submit | Supply | Cancel | Ask | Stop
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


class _Packer:
    """Gathers the frames of one message. Arrays are not copied, but for those that `place` takes."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.frames: list[bytes | memoryview] = []

    def array(self, array: np.ndarray) -> ArrayRef:
        assert array.dtype.name in DTYPES, array.dtype
        placed = self._place(array)
        if placed is not None:
            return ArrayRef(0, array.dtype.name, array.shape, placed)
        self.frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return ArrayRef(len(self.frames), array.dtype.name, array.shape)

    def item(self, item: EncoderItem) -> WireItem:
        return WireItem(
            item.key,
            item.modality,
            item.num_embeds,
            None if item.features is None else {name: self.array(array) for name, array in item.features.items()},
            None if item.embeds is None else self.array(item.embeds),
            item.batch_key,
            item.num_tokens_encoder,
            item.cost_flops,
            item.is_withheld,
        )


class _Unpacker:
    """Reads what `_Packer` gathered. Raises InternalError for a header that lies about its frames or slots."""

    def __init__(self, frames: Sequence[Any], open_slot: Open) -> None:
        self._frames = frames
        self._open_slot = open_slot

    def array(self, ref: ArrayRef) -> np.ndarray:
        if ref.placed is not None:
            return self._open_slot(ref.placed, ref.dtype, ref.shape)
        if ref.dtype not in DTYPES or not 0 < ref.frame < len(self._frames):
            raise InternalError(f"array of dtype {ref.dtype} in frame {ref.frame} of {len(self._frames)}")
        dtype = np.dtype(ref.dtype)
        buffer = bytearray(self._frames[ref.frame])  # a copy of our own: writable, and the frame can go
        if len(buffer) != math.prod(ref.shape) * dtype.itemsize:
            raise InternalError(f"{len(buffer)} bytes for an array of {ref.dtype} {ref.shape}")
        return np.frombuffer(buffer, dtype).reshape(ref.shape)

    def item(self, item: WireItem) -> EncoderItem:
        return EncoderItem(
            item.key,
            item.modality,
            item.num_embeds,
            None if item.features is None else {name: self.array(ref) for name, ref in item.features.items()},
            None if item.embeds is None else self.array(item.embeds),
            item.batch_key,
            item.num_tokens_encoder,
            item.cost_flops,
            item.is_withheld,
        )


def pack_request(request: PreparedRequest, place: Place = _nowhere) -> list[bytes | memoryview]:
    """Frames for one `Submit`; arrays are not copied, but for those that `place` takes into shared memory."""
    packer = _Packer(place)
    header = Submit(
        request.request_id,
        request.token_ids,
        request.sampling,
        [(span.start, span.length, span.item_idx, span.embed_offset) for span in request.spans],
        [packer.item(item) for item in request.items],
        None if request.positions is None else packer.array(request.positions),
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
    return [pack(header), *packer.frames]


def unpack_request(message: Submit, frames: Sequence[Any], open_slot: Open = no_slots) -> PreparedRequest:
    """`frames` are the message's, header included. Raises InternalError for a header that lies about its frames or
    slots."""
    unpacker = _Unpacker(frames, open_slot)
    return PreparedRequest(
        message.request_id,
        message.token_ids,
        message.sampling,
        tuple(Span(*span) for span in message.spans),
        tuple(unpacker.item(item) for item in message.items),
        None if message.positions is None else unpacker.array(message.positions),
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


def pack_supply(request_id: str, items: Mapping[int, EncoderItem], place: Place = _nowhere) -> list[bytes | memoryview]:
    """Frames for one `Supply`, as in `pack_request`."""
    packer = _Packer(place)
    header = Supply(request_id, {index: packer.item(item) for index, item in items.items()})
    return [pack(header), *packer.frames]


def unpack_supply(message: Supply, frames: Sequence[Any], open_slot: Open = no_slots) -> dict[int, EncoderItem]:
    """As `unpack_request`."""
    unpacker = _Unpacker(frames, open_slot)
    return {index: unpacker.item(item) for index, item in message.items.items()}

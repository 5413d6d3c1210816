"""What crosses between the front and an engine that answers: msgpack headers, arrays beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triptych.core.events import EmbeddingEvent, EmbeddingsDropped, FeaturesWanted, FinalEvent, TokenEvent
from triptych.core.media import Modality
from triptych.core.prepared import EncoderItem, PreparedRequest, Span
from triptych.core.sampling import SamplingParams
from triptych.transfer.frames import ArrayPacker, ArrayRef, ArrayUnpacker, Frame, Open, Place, no_slots, nowhere
from triptych.transfer.messages import Answer, Ask, Cancel, Stop, pack

MIN_SHARED_BYTES = 4 * 2**20  # below this, a frame costs no more than a slot and its release (bench/handover.py)


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


class Supply(msgspec.Struct, frozen=True, tag="supply"):
    """What `FeaturesWanted` asked for: items by their index in the request."""

    request_id: str
    items: dict[int, WireItem]


class Events(msgspec.Struct, frozen=True, tag="events"):
    events: list[TokenEvent | EmbeddingEvent | FinalEvent | FeaturesWanted | EmbeddingsDropped]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine has loaded its model. `info` are the fields of `ModelInfo` that the front needs."""

    info: dict[str, Any]


class Released(msgspec.Struct, frozen=True, tag="released"):
    """The engine reads these slots no longer."""

    slot_ids: list[int]


ToEngine = Submit | Supply | Cancel | Ask | Stop
ToFront = Events | Answer | Ready | Released

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


def read_to_engine(header: Frame) -> ToEngine:
    return _to_engine.decode(header)


def read_to_front(header: Frame) -> ToFront:
    return _to_front.decode(header)


class _Packer(ArrayPacker):
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


class _Unpacker(ArrayUnpacker):
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


def pack_request(request: PreparedRequest, place: Place = nowhere) -> list[Frame]:
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


def pack_supply(request_id: str, items: Mapping[int, EncoderItem], place: Place = nowhere) -> list[Frame]:
    """Frames for one `Supply`, as in `pack_request`."""
    packer = _Packer(place)
    header = Supply(request_id, {index: packer.item(item) for index, item in items.items()})
    return [pack(header), *packer.frames]


def unpack_supply(message: Supply, frames: Sequence[Any], open_slot: Open = no_slots) -> dict[int, EncoderItem]:
    """As `unpack_request`."""
    unpacker = _Unpacker(frames, open_slot)
    return {index: unpacker.item(item) for index, item in message.items.items()}

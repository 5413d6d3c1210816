"""A request made ready for the engine: tokens, where the embeddings go, what must be encoded.

Made by `prompt/` in the front process, read by `understand/` in the engine. Numpy only: it crosses a process boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from triptych.core.media import Modality
from triptych.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class EncoderItem:
    """One thing the encoder sees whole: a picture with its tiles, a clip, a stretch of sound.

    `key` is the embedding's full identity (U8): content, decode and processor parameters, model and encoder revision,
    dtype, tenant. `features` are the processor's outputs, or None when they are precomputed embeddings
    (`embeds` [num_embeds, D] float32). Both are None where `is_withheld`: the engine is believed to hold the
    embeddings, and asks for the features if it does not. Items of one `batch_key` may be encoded in one call.
    `cost_flops` is an estimate, for ordering and budgets; `num_tokens_encoder` counts the encoder's own tokens
    (patches).
    """

    key: bytes
    modality: Modality
    num_embeds: int
    features: dict[str, np.ndarray] | None
    embeds: npt.NDArray[np.float32] | None = None
    batch_key: str = ""
    num_tokens_encoder: int = 0
    cost_flops: float = 0.0
    is_withheld: bool = False

    @property
    def num_bytes(self) -> int:
        """Host bytes of the arrays."""
        arrays = (*(self.features or {}).values(), self.embeds)
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt positions [start, start + length) take the rows [embed_offset, embed_offset + length) of item `item_idx`.

    One item may have several spans (tiles with separators between). Spans are in prompt order and do not overlap.
    """

    start: int
    length: int
    item_idx: int
    embed_offset: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """`positions` [A, T] int32 for models with A rotary axes, or None for 0..T-1; a generated token at index i has
    position i + position_offset on every axis. `whole_spans`: the language model attends both ways inside a span, so a
    chunk must not split one (U6). `cache_salt` separates tenants in the prefix cache."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    spans: tuple[Span, ...] = ()
    items: tuple[EncoderItem, ...] = ()
    positions: npt.NDArray[np.int32] | None = None
    position_offset: int = 0
    whole_spans: bool = False
    cache_salt: bytes = b""
    eos_token_ids: tuple[int, ...] = ()
    arrival_s: float = 0.0
    handoff_s: float = 0.0  # the last edge of the front's stage clock; the engine's goes on from here
    deadline_s: float | None = None
    priority: int = 0
    wants_embedding: bool = False  # no generation: the last hidden state, of length one, as an EmbeddingEvent
    media_extra: dict[str, str] = field(default_factory=dict)

    @property
    def num_media_bytes(self) -> int:
        """Host bytes of the processor's outputs that this request carries."""
        return sum(item.num_bytes for item in self.items)

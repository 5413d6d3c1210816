"""What a family of models must say: `Layout` for the front process (numpy), `ServedModel` for the engine (torch).

Only these two protocols are known outside `models/`. A family file implements both; `registry.py` finds it by the
`architectures` of the folder's config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from triptych.core.media import Decoded, DecodeSpec, MediaHeader, Modality
from triptych.core.prepared import EncoderItem, Span

if TYPE_CHECKING:
    import torch

    from triptych.models.paged_attention import PagedBatch


@dataclass(frozen=True, slots=True)
class ItemSize:
    """Known from the header alone. `num_embeds`: rows scattered into the prompt. `num_tokens_encoder`: patches or mel
    frames the encoder attends over. `grid`: family-specific sizes (Qwen: (t, h, w) patches; tiles: (rows, cols)).
    `times_s`: video only, one a temporal step of the grid, for families that write or rotate by time."""

    num_embeds: int
    num_tokens_encoder: int
    grid: tuple[int, ...] = ()
    cost_flops: float = 0.0
    times_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessedItem:
    """The processor's output for one item: what the processor cache holds."""

    size: ItemSize
    features: dict[str, npt.NDArray[Any]]
    batch_key: str

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.features.values())


@dataclass(frozen=True, slots=True)
class Expanded:
    """A prompt with its placeholders laid: what `Layout.expand` returns."""

    token_ids: list[int]
    spans: tuple[Span, ...]
    positions: npt.NDArray[np.int32] | None = None  # [A, T]
    position_offset: int = 0
    whole_spans: bool = False


class Layout(Protocol):
    """How media become placeholders. Pure numpy; one per loaded model; thread-safe."""

    modalities: frozenset[Modality]
    processor_key: bytes  # identity of processor class and parameters: part of every cache key

    placeholders: dict[Modality, str]  # the token that a rendered template holds for one item
    surroundings: dict[Modality, str]  # what a placeholder becomes before tokenising, where text around it is added
    adds_bos: bool  # a rendered template without the tokenizer's first token gets it
    tokenizer: Any  # of the folder, with its chat template

    def placeholder_text(self, modality: Modality) -> str:
        """What stands for an item in the text of a template that knows strings only."""
        ...

    def request_options(self, modalities: Sequence[Modality]) -> dict[str, Any]:
        """Options that follow from what else the request holds; an item's own options go before them."""
        ...

    def sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        """Of embeddings that the caller computed. Raises EmbeddingsRefused where no item here has that size."""
        ...

    def decode_spec(self, header: MediaHeader, options: dict[str, Any]) -> DecodeSpec: ...

    def size(self, header: MediaHeader, options: dict[str, Any]) -> ItemSize:
        """From the header alone; equal to what `process` yields. Raises UnsupportedMedia, InvalidMedia."""
        ...

    def process(self, decoded: Decoded, options: dict[str, Any]) -> ProcessedItem: ...

    def expand(self, token_ids: list[int], sizes: Sequence[tuple[Modality, ItemSize]]) -> Expanded:
        """Replace each placeholder of the rendered template, in order, by its item's run of tokens."""
        ...


@dataclass(frozen=True, slots=True)
class KvSpec:
    """One attention layer's KV: `window_tokens` None is full attention."""

    num_kv_heads: int
    head_dim: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """`embed_width`: columns of one encoder embedding (hidden size, times 1 + deepstack levels where a family has
    them)."""

    architecture: str
    revision: bytes  # hash of config and weights' headers: part of every cache key
    hidden_size: int
    embed_width: int
    vocab_size: int
    max_tokens: int
    kv: tuple[KvSpec, ...]  # one a layer
    eos_token_ids: tuple[int, ...] = ()
    num_params: int = 0
    extra: dict[str, str] = field(default_factory=dict)  # once loaded: what `models.facts` says of it


class ServedModel(Protocol):
    """A loaded model on a device. Called from the engine's one thread, under inference mode."""

    info: ModelInfo
    device: torch.device
    dtype: torch.dtype

    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        """Items of one `batch_key`, in one call. Each result: [num_embeds, embed_width] dtype device."""
        ...

    def encoder_layers(self) -> list[torch.nn.Module]:
        """The tower's layers in order: the edges at which an encode may pause."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, D]."""
        ...

    def forward(
        self,
        embeds: torch.Tensor,  # [T, D] packed batch
        positions: torch.Tensor,  # [A, T] int64
        batch: PagedBatch,
        media_rows: torch.Tensor | None = None,  # [M] int64: rows of `embeds` that hold media
        media_embeds: torch.Tensor | None = None,  # [M, embed_width]: for deepstack levels
    ) -> torch.Tensor:
        """Last hidden state [T, D] of the packed batch; keys and values go to the batch's paged cache."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, V] float32 (soft-capped where the model does that)."""
        ...

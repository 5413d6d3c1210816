"""Embeddings that came with the request, checked and made an item of the prompt (U9)."""

from __future__ import annotations

from triptych.core.errors import EmbeddingsRefused
from triptych.core.prepared import EncoderItem
from triptych.models.base import ItemSize, Layout, ModelInfo
from triptych.prompt.parts import EmbedsPart


def read_part(
    part: EmbedsPart, layout: Layout, info: ModelInfo, dtype: str, tenant: str
) -> tuple[EncoderItem, ItemSize]:
    """Raises EmbeddingsRefused."""
    raise EmbeddingsRefused("precomputed embeddings are not taken here", param=part.param)

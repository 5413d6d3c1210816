"""Embeddings that came with the request, checked and made an item of the prompt (U9)."""

from __future__ import annotations

from triptych.core.config import Tier
from triptych.core.errors import EmbeddingsRefused
from triptych.core.prepared import EncoderItem
from triptych.media.embeds import read_embeds
from triptych.models.base import ItemSize, Layout, ModelInfo
from triptych.prompt.identity import precomputed_key
from triptych.prompt.parts import EmbedsPart


def read_part(
    part: EmbedsPart, layout: Layout, info: ModelInfo, dtype: str, tenant: str, tier: Tier
) -> tuple[EncoderItem, ItemSize]:
    """Shape, kind, revision, values and count are checked here: what is returned fits the model's embedding space.

    Raises EmbeddingsRefused, BudgetExceeded (`max_item_bytes`).
    """
    embeds = read_embeds(
        part.data,
        embed_width=info.embed_width,
        revision=info.revision,
        max_embeds=tier.max_request_visual_tokens,
        max_bytes=tier.max_item_bytes,
        param=part.param,
    )
    try:
        size = layout.sent_size(part.modality, embeds.num_embeds, embeds.grid)
    except EmbeddingsRefused as error:
        error.param = error.param or part.param
        raise
    item = EncoderItem(
        key=precomputed_key(embeds.digest, info.revision, dtype, tenant),
        modality=part.modality,
        num_embeds=embeds.num_embeds,
        features=None,
        embeds=embeds.values,
        num_tokens_encoder=0,
    )
    return item, size

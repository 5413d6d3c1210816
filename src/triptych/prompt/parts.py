"""What a message's content may hold besides text and `core.media.MediaRef`, and what counting a prompt yields."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.core.media import Modality


@dataclass(frozen=True, slots=True)
class EmbedsPart:
    """Precomputed embeddings as the caller sent them, unchecked. `param` names the request field, for errors."""

    data: bytes
    modality: Modality = Modality.IMAGE
    media_id: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class TokenCount:
    """`token_ids` is the whole prompt as it would be served, media runs included; `media_tokens` counts by modality."""

    token_ids: list[int]
    media_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

"""One record a request, from admission to its final event. Everything the scheduler knows of a request is here."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.core.prepared import EncoderItem, PreparedRequest, Span
from triptych.core.stages import StageClock


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are prompt and output together; `num_computed` of them have their keys and values in the cache.

    `held` are the items whose embeddings this sequence references in the encoder cache. Preemption resets
    `num_computed`, `block_table` and `held`, and nothing else.
    """

    request: PreparedRequest
    clock: StageClock
    tokens: list[int]
    item_ends: tuple[int, ...]  # for each item, the prompt position after its last span
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    held: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)  # withheld items whose features are on their way
    is_encoding: bool = False
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    encoder_hits: int = 0
    encoder_misses: int = 0

    @classmethod
    def of(cls, request: PreparedRequest, clock: StageClock) -> Sequence:
        ends = [0] * len(request.items)
        for span in request.spans:
            ends[span.item_idx] = max(ends[span.item_idx], span.end)
        return cls(request, clock, list(request.token_ids), tuple(ends))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """One token to go, and it is an output token: a decode row."""
        return self.num_uncomputed == 1 and self.num_output_tokens > 0

    def pending_spans(self) -> list[Span]:
        """Spans not yet wholly computed, in prompt order."""
        return [span for span in self.request.spans if span.end > self.num_computed]

    def item(self, item_idx: int) -> EncoderItem:
        return self.request.items[item_idx]

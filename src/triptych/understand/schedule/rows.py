"""Phase 3: which tokens the language model computes in this step. Decode rows first, then prefill windows.

A window ends before the first item whose embeddings are not there (the window is cut, the item is not), and never
inside a span that must be seen whole (U6).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triptych.understand.encoder_cache import EncoderCache
from triptych.understand.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """`num_new` tokens of `seq`, from `seq.num_computed` on."""

    seq: Sequence
    num_new: int


def prefill_rows(
    running: Iterable[Sequence], cache: EncoderCache, *, budget_tokens: int, soft_cap_tokens: int
) -> list[Row]:
    """Windows in order of arrival. `soft_cap_tokens` bounds the step for the sake of running decodes: it cuts a window,
    but a whole span may exceed it."""
    rows: list[Row] = []
    for seq in running:
        if seq.is_decoding or budget_tokens <= 0:
            continue
        end = window_end(seq, cache, min(budget_tokens, max(1, soft_cap_tokens)), budget_tokens)
        num_new = end - seq.num_computed
        if num_new > 0:
            rows.append(Row(seq, num_new))
            budget_tokens -= num_new
            soft_cap_tokens -= num_new
            if soft_cap_tokens <= 0:
                break
    return rows


def window_end(seq: Sequence, cache: EncoderCache, wish_tokens: int, hard_tokens: int) -> int:
    """Where the window that starts at `seq.num_computed` ends: at most `wish_tokens` further, or at most `hard_tokens`
    where only that lets a whole span through. Equal to the start if nothing can be computed now."""
    start = seq.num_computed
    end = min(len(seq.tokens), start + wish_tokens)
    for span in seq.pending_spans():
        if span.start >= end:
            break
        if span.item_idx not in seq.held or not cache.is_ready(seq.item(span.item_idx).key):
            return max(start, span.start)
        if seq.request.whole_spans and end < span.end:
            if span.start > start:
                return span.start
            return span.end if span.end - start <= hard_tokens else start
    return end

"""Phase 1: who may come in. What can never run is refused here, with the limit's name; it is never left to hang."""

from __future__ import annotations

from triptych.core.errors import BudgetExceeded, EmbeddingsRefused, InternalError, InvalidRequest, PromptRefused
from triptych.core.prepared import EncoderItem, PreparedRequest
from triptych.understand.block_hash import extend_hashes
from triptych.understand.blocks import BlockPool
from triptych.understand.encoder_cache import EncoderCache
from triptych.understand.schedule.limits import SchedulerLimits
from triptych.understand.sequence import Sequence


def check_admissible(request: PreparedRequest, limits: SchedulerLimits, pool: BlockPool, cache: EncoderCache) -> None:
    """Raises what the caller should see if `request` could never finish here."""
    _check_prompt(request, limits, pool)
    _check_spans(request, limits)
    for item in request.items:
        check_item(item, limits, cache)


def max_total_tokens(limits: SchedulerLimits, pool: BlockPool) -> int:
    """Prompt and output together can never be longer than this."""
    return min(limits.max_model_tokens, pool.num_blocks * pool.block_size_tokens)


def _check_prompt(request: PreparedRequest, limits: SchedulerLimits, pool: BlockPool) -> None:
    num_tokens = len(request.token_ids)
    if not num_tokens:
        raise PromptRefused("the prompt has no tokens", param="messages")
    if num_tokens >= max_total_tokens(limits, pool):
        raise BudgetExceeded(
            "max_model_tokens", allowed=max_total_tokens(limits, pool), requested=num_tokens + 1, param="messages"
        )
    worst = max(request.token_ids)
    if min(request.token_ids) < 0 or worst >= limits.vocab_size:
        raise PromptRefused(f"token ids must lie in 0..{limits.vocab_size - 1}, got {worst}", param="prompt")
    named = max((*request.sampling.stop_token_ids, *request.sampling.logit_bias), default=0)
    if named >= limits.vocab_size:
        raise InvalidRequest(f"token ids must lie in 0..{limits.vocab_size - 1}, got {named}", param="logit_bias")
    if request.positions is not None and request.positions.shape[1:] != (num_tokens,):
        raise InternalError(f"positions of shape {request.positions.shape} for {num_tokens} tokens")


def _check_spans(request: PreparedRequest, limits: SchedulerLimits) -> None:
    rows = [0] * len(request.items)
    previous_end = 0
    for span in request.spans:
        if span.length < 1 or span.start < previous_end or span.end > len(request.token_ids):
            raise PromptRefused(f"media span {span.start}..{span.end} does not fit the prompt", param="messages")
        if request.whole_spans and span.length > limits.max_step_tokens:
            raise BudgetExceeded("max_step_tokens", allowed=limits.max_step_tokens, requested=span.length)
        previous_end = span.end
        rows[span.item_idx] += span.length
    for item, num_rows in zip(request.items, rows, strict=True):
        if num_rows != item.num_embeds:
            raise PromptRefused(
                f"{item.num_embeds} {item.modality} embeddings for {num_rows} placeholders", param="messages"
            )


def check_item(item: EncoderItem, limits: SchedulerLimits, cache: EncoderCache) -> None:
    """Raises what the caller should see if `item` could never be encoded, or taken, here."""
    num_bytes = limits.item_bytes(item.num_embeds)
    if num_bytes > cache.capacity_bytes:
        raise BudgetExceeded("encoder_cache_bytes", allowed=cache.capacity_bytes, requested=num_bytes)
    expected = (item.num_embeds, limits.embed_width)
    if item.embeds is not None and item.embeds.shape != expected:
        raise EmbeddingsRefused(f"embeddings of shape {item.embeds.shape}, expected {expected}")
    if item.embeds is None and item.features is None and not item.is_withheld:
        raise InternalError("an item with neither features nor embeddings")


def try_start(seq: Sequence, pool: BlockPool, *, whole_spans: bool) -> bool:
    """Give `seq` its cached prefix and blocks for all its tokens, or leave everything as it was.

    All blocks of the prompt are taken at once, so that a sequence that runs never waits for the language cache inside
    its prefill: what it holds in the encoder cache drains for certain.
    """
    extend_hashes(seq.block_hashes, seq.request, seq.tokens, pool.block_size_tokens)
    max_shared = (len(seq.tokens) - 1) // pool.block_size_tokens
    shared = pool.get_prefix(seq.block_hashes, max_shared)
    if whole_spans:
        shared = shared[: _blocks_outside_spans(seq, len(shared), pool.block_size_tokens)]
    num_new = pool.blocks_for(len(seq.tokens)) - len(shared)
    if not pool.can_take(shared, num_new):
        return False
    seq.block_table = pool.take(shared, num_new)
    seq.num_computed = seq.num_cached_tokens = len(shared) * pool.block_size_tokens
    seq.num_registered_blocks = len(shared)
    pool.num_queried_tokens += len(seq.tokens)
    pool.num_hit_tokens += seq.num_computed
    pool.num_hits += len(shared)
    pool.num_misses += max_shared - len(shared)
    return True


def _blocks_outside_spans(seq: Sequence, num_blocks: int, block_size_tokens: int) -> int:
    """The largest count up to `num_blocks` whose edge does not fall inside a span that must be computed whole."""
    while num_blocks and any(s.start < num_blocks * block_size_tokens < s.end for s in seq.request.spans):
        num_blocks -= 1
    return num_blocks

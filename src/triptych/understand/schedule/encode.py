"""Phase 2: what the encoder does next (U3 to U5).

Reservations follow the order of arrival, and within a request the order of the prompt, so that no request holds a
later item while it lacks an earlier one. Encoding follows estimated cost, with ageing: each second waited counts as
one second of work less, so a large item is late by a bounded time and never starved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triptych.core.prepared import EncoderItem
from triptych.understand.encoder_cache import EncoderCache
from triptych.understand.schedule.limits import SchedulerLimits
from triptych.understand.sequence import Sequence


@dataclass(frozen=True, slots=True)
class WaitingItem:
    item: EncoderItem
    since_s: float


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Items of one batch key, encoded in one call."""

    items: tuple[EncoderItem, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens_encoder for item in self.items)


def reserve_items(
    running: Iterable[Sequence],
    cache: EncoderCache,
    waiting: dict[bytes, WaitingItem],
    limits: SchedulerLimits,
    now_s: float,
) -> dict[str, list[int]]:
    """Reference what is there or in flight, reserve what is not, for every item that a sequence's window reaches.

    Once an older sequence had to wait for room, younger ones may only share what is in use already: they neither take
    room nor keep it from being reclaimed. Returns the withheld items to ask for, by request: such a request waits for
    them, and no other does.
    """
    is_short = False
    wanted: dict[str, list[int]] = {}
    for seq in running:
        reached = _reached_items(seq, limits.max_step_tokens)
        for item_idx in reached:
            item = seq.item(item_idx)
            num_bytes = limits.item_bytes(item.num_embeds)
            if cache.has(item.key) and not (is_short and cache.is_idle(item.key)):
                cache.acquire(item.key, seq.request_id)
                seq.encoder_hits += 1
            elif item.is_withheld and not cache.has(item.key):
                if missing := _not_asked_for(seq, reached, cache):
                    wanted[seq.request_id] = missing
                break
            elif not is_short and cache.can_reserve(item.key, num_bytes):
                cache.reserve(item.key, num_bytes, seq.request_id)
                waiting[item.key] = WaitingItem(item, now_s)
                seq.encoder_misses += 1
            else:
                is_short = True
                break
            seq.held.add(item_idx)
    return wanted


def _not_asked_for(seq: Sequence, item_indices: Iterable[int], cache: EncoderCache) -> list[int]:
    """Withheld items that are not here, each once: asked for together, and noted as such."""
    items = [(idx, seq.item(idx)) for idx in item_indices if idx not in seq.asked]
    missing = [idx for idx, item in items if item.is_withheld and not cache.has(item.key)]
    seq.asked.update(missing)
    return missing


def _reached_items(seq: Sequence, window_tokens: int) -> list[int]:
    """Items in the sequence's next window that it does not hold yet, in the order of the prompt."""
    reach = seq.num_computed + window_tokens
    spans = [span for span in seq.pending_spans() if span.start < reach]
    return [idx for idx in dict.fromkeys(span.item_idx for span in spans) if idx not in seq.held]


def next_job(
    waiting: dict[bytes, WaitingItem], limits: SchedulerLimits, *, flops_per_s: float, now_s: float
) -> EncodeJob | None:
    """The cheapest item by aged cost, and whatever of its batch key fits the compute budget beside it. Takes them
    out."""
    if not waiting:
        return None

    def aged_cost_s(entry: WaitingItem) -> float:
        return entry.item.cost_flops / flops_per_s - (now_s - entry.since_s)

    order = sorted(waiting.values(), key=aged_cost_s)
    chosen = [order[0].item]
    num_tokens = chosen[0].num_tokens_encoder
    for entry in order[1:]:
        item = entry.item
        fits = num_tokens + item.num_tokens_encoder <= limits.encoder_step_tokens
        if item.batch_key == chosen[0].batch_key and fits:
            chosen.append(item)
            num_tokens += item.num_tokens_encoder
    for item in chosen:
        del waiting[item.key]
    return EncodeJob(tuple(chosen))

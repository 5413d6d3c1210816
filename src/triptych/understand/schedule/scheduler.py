"""The scheduler: owns the queues, composes the phases. Holds no tensor and reads no clock.

Progress: a running sequence holds all blocks of its prompt, so what it references in the encoder cache drains; items
are reserved in order; decode growth preempts the youngest, never the oldest; and what could never run was refused at
the door.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import replace

from triptych.core.errors import Overloaded
from triptych.core.prepared import EncoderItem, PreparedRequest
from triptych.understand.block_hash import extend_hashes
from triptych.understand.blocks import BlockPool
from triptych.understand.encoder_cache import EncoderCache
from triptych.understand.schedule.admit import check_admissible, check_item, max_total_tokens, try_start
from triptych.understand.schedule.encode import EncodeJob, WaitingItem, next_job, reserve_items
from triptych.understand.schedule.limits import SchedulerLimits
from triptych.understand.schedule.rows import Row, prefill_rows
from triptych.understand.sequence import Sequence


def _turn(seq: Sequence) -> tuple[int, float, str]:
    return (-seq.request.priority, seq.request.arrival_s, seq.request_id)


class Scheduler:
    """`waiting` and `running` are in order of turn: priority, then arrival."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, cache: EncoderCache) -> None:
        self.limits = limits
        self.pool = pool
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.waiting_items: dict[bytes, WaitingItem] = {}
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def waits_for_features(self) -> bool:
        return any(seq.asked for seq in self.running)

    @property
    def num_decoding(self) -> int:
        return sum(seq.is_decoding for seq in self.running)

    def check(self, request: PreparedRequest) -> None:
        """Raises what the caller should see if the request cannot be taken."""
        check_admissible(request, self.limits, self.pool, self.cache)
        if len(self.waiting) >= self.limits.max_waiting:
            raise Overloaded(f"max_waiting is {self.limits.max_waiting}, all places are taken", retry_after_s=2.0)

    def max_output_tokens(self, request: PreparedRequest) -> int:
        room = max_total_tokens(self.limits, self.pool) - len(request.token_ids)
        return min(request.sampling.max_tokens, room)

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_turn)

    def admit(self) -> list[Sequence]:
        """Start waiting sequences in turn while there is room; returns those that started."""
        started: list[Sequence] = []
        while self.waiting and len(self.running) < self.limits.max_running:
            seq = self.waiting[0]
            if not try_start(seq, self.pool, whole_spans=seq.request.whole_spans):
                break
            started.append(self.waiting.pop(0))
            insort(self.running, seq, key=_turn)
        return started

    def reserve_items(self, now_s: float) -> dict[str, list[int]]:
        """See `schedule.encode.reserve_items`."""
        return reserve_items(self.running, self.cache, self.waiting_items, self.limits, now_s)

    def supply(self, seq: Sequence, items: Mapping[int, EncoderItem]) -> None:
        """Features that were withheld, by the item's index. Raises what the caller should see if one is refused."""
        for item in items.values():
            check_item(item, self.limits, self.cache)
        filled = tuple(items.get(idx, item) for idx, item in enumerate(seq.request.items))
        seq.request = replace(seq.request, items=filled)
        seq.asked.difference_update(items)

    def next_job(self, *, flops_per_s: float, now_s: float) -> EncodeJob | None:
        return next_job(self.waiting_items, self.limits, flops_per_s=flops_per_s, now_s=now_s)

    def plan_rows(self, *, soft_cap_tokens: int) -> list[Row]:
        """Decode rows first. May preempt to make room for them."""
        rows = self._decode_rows()
        budget = self.limits.max_step_tokens - len(rows)
        return rows + prefill_rows(
            self.running, self.cache, budget_tokens=budget, soft_cap_tokens=min(budget, soft_cap_tokens)
        )

    def _decode_rows(self) -> list[Row]:
        rows: list[Row] = []
        for seq in list(self.running):
            if len(rows) >= self.limits.max_step_tokens:
                break
            if seq.is_decoding and seq in self.running and self._grow(seq):
                rows.append(Row(seq, 1))
        return [row for row in rows if row.seq in self.running]

    def _grow(self, seq: Sequence) -> bool:
        """Make sure that the next token has a slot; preempts the youngest, `seq` itself if it is that."""
        while len(seq.block_table) * self.pool.block_size_tokens < len(seq.tokens):
            if self.pool.can_take((), 1):
                seq.block_table += self.pool.take((), 1)
                continue
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def commit(self, seq: Sequence, num_new: int) -> None:
        """`num_new` more tokens are computed: name the blocks that became full, let go of items that are used up."""
        seq.num_computed += num_new
        size = self.pool.block_size_tokens
        extend_hashes(seq.block_hashes, seq.request, seq.tokens, size)
        for index in range(seq.num_registered_blocks, seq.num_computed // size):
            self.pool.register(seq.block_table[index], seq.block_hashes[index])
            seq.num_registered_blocks = index + 1
        for item_idx in [i for i in seq.held if seq.item_ends[i] <= seq.num_computed]:
            self._let_go(seq, item_idx)

    def preempt(self, seq: Sequence) -> None:
        """Back to the waiting queue with nothing but its tokens."""
        self._release(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.running.remove(seq)
        self.add(seq)

    def remove(self, seq: Sequence, *, forget_blocks: bool = False) -> None:
        """Finished, failed or cancelled, in whatever state: everything it reserved is released."""
        if forget_blocks:
            self.pool.forget(seq.block_table)
        self._release(seq)
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def owners(self, keys: Iterable[bytes]) -> list[Sequence]:
        """Running sequences that reference any of the items `keys`."""
        ids = {request_id for key in keys for request_id in self.cache.references(key)}
        return [seq for seq in self.running if seq.request_id in ids]

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        for item_idx in list(seq.held):
            self._let_go(seq, item_idx)
        seq.block_table = []
        seq.num_computed = seq.num_registered_blocks = 0
        seq.is_encoding = False

    def _let_go(self, seq: Sequence, item_idx: int) -> None:
        """Drop the reference; an item that still waits for the encoder and that nobody else wants is not encoded."""
        key = seq.item(item_idx).key
        seq.held.discard(item_idx)
        if any(seq.item(other).key == key for other in seq.held):
            return
        self.cache.release(key, seq.request_id)
        if key in self.waiting_items and not self.cache.references(key):
            del self.waiting_items[key]
            self.cache.drop(key)

    def forget(self) -> None:
        """Flush both caches and set every counter to zero."""
        for store in (self.cache, self.pool):
            store.flush()
            store.reset_counters()
        self.num_preemptions = 0

    def check_integrity(self) -> None:
        self.pool.check_integrity([seq.block_table for seq in self.running])
        self.cache.check_integrity()
        assert all(not seq.block_table and not seq.held for seq in self.waiting)

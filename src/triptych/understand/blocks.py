"""Who owns which block of the language cache. Pure bookkeeping; the pools are `models.paged_attention.PagedKv`.

A block is referenced by the sequences whose table holds it. At zero references it stays findable by its hash, and is
reused oldest first. Sharing is by reference count; a shared block is full, and so never written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Counts in blocks of `block_size_tokens`. Owned by one engine thread."""

    def __init__(self, num_blocks: int, block_size_tokens: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self._prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.num_hit_tokens = 0
        self.num_queried_tokens = 0
        self.num_hits = 0  # blocks found by their hash
        self.num_misses = 0  # full blocks of a prompt that had to be computed
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks findable by hash, in use or not."""
        return len(self._block_of)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size_tokens)

    def get_prefix(self, hashes: Sequence[bytes], max_blocks: int) -> list[int]:
        """The longest run of cached blocks from the start. Changes nothing."""
        found: list[int] = []
        for name in hashes[:max_blocks]:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def can_take(self, shared: Sequence[int], num_new: int) -> bool:
        reclaimed = sum(1 for block in shared if not self._references[block])
        return num_new + reclaimed <= len(self._free)

    def take(self, shared: Sequence[int], num_new: int) -> list[int]:
        """Reference `shared` blocks and `num_new` fresh ones; returns the table. Undone by `release`."""
        assert self.can_take(shared, num_new), "take() without can_take()"
        for block in shared:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1
        return [*shared, *(self._take_one() for _ in range(num_new))]

    def _take_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._forget(block):
            self.num_evictions += 1
        self._references[block] = 1
        return block

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference of each block. The last blocks of a table are reused first: a prefix is worth more."""
        for block in reversed(table):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, name: bytes) -> None:
        """A full, computed block becomes findable. The first block of a name keeps it."""
        if self._prefix_cache and name not in self._block_of:
            self._block_of[name] = block
            self._hash_of[block] = name

    def forget(self, table: Sequence[int]) -> None:
        """Make blocks unfindable, such as those a faulty request computed."""
        for block in table:
            self._forget(block)

    def flush(self) -> int:
        """Forget every name; blocks in use stay with their owners. Returns how many were forgotten."""
        count = len(self._block_of)
        self._block_of.clear()
        self._hash_of.clear()
        return count

    def reset_counters(self) -> None:
        self.num_hit_tokens = self.num_queried_tokens = self.num_evictions = 0
        self.num_hits = self.num_misses = 0

    def _forget(self, block: int) -> bool:
        name = self._hash_of.pop(block, None)
        if name is None:
            return False
        del self._block_of[name]
        return True

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Every reference is in some table and the other way round; raises AssertionError."""
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        assert counted == self._references, "reference counts and tables differ"
        free = {block for block, count in enumerate(counted) if not count}
        assert free == set(self._free), "free list and reference counts differ"
        assert {name: block for block, name in self._hash_of.items()} == self._block_of, "hash maps differ"

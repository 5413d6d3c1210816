"""A cache that counts bytes: least recently used goes first, pinned entries stay, a flush leaves nothing stale behind.

Pure and without a lock: one owner, one thread (an event loop, or an engine's loop). Used by the processor cache, the
media aliases and the response cache; each has its own instance, and they never mix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class _Entry(Generic[K, V]):
    key: K
    value: V
    num_bytes: int
    cost_ms: float
    num_pins: int = 0
    is_listed: bool = True  # False: replaced or flushed while pinned; goes with its last pin


@dataclass(frozen=True, slots=True, eq=False)
class Pin(Generic[K, V]):
    """A reference that keeps one entry's bytes. Given back by `ByteLru.unpin`, exactly once."""

    entry: _Entry[K, V]

    @property
    def value(self) -> V:
        return self.entry.value


class ByteLru(Generic[K, V]):
    """Owner of at most `capacity_bytes` of values. Capacity 0 holds nothing, and is a valid way to switch a cache off.

    `num_bytes` counts flushed or replaced entries that are still pinned, too: it is what is held,
    not what can be found. A value that was computed before a flush must not enter after it: take `generation` before
    the work and hand it to `put`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must be 0 or more, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self.generation = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.saved_ms = 0.0
        self._listed: OrderedDict[K, _Entry[K, V]] = OrderedDict()
        self._pinned: set[_Entry[K, V]] = set()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_entries(self) -> int:
        return len(self._listed)

    def __contains__(self, key: K) -> bool:
        return key in self._listed

    def keys(self) -> Iterator[K]:
        """Oldest first."""
        return iter(self._listed)

    def peek(self, key: K) -> V | None:
        """The value, without a trace: no counter, no change of order."""
        entry = self._listed.get(key)
        return entry.value if entry else None

    def lookup(self, key: K) -> V | None:
        """The value, now the most recently used; None is a miss. Counted either way."""
        entry = self._lookup(key)
        return entry.value if entry else None

    def pin(self, key: K) -> Pin[K, V] | None:
        """Like `lookup`, and the entry stays until `unpin`. None is a miss, and pins nothing."""
        entry = self._lookup(key)
        return self._pin(entry) if entry else None

    def put(self, key: K, value: V, num_bytes: int, *, cost_ms: float = 0.0, generation: int | None = None) -> bool:
        """Hold a value, evicting the oldest unpinned ones for room. `cost_ms` is what a later hit saves.

        Returns False, and changes nothing, when the value cannot fit beside what is pinned, or when `generation` is not
        the present one. Replaces a value of the same key.
        """
        if num_bytes < 0:
            raise ValueError(f"num_bytes must be 0 or more, got {num_bytes}")
        if not self.can_put(key, num_bytes, generation=generation):
            return False
        self._drop_key(key)
        self._make_room(num_bytes)
        self._listed[key] = _Entry(key, value, num_bytes, cost_ms)
        self._num_bytes += num_bytes
        return True

    def put_pinned(
        self, key: K, value: V, num_bytes: int, *, cost_ms: float = 0.0, generation: int | None = None
    ) -> Pin[K, V] | None:
        """`put`, pinned from the start. None where `put` returns False."""
        if not self.put(key, value, num_bytes, cost_ms=cost_ms, generation=generation):
            return None
        return self._pin(self._listed[key])

    def can_put(self, key: K, num_bytes: int, *, generation: int | None = None) -> bool:
        """Whether `put` would hold it."""
        if generation is not None and generation != self.generation:
            return False
        return num_bytes + self._num_pinned_bytes() <= self.capacity_bytes

    def unpin(self, pin: Pin[K, V]) -> None:
        """Undo one `pin`. Raises ValueError when it was undone before."""
        entry = pin.entry
        if entry.num_pins < 1:
            raise ValueError("unpin without a pin")
        entry.num_pins -= 1
        if entry.num_pins == 0:
            self._pinned.discard(entry)
            if not entry.is_listed:
                self._num_bytes -= entry.num_bytes

    def discard(self, key: K) -> bool:
        """Forget one key. Returns whether it was there. Its bytes stay counted while pinned."""
        return self._drop_key(key)

    def flush(self) -> int:
        """Forget everything and begin a new generation. Returns how many entries went. Pinned values stay readable
        through their pins, and can no longer be found."""
        num_entries = len(self._listed)
        for key in list(self._listed):
            self._drop_key(key)
        self.generation += 1
        return num_entries

    def reset_counters(self) -> None:
        self.hits = self.misses = self.evictions = 0
        self.saved_ms = 0.0

    def stats(self, name: str) -> dict[str, float]:
        """Counters by the names of `metrics.names`: `<name>_cache_hits` and so on."""
        return {
            f"{name}_cache_bytes": float(self.num_bytes),
            f"{name}_cache_capacity_bytes": float(self.capacity_bytes),
            f"{name}_cache_entries": float(self.num_entries),
            f"{name}_cache_hits": float(self.hits),
            f"{name}_cache_misses": float(self.misses),
            f"{name}_cache_evictions": float(self.evictions),
            f"{name}_cache_saved_ms": self.saved_ms,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not add up. For tests and idle moments."""
        unlisted = [entry for entry in self._pinned if not entry.is_listed]
        held = sum(entry.num_bytes for entry in self._listed.values()) + sum(entry.num_bytes for entry in unlisted)
        assert held == self._num_bytes, (held, self._num_bytes)
        assert self._num_bytes <= self.capacity_bytes, (self._num_bytes, self.capacity_bytes)
        assert all(entry.num_pins > 0 for entry in self._pinned)
        assert all(entry.is_listed for entry in self._listed.values())
        assert all((entry in self._pinned) == (entry.num_pins > 0) for entry in self._listed.values())

    def _lookup(self, key: K) -> _Entry[K, V] | None:
        entry = self._listed.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self.saved_ms += entry.cost_ms
        self._listed.move_to_end(key)
        return entry

    def _pin(self, entry: _Entry[K, V]) -> Pin[K, V]:
        entry.num_pins += 1
        self._pinned.add(entry)
        return Pin(entry)

    def _num_pinned_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._pinned)

    def _drop_key(self, key: K) -> bool:
        entry = self._listed.pop(key, None)
        if entry is None:
            return False
        entry.is_listed = False
        if entry.num_pins == 0:
            self._num_bytes -= entry.num_bytes
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Evict until `num_bytes` fit. The caller has checked that they can."""
        for key in list(self._listed):
            if self._num_bytes + num_bytes <= self.capacity_bytes:
                return
            if self._listed[key].num_pins == 0:
                self._drop_key(key)
                self.evictions += 1

"""Which embeddings are held, for whom, and how many bytes they take (U5). Pure; the tensors are with the runner.

An entry is reserved before its encode starts, ready when it ends, referenced by the requests that still need it, and
reclaimed oldest first once nobody does. An entry in flight is waited for, never taken as a hit.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Entry:
    num_bytes: int
    references: set[str] = field(default_factory=set)
    is_ready: bool = False
    is_stale: bool = False
    encode_ms: float = 0.0


class EncoderCache:
    """Capacity in bytes; keys are `EncoderItem.key`. Owned by one engine thread."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._entries: dict[bytes, Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._dropped: list[bytes] = []
        self.num_bytes = 0
        self.num_idle_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_evictions = 0
        self.saved_ms = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_held_bytes(self) -> int:
        """Reserved for encodes to come, or referenced by a request: what cannot be reclaimed now."""
        return self.num_bytes - self.num_idle_bytes

    def has(self, key: bytes) -> bool:
        """Ready or in flight."""
        entry = self._entries.get(key)
        return entry is not None and not entry.is_stale

    def is_ready(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.is_ready

    def is_idle(self, key: bytes) -> bool:
        """Held for nobody: reclaimed when room is needed."""
        return key in self._idle

    def can_reserve(self, key: bytes, num_bytes: int) -> bool:
        """False also while a flushed entry of this key is still in flight."""
        return key not in self._entries and self.num_held_bytes + num_bytes <= self.capacity_bytes

    def reserve(self, key: bytes, num_bytes: int, request_id: str) -> None:
        """Make room and hold it for an encode to come. Undone by `release`, or by `drop` where the encode fails."""
        assert self.can_reserve(key, num_bytes), "reserve() without can_reserve()"
        while self.num_bytes + num_bytes > self.capacity_bytes:
            self._remove(next(iter(self._idle)))
            self.num_evictions += 1
        self._entries[key] = Entry(num_bytes, {request_id})
        self.num_bytes += num_bytes
        self.num_misses += 1

    def acquire(self, key: bytes, request_id: str) -> None:
        """Reference an entry that is there. A hit counts the milliseconds that it saves."""
        entry = self._entries[key]
        assert not entry.is_stale, "acquire() of a flushed entry"
        if key in self._idle:
            del self._idle[key]
            self.num_idle_bytes -= entry.num_bytes
        entry.references.add(request_id)
        self.num_hits += 1
        self.saved_ms += entry.encode_ms

    def mark_ready(self, key: bytes, encode_ms: float) -> None:
        entry = self._entries[key]
        entry.is_ready, entry.encode_ms = True, encode_ms
        self._settle(key, entry)

    def release(self, key: bytes, request_id: str) -> None:
        """Drop one reference; unknown keys and references are fine, so that clean-up may run twice."""
        entry = self._entries.get(key)
        if entry is not None and request_id in entry.references:
            entry.references.discard(request_id)
            self._settle(key, entry)

    def references(self, key: bytes) -> frozenset[str]:
        entry = self._entries.get(key)
        return frozenset(entry.references) if entry else frozenset()

    def drop(self, key: bytes) -> None:
        """Remove an entry whatever its state: its encode failed or was cancelled."""
        if key in self._entries:
            self._remove(key)

    def flush(self) -> int:
        """Forget all: idle entries now, the others when their last reference goes. Returns how many were held."""
        count = len(self._entries)
        for key in list(self._idle):
            self._remove(key)
        for entry in self._entries.values():
            entry.is_stale = True
        return count

    def reset_counters(self) -> None:
        self.num_hits = self.num_misses = self.num_evictions = 0
        self.saved_ms = 0.0

    def take_dropped(self) -> list[bytes]:
        """Keys removed since the last call, whose tensors can go."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _settle(self, key: bytes, entry: Entry) -> None:
        if entry.references or not entry.is_ready:
            return
        if entry.is_stale:
            self._remove(key)
        elif key not in self._idle:
            self._idle[key] = None
            self.num_idle_bytes += entry.num_bytes

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self.num_bytes -= entry.num_bytes
        if key in self._idle:
            del self._idle[key]
            self.num_idle_bytes -= entry.num_bytes
        self._dropped.append(key)

    def check_integrity(self) -> None:
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values())
        assert self.num_bytes <= self.capacity_bytes
        idle = {k for k, e in self._entries.items() if e.is_ready and not e.references and not e.is_stale}
        assert idle == set(self._idle), "idle list and entries differ"
        assert self.num_idle_bytes == sum(self._entries[key].num_bytes for key in self._idle)

"""Which stretch of a shared arena belongs to whom: reserve, ready, release. Pure bookkeeping of the sending side.

A slot's id is its generation: it is never used twice, so that a late or repeated release, and a reader who comes with
an old descriptor, are told apart from the present owner.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """`num_bytes` bytes at `offset` of the arena."""

    offset: int
    num_bytes: int
    slot_id: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(slots=True)
class Slots:
    """Owner of `capacity_bytes`, handed out first fit from the bottom: a little traffic touches little memory."""

    capacity_bytes: int
    num_reserved_bytes: int = 0
    num_late_releases: int = 0
    _held: dict[int, Slot] = field(default_factory=dict)
    _ready: set[int] = field(default_factory=set)
    _in_order: list[Slot] = field(default_factory=list)
    _next_id: int = 1

    def __len__(self) -> int:
        return len(self._held)

    def reserve(self, num_bytes: int) -> Slot | None:
        """Undone by `release`. None when no gap is large enough: the sender goes another way, and does not wait."""
        size = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        offset = self._gap(size)
        if offset is None:
            return None
        slot = Slot(offset, size, self._next_id)
        self._next_id += 1
        self._held[slot.slot_id] = slot
        insort(self._in_order, slot)
        self.num_reserved_bytes += size
        return slot

    def _gap(self, size: int) -> int | None:
        edge = 0
        for slot in self._in_order:
            if slot.offset - edge >= size:
                return edge
            edge = slot.end
        return edge if self.capacity_bytes - edge >= size else None

    def mark_ready(self, slot_id: int) -> None:
        """Written: it may be read from now on."""
        assert slot_id in self._held, "ready after its release"
        self._ready.add(slot_id)

    def is_ready(self, slot_id: int) -> bool:
        return slot_id in self._ready

    def release(self, slot_id: int) -> Slot | None:
        """The slot that is free again. None for an id that is not held: released before, or never; counted."""
        slot = self._held.pop(slot_id, None)
        if slot is None:
            self.num_late_releases += 1
            return None
        self._ready.discard(slot_id)
        self._in_order.remove(slot)
        self.num_reserved_bytes -= slot.num_bytes
        return slot

    def check_integrity(self) -> None:
        """Raises AssertionError unless the slots are apart, inside, and counted."""
        assert sorted(self._held.values()) == self._in_order
        assert sum(slot.num_bytes for slot in self._in_order) == self.num_reserved_bytes
        assert all(a.end <= b.offset for a, b in zip(self._in_order, self._in_order[1:], strict=False))
        assert not self._in_order or self._in_order[-1].end <= self.capacity_bytes
        assert self._ready <= set(self._held)

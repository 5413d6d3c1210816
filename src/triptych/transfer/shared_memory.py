"""Arrays through memory that two processes share: written once by the sender, read in place by the receiver.

The arena is one anonymous memory file (memfd) that the receiving process inherits. It has no name, so nothing can be
left in /dev/shm: the kernel frees it when the last of the two processes is gone, however they went. Where there is no
memfd (not Linux), or no room, arrays go another way: see `understand.wire`.

Each slot begins with a stamp of its generation and size, which the sender writes last and wipes on release; the
receiver refuses a slot whose stamp is not the descriptor's.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from triptych.core.errors import InternalError
from triptych.transfer.slots import ALIGN_BYTES, Slot, Slots

DTYPES = frozenset({"float32", "float16", "int32", "int64", "uint8", "bool"})
_STAMP = struct.Struct("<QQ")  # slot id, bytes of the array
_NO_STAMP = bytes(_STAMP.size)


@dataclass(frozen=True, slots=True)
class Placed:
    """The descriptor that crosses: the receiver gives `slot_id` back exactly once."""

    slot_id: int
    offset: int
    num_bytes: int


class SharedSender:
    """Owner of the arena and its slots. `place` may run on a worker thread; everything is behind one lock."""

    def __init__(self, capacity_bytes: int, *, name: str = "triptych") -> None:
        """Raises OSError where the system has no memfd."""
        if not hasattr(os, "memfd_create"):
            raise OSError("no memfd on this system")
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, capacity_bytes)
            # nobody can shrink it: a reader is never killed by a page that is gone
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory: mmap.mmap | None = mmap.mmap(self.fd, capacity_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._slots = Slots(capacity_bytes)
        self._lock = threading.Lock()
        self.num_placed = 0
        self.num_refused = 0

    def place(self, array: np.ndarray) -> Placed | None:
        """Copy `array` into a slot, ready to be read. None when there is no room, or the arena is closed."""
        assert array.dtype.name in DTYPES, array.dtype
        with self._lock:
            slot = self._slots.reserve(ALIGN_BYTES + array.nbytes) if self._memory is not None else None
            if slot is None or self._memory is None:
                self.num_refused += 1
                return None
            view = memoryview(self._memory)
        try:
            body = view[slot.offset + ALIGN_BYTES : slot.offset + ALIGN_BYTES + array.nbytes]
            np.copyto(np.frombuffer(body, array.dtype).reshape(array.shape), array)
            self._stamp(view, slot, array.nbytes)
        except BaseException:
            self.release(slot.slot_id)
            raise
        finally:
            del view
        return Placed(slot.slot_id, slot.offset, array.nbytes)

    def _stamp(self, view: memoryview, slot: Slot, num_bytes: int) -> None:
        _STAMP.pack_into(view, slot.offset, slot.slot_id, num_bytes)
        with self._lock:
            self._slots.mark_ready(slot.slot_id)
            self.num_placed += 1

    def release(self, slot_id: int) -> bool:
        """False for a slot that is not held: a second release, or one after `close`, changes nothing."""
        with self._lock:
            slot = self._slots.release(slot_id)
            if slot is not None and self._memory is not None:
                self._memory[slot.offset : slot.offset + _STAMP.size] = _NO_STAMP
        return slot is not None

    def close(self) -> None:
        """The receiver is gone, or told to go. May be called more than once."""
        with self._lock:
            if self._memory is None:
                return
            memory, self._memory = self._memory, None
            os.close(self.fd)
        try:
            memory.close()
        except BufferError:
            pass  # a copy on a worker thread has not ended: the mapping goes with its last view

    def stats(self) -> dict[str, float]:
        with self._lock:
            return {
                "transfer_shared_bytes": float(self._slots.num_reserved_bytes),
                "transfer_shared_capacity_bytes": float(self._slots.capacity_bytes),
                "transfers_shared": float(self.num_placed),
                "transfers_refused": float(self.num_refused),
            }

    def check_integrity(self) -> None:
        with self._lock:
            self._slots.check_integrity()


@dataclass(slots=True)
class Shipment:
    """What one message places: taken back together if it is never sent."""

    sender: SharedSender
    min_bytes: int
    placed: list[Placed] = field(default_factory=list)

    def place(self, array: np.ndarray) -> Placed | None:
        """None for an array that is too small to be worth a slot, or for which there is none."""
        if array.nbytes < self.min_bytes:
            return None
        placed = self.sender.place(array)
        if placed is not None:
            self.placed.append(placed)
        return placed

    def undo(self) -> None:
        for placed in self.placed:
            self.sender.release(placed.slot_id)
        self.placed.clear()


class SharedReceiver:
    """The other process's side, over the inherited `fd`. `on_release` is called once a slot, on whichever thread drops
    the last array that looks into it."""

    def __init__(self, fd: int, on_release: Callable[[int], None]) -> None:
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self._on_release = on_release
        os.close(fd)  # the mapping stays

    def open(self, placed: Placed, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """The array in place, [shape] of `dtype`; its slot is given back when it and every view of it are gone. Raises
        InternalError for a descriptor that does not fit its slot."""
        if dtype not in DTYPES or placed.num_bytes != math.prod(shape) * np.dtype(dtype).itemsize:
            raise InternalError(f"{placed.num_bytes} bytes for an array of {dtype} {shape}")
        start = placed.offset + ALIGN_BYTES
        if not 0 <= placed.offset <= start + placed.num_bytes <= len(self._memory):
            raise InternalError(f"a slot at {placed.offset} of {placed.num_bytes} bytes is outside the shared memory")
        if _STAMP.unpack_from(self._memory, placed.offset) != (placed.slot_id, placed.num_bytes):
            raise InternalError(f"the slot at {placed.offset} is not that of generation {placed.slot_id}")
        body: np.ndarray[Any, Any] = np.frombuffer(self._memory, np.uint8, placed.num_bytes, start)
        weakref.finalize(body, self._on_release, placed.slot_id).atexit = False
        return body.view(dtype).reshape(shape)

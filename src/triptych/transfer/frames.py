"""Arrays beside a message's header. Never pickle.

A message is a list of frames: the header first, then the arrays' bytes, which the header names by `ArrayRef`. A large
array is in shared memory instead, where there is room; it then has a slot, and no frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from triptych.core.errors import InternalError
from triptych.transfer.shared_memory import DTYPES, Placed

Place = Callable[[np.ndarray], Placed | None]
Open = Callable[[Placed, str, tuple[int, ...]], np.ndarray]
Frame = bytes | memoryview


class ArrayRef(msgspec.Struct, frozen=True, array_like=True):
    """In frame `frame` of the message, or, where that is 0, in the slot `placed`."""

    frame: int
    dtype: str
    shape: tuple[int, ...]
    placed: Placed | None = None


def nowhere(array: np.ndarray) -> Placed | None:
    """The `Place` of who has no shared memory."""
    return None


def no_slots(placed: Placed, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The `Open` of who has no shared memory."""
    raise InternalError("an array in shared memory, which this process does not have")


class ArrayPacker:
    """Gathers the frames of one message. Arrays are not copied, but for those that `place` takes."""

    def __init__(self, place: Place = nowhere) -> None:
        self._place = place
        self.frames: list[Frame] = []

    def array(self, array: np.ndarray) -> ArrayRef:
        assert array.dtype.name in DTYPES, array.dtype
        placed = self._place(array)
        if placed is not None:
            return ArrayRef(0, array.dtype.name, array.shape, placed)
        self.frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return ArrayRef(len(self.frames), array.dtype.name, array.shape)


class ArrayUnpacker:
    """Reads what `ArrayPacker` gathered. Raises InternalError for a header that lies about its frames or slots.

    `frames` are the message's, header included. Without `copy` an array looks into its frame and keeps it: for bytes,
    which need no alignment."""

    def __init__(self, frames: Sequence[Any], open_slot: Open = no_slots, *, copy: bool = True) -> None:
        self._frames = frames
        self._open_slot = open_slot
        self._copy = copy

    def array(self, ref: ArrayRef) -> np.ndarray:
        if ref.placed is not None:
            return self._open_slot(ref.placed, ref.dtype, ref.shape)
        if ref.dtype not in DTYPES or not 0 < ref.frame < len(self._frames):
            raise InternalError(f"array of dtype {ref.dtype} in frame {ref.frame} of {len(self._frames)}")
        dtype = np.dtype(ref.dtype)
        frame = self._frames[ref.frame]
        if len(frame) != math.prod(ref.shape) * dtype.itemsize:
            raise InternalError(f"{len(frame)} bytes for an array of {ref.dtype} {ref.shape}")
        # a copy is writable and of our own, and the frame can go
        return np.frombuffer(bytearray(frame) if self._copy else frame, dtype).reshape(ref.shape)

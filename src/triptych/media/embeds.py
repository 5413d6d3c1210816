"""Precomputed embeddings (U9): a safetensors file, or raw bytes with a declared header, checked whole before admission.

Never pickle, never torch.load: a length, a JSON header and little-endian numbers. What passes here fits the model's
embedding space in shape, kind and revision, and every value is finite; what does not is refused by name and value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from triptych.core.errors import BudgetExceeded, EmbeddingsRefused

MAX_HEADER_BYTES = 64 * 1024
MIN_REVISION_CHARS = 16
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}
_DTYPE_ALIASES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Embeds:
    """`values` [N, D] float32, finite. `digest` is the BLAKE3 of shape and values. `grid`: the family's sizes, such as
    (t, h, w) patches, where the sender states them."""

    values: npt.NDArray[np.float32]
    digest: bytes
    grid: tuple[int, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def num_embeds(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class EmbedsHeader:
    """What the numbers are: from a safetensors file, or declared beside raw bytes. `shape` is (N, D)."""

    dtype: str
    shape: tuple[int, ...]
    metadata: dict[str, str] = field(default_factory=dict)

    @classmethod
    def declared(cls, dtype: Any, shape: Any, metadata: Any = None) -> EmbedsHeader:
        """Check a header that a request declares. Raises EmbeddingsRefused."""
        name = _DTYPE_ALIASES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if not isinstance(shape, (list, tuple)) or not all(type(size) is int for size in shape):
            raise EmbeddingsRefused("shape must be a list of whole numbers")
        if metadata is not None and not _is_text_map(metadata):
            raise EmbeddingsRefused("metadata must map text to text")
        return cls(name, tuple(shape), metadata or {})


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_embeds(
    data: bytes,
    *,
    embed_width: int,
    revision: bytes,
    max_embeds: int,
    max_bytes: int,
    num_embeds: int | None = None,
    header: EmbedsHeader | None = None,
    param: str | None = None,
) -> Embeds:
    """Check and read. Without `header`, `data` is a safetensors file of one tensor; with it, the tensor's raw bytes.

    The tensor is [N, embed_width], or [1, N, embed_width], of F32, F16 or BF16; N is at most `max_embeds`, and equal to
    `num_embeds` where that is known. Its metadata names the model's revision (`model_revision`, hexadecimal, at least
    16 characters of it), and may state a `grid` ("1,16,16"). Raises EmbeddingsRefused,
    BudgetExceeded (`max_item_bytes`).
    """
    try:
        if len(data) > max_bytes:
            raise BudgetExceeded("max_item_bytes", allowed=max_bytes, requested=len(data))
        header, raw = (header, memoryview(data)) if header is not None else _split_safetensors(data)
        shape = _checked_shape(header, embed_width, max_embeds, num_embeds)
        _check_revision(header.metadata, revision)
        values = _values(header, raw, shape)
        return Embeds(values, _digest(values), _grid(header.metadata), header.metadata)
    except (EmbeddingsRefused, BudgetExceeded) as error:
        error.param = error.param or param
        raise


def _split_safetensors(data: bytes) -> tuple[EmbedsHeader, memoryview]:
    """The header of the file's only tensor, and its bytes."""
    if len(data) < 8:
        raise EmbeddingsRefused(f"a safetensors file has at least 8 bytes, got {len(data)}")
    num_header_bytes = int.from_bytes(data[:8], "little")
    if not 2 <= num_header_bytes <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise EmbeddingsRefused(f"the safetensors header claims {num_header_bytes} bytes of a file of {len(data)}")
    try:
        entries = msgspec.json.decode(data[8 : 8 + num_header_bytes], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in entries.items()}
    except (msgspec.DecodeError, RecursionError):
        raise EmbeddingsRefused("the safetensors header is malformed") from None
    if len(tensors) != 1:
        raise EmbeddingsRefused(f"the file must hold one tensor, it has {len(tensors)}")
    tensor = next(iter(tensors.values()))
    body = memoryview(data)[8 + num_header_bytes :]
    if tensor.data_offsets != (0, len(body)):
        raise EmbeddingsRefused(f"the tensor claims bytes {tensor.data_offsets} of {len(body)}")
    return EmbedsHeader(tensor.dtype, tuple(tensor.shape), metadata), body


def _checked_shape(header: EmbedsHeader, embed_width: int, max_embeds: int, num_embeds: int | None) -> tuple[int, int]:
    shape = header.shape[1:] if len(header.shape) == 3 and header.shape[0] == 1 else header.shape
    if len(shape) != 2:
        raise EmbeddingsRefused(f"embeddings have the shape [N, {embed_width}], got {list(header.shape)[:8]}")
    rows, width = shape
    if width != embed_width:
        raise EmbeddingsRefused(f"this model's embeddings are {embed_width} wide, got {width}")
    if rows < 1:
        raise EmbeddingsRefused(f"at least one embedding is needed, got {rows}")
    if num_embeds is not None and rows != num_embeds:
        raise EmbeddingsRefused(f"{num_embeds} embeddings belong here, got {rows}")
    if rows > max_embeds:
        raise EmbeddingsRefused(f"at most {max_embeds} embeddings can be taken, got {rows}")
    return rows, width


def _check_revision(metadata: dict[str, str], revision: bytes) -> None:
    named = metadata.get("model_revision", "").lower()
    if not named:
        raise EmbeddingsRefused("the metadata names no model_revision")
    if len(named) < MIN_REVISION_CHARS or not revision.hex().startswith(named):
        raise EmbeddingsRefused(f"embeddings of model_revision {named[:64]!r}, this server runs {revision.hex()!r}")


def _values(header: EmbedsHeader, raw: memoryview, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    item_bytes = DTYPES.get(header.dtype) if isinstance(header.dtype, str) else None
    if item_bytes is None:
        raise EmbeddingsRefused(f"dtype must be one of {', '.join(DTYPES)}, got {str(header.dtype)[:20]!r}")
    expected = shape[0] * shape[1] * item_bytes
    if len(raw) != expected:
        raise EmbeddingsRefused(f"{list(shape)} of {header.dtype} takes {expected} bytes, got {len(raw)}")
    values = _as_float32(raw, header.dtype).reshape(shape)
    finite = np.isfinite(values)
    if not finite.all():
        row = int(np.argmin(finite.all(axis=1)))
        raise EmbeddingsRefused(f"embedding {row} holds a value that is not finite")
    return values


def _as_float32(raw: memoryview, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "F32":
        return np.frombuffer(raw, "<f4").astype(np.float32)
    if dtype == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def _digest(values: npt.NDArray[np.float32]) -> bytes:
    return blake3(repr(values.shape).encode() + b"\0" + values.tobytes()).digest()


def _grid(metadata: dict[str, str]) -> tuple[int, ...]:
    text = metadata.get("grid")
    if text is None:
        return ()
    parts = text.split(",")
    if len(parts) > 8 or not all(part.strip().isdecimal() and len(part) <= 8 for part in parts):
        raise EmbeddingsRefused(f"grid must be up to 8 whole numbers with commas between, got {text[:40]!r}")
    return tuple(int(part) for part in parts)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())

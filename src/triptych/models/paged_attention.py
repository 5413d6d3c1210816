"""Attention over paged keys and values, for one packed batch, behind transformers' attention interface.

A packed batch is [decode rows, one token each][prefill chunks, one after another]. Every attention layer first writes
the batch's keys and values into its pool, then reads each sequence's context through its block table. The batch's
metadata is the keyword `paged=PagedBatch`, which transformers passes from the model's call down to this function.

Paged attention: Kwon et al. 2023, arXiv:2309.06180.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from triptych.models.base import KvSpec

ATTENTION_NAME = "triptych"


class PagedKv:
    """The pools of one model: for each layer keys and values, [num_slots, kv_heads, head_dim], slot = block * size + i.

    Owned by the engine's runner. Which block belongs to whom is `understand.blocks`' business.
    """

    def __init__(
        self,
        specs: Sequence[KvSpec],
        *,
        num_blocks: int,
        block_size_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size_tokens = block_size_tokens
        self.num_blocks = num_blocks
        self.device = device
        num_slots = num_blocks * block_size_tokens

        def pool(spec: KvSpec) -> torch.Tensor:
            return torch.zeros(num_slots, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device)

        self.keys = [pool(spec) for spec in specs]
        self.values = [pool(spec) for spec in specs]

    @property
    def num_bytes(self) -> int:
        return sum(pool.nbytes for pool in (*self.keys, *self.values))

    @staticmethod
    def block_bytes(specs: Sequence[KvSpec], block_size_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values."""
        return sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs) * block_size_tokens * dtype.itemsize


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a step: `num_new` tokens after `past` cached ones. `whole`: absolute [start, end) ranges
    inside which attention runs both ways; such a range is never split between steps."""

    block_table: Sequence[int]
    past: int
    num_new: int
    whole: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class PrefillPart:
    """Rows [row, row + num_new) of the batch, which attend to `slots` [past + num_new]."""

    row: int
    num_new: int
    past: int
    slots: torch.Tensor
    whole: tuple[tuple[int, int], ...]
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """[num_new, past + num_new] bool, True where allowed; None where plain causal attention says the same."""
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> torch.Tensor | None:
        num_keys = self.past + self.num_new
        needs_window = window is not None and num_keys > window
        if self.past == 0 and not self.whole and not needs_window:
            return None
        query = torch.arange(self.past, num_keys, device=self.slots.device)[:, None]
        key = torch.arange(num_keys, device=self.slots.device)[None, :]
        allowed = key <= query
        if window is not None:
            allowed &= key > query - window
        for start, end in self.whole:
            inside_query = (query >= start) & (query < end)
            inside_key = (key >= start) & (key < end)
            allowed |= inside_query & inside_key
        return allowed


@dataclass(slots=True)
class PagedBatch:
    """Metadata of one packed step, shared by all layers. `decode_slots` [B, L] are padded with the sequence's own
    first slot, so that a padded read never touches what belongs to another."""

    kv: PagedKv
    num_decode: int
    write_slots: torch.Tensor  # [T] int64
    decode_slots: torch.Tensor  # [B, L] int64
    decode_lengths: torch.Tensor  # [B] int64
    prefill: list[PrefillPart]
    _decode_masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def decode_mask(self, window: int | None) -> torch.Tensor | None:
        """[B, 1, 1, L] bool, True where the key is out of reach; None when all are in reach."""
        if window not in self._decode_masks:
            width = self.decode_slots.shape[1]
            key = torch.arange(width, device=self.decode_slots.device)[None, :]
            length = self.decode_lengths[:, None]
            out = key >= length
            if window is not None:
                out |= key < length - window
            self._decode_masks[window] = out[:, None, None, :] if bool(out.any()) else None
        return self._decode_masks[window]


def build_batch(kv: PagedKv, steps: Sequence[SequenceStep]) -> PagedBatch:
    """Lay `steps` out as one packed batch; single-token steps without a whole span must come first."""
    size = kv.block_size_tokens
    num_decode = 0
    while num_decode < len(steps) and steps[num_decode].num_new == 1 and not steps[num_decode].whole:
        num_decode += 1

    offsets = torch.arange(size)
    tables = [_slots(step, offsets, size) for step in steps]
    writes = torch.cat([slots[step.past :] for step, slots in zip(steps, tables, strict=True)])

    decode_slots = torch.zeros(num_decode, 0, dtype=torch.int64)
    if num_decode:
        width = max(step.past + 1 for step in steps[:num_decode])
        decode_slots = torch.stack(
            [F.pad(slots, (0, width - len(slots)), value=int(slots[0])) for slots in tables[:num_decode]]
        )
    lengths = torch.tensor([step.past + 1 for step in steps[:num_decode]], dtype=torch.int64)

    prefill, row = [], num_decode
    for step, slots in zip(steps[num_decode:], tables[num_decode:], strict=True):
        prefill.append(PrefillPart(row, step.num_new, step.past, slots.to(kv.device), step.whole))
        row += step.num_new
    return PagedBatch(kv, num_decode, writes.to(kv.device), decode_slots.to(kv.device), lengths.to(kv.device), prefill)


def _slots(step: SequenceStep, offsets: torch.Tensor, size: int) -> torch.Tensor:
    blocks = torch.tensor(step.block_table, dtype=torch.int64)
    return (blocks[:, None] * size + offsets).flatten()[: step.past + step.num_new]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, K, T, D]
    value: torch.Tensor,  # [1, K, T, D]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    paged: PagedBatch | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function. Returns ([1, T, H, D], None)."""
    assert paged is not None, "the model was called without paged=PagedBatch"
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, D]
    keys, values = paged.kv.keys[layer], paged.kv.values[layer]
    keys.index_copy_(0, paged.write_slots, k)
    values.index_copy_(0, paged.write_slots, v)

    parts = []
    if paged.num_decode:
        parts.append(_decode(q[: paged.num_decode], keys, values, paged, scale, softcap, sliding_window))
    for part in paged.prefill:
        rows = slice(part.row, part.row + part.num_new)
        if part.past == 0:
            context_k, context_v = k[rows], v[rows]
        else:
            context_k, context_v = keys.index_select(0, part.slots), values.index_select(0, part.slots)
        parts.append(_prefill(q[rows], context_k, context_v, part.mask(sliding_window), scale, softcap))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[None], None


def _decode(
    q: torch.Tensor,  # [B, H, D]
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> torch.Tensor:  # [B, H, D]
    num_seqs, num_heads, dim = q.shape
    num_kv = keys.shape[1]
    width = batch.decode_slots.shape[1]
    flat = batch.decode_slots.flatten()
    k = keys.index_select(0, flat).view(num_seqs, width, num_kv, dim).permute(0, 2, 3, 1)  # [B, K, D, L]
    v = values.index_select(0, flat).view(num_seqs, width, num_kv, -1).transpose(1, 2)  # [B, K, L, D]
    grouped = q.reshape(num_seqs, num_kv, num_heads // num_kv, dim)
    scores = torch.matmul(grouped, k).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    mask = batch.decode_mask(window)
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    return torch.matmul(weights, v).reshape(num_seqs, num_heads, -1)


def _prefill(
    q: torch.Tensor,  # [n, H, D]
    k: torch.Tensor,  # [L, K, D]
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:  # [n, H, D]
    if softcap is not None:
        return _prefill_softcap(q, k, v, mask, scale, softcap)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _prefill_softcap(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    num_new, num_heads, dim = q.shape
    grouped = q.view(num_new, k.shape[1], -1, dim).permute(1, 2, 0, 3)  # [K, G, n, D]
    scores = torch.matmul(grouped, k.permute(1, 2, 0)[:, None]).float() * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(num_new, k.shape[0], dtype=torch.bool, device=q.device).tril()
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1).to(v.dtype)
    out = torch.matmul(weights, v.transpose(0, 1)[:, None])  # [K, G, n, D]
    return out.permute(2, 0, 1, 3).reshape(num_new, num_heads, -1)


def no_mask(*_: object, **__: object) -> None:
    """transformers' mask function: the packed batch carries its own masks."""
    return None


def register() -> None:
    """Make `attn_implementation="triptych"` known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)

"""The only part of `understand/` that touches tensors in bulk: encodes items, runs packed steps, keeps embeddings.

Owns the paged pools and the embeddings' tensors; what may live in them is decided by the scheduler.
"""

from __future__ import annotations

import psutil
import torch

from triptych.core.errors import ModelFault
from triptych.core.prepared import EncoderItem
from triptych.models.base import ServedModel
from triptych.models.paged_attention import PagedKv, SequenceStep, build_batch
from triptych.understand.schedule.encode import EncodeJob
from triptych.understand.schedule.rows import Row


class Runner:
    def __init__(self, served: ServedModel, kv: PagedKv) -> None:
        self._served = served
        self._kv = kv
        self._embeddings: dict[bytes, torch.Tensor] = {}  # [num_embeds, embed_width] dtype device

    def encode(self, job: EncodeJob) -> dict[bytes, torch.Tensor | ModelFault]:
        """Each item's embeddings, or what is wrong with it. One bad item does not spoil the others of its batch."""
        given = [item for item in job.items if item.embeds is not None]
        computed = [item for item in job.items if item.embeds is None]
        results: dict[bytes, torch.Tensor | ModelFault] = {item.key: self._from_given(item) for item in given}
        if computed:
            results |= self._from_features(computed)
        return results

    def _from_given(self, item: EncoderItem) -> torch.Tensor | ModelFault:
        tensor = torch.from_numpy(item.embeds).to(self._served.device, self._served.dtype)
        return self._checked(item, tensor)

    def _from_features(self, items: list[EncoderItem]) -> dict[bytes, torch.Tensor | ModelFault]:
        try:
            tensors = self._served.encode(items)
        except Exception as error:  # whatever model code raises is a fault of these items
            if len(items) == 1:
                return {items[0].key: ModelFault(f"the encoder failed on this item: {type(error).__name__}")}
            return {key: value for item in items for key, value in self._from_features([item]).items()}
        return {item.key: self._checked(item, tensor) for item, tensor in zip(items, tensors, strict=True)}

    def _checked(self, item: EncoderItem, tensor: torch.Tensor) -> torch.Tensor | ModelFault:
        expected = (item.num_embeds, self._served.info.embed_width)
        if tuple(tensor.shape) != expected:
            return ModelFault(f"the encoder gave {tuple(tensor.shape)} embeddings, expected {expected}")
        if not bool(torch.isfinite(tensor).all()):
            return ModelFault("the encoder gave values that are not finite for this item")
        return tensor

    def keep(self, key: bytes, embeddings: torch.Tensor) -> None:
        self._embeddings[key] = embeddings

    def drop(self, keys: list[bytes]) -> None:
        for key in keys:
            self._embeddings.pop(key, None)

    @property
    def block_bytes(self) -> int:
        """Of one KV block, over all layers."""
        return self._kv.num_bytes // self._kv.num_blocks

    def stats(self) -> dict[str, float]:
        """Memory, in bytes, by the names of the metrics table."""
        used, total = device_memory_bytes(self._served.device)
        return {
            "kv_bytes_total": self._kv.num_bytes,
            "device_memory_used_bytes": used,
            "device_memory_total_bytes": total,
        }

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, D] -> [N, V] float32."""
        return self._served.logits(hidden)

    def hidden(self, rows: list[Row]) -> torch.Tensor:
        """Compute `rows` as one packed batch; [N, D], the last states of the N rows that reach their sequence's end."""
        served, device = self._served, self._served.device
        token_ids = [
            t for row in rows for t in row.seq.tokens[row.seq.num_computed : row.seq.num_computed + row.num_new]
        ]
        embeds = served.embed(torch.tensor(token_ids, dtype=torch.int64, device=device))
        media_rows, media_embeds = self._media(rows)
        if media_rows is not None and media_embeds is not None:
            hidden_size = embeds.shape[1]
            embeds = embeds.index_copy(0, media_rows, media_embeds[:, :hidden_size])
        batch = build_batch(self._kv, [_sequence_step(row) for row in rows])
        hidden = served.forward(embeds, _positions(rows).to(device), batch, media_rows, media_embeds)
        ends, end = [], 0
        for row in rows:
            end += row.num_new
            if row.num_new == row.seq.num_uncomputed:
                ends.append(end - 1)
        if len(ends) == len(hidden):  # all rows are single tokens that end: nothing to choose
            return hidden
        return hidden[torch.tensor(ends, dtype=torch.int64, device=device)]

    def _media(self, rows: list[Row]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Which rows of the packed batch hold media, and their embeddings: only the slices that meet the windows."""
        places: list[torch.Tensor] = []
        slices: list[torch.Tensor] = []
        base = 0
        for row in rows:
            start, end = row.seq.num_computed, row.seq.num_computed + row.num_new
            for span in row.seq.request.spans:
                first, last = max(start, span.start), min(end, span.end)
                if first < last:
                    offset = span.embed_offset + first - span.start
                    source = self._embeddings[row.seq.item(span.item_idx).key]
                    slices.append(source[offset : offset + last - first])
                    places.append(torch.arange(base + first - start, base + last - start))
            base += row.num_new
        if not slices:
            return None, None
        return torch.cat(places).to(self._served.device), torch.cat(slices)


def device_memory_bytes(device: torch.device) -> tuple[int, int]:
    """(used by this engine, in all): on a GPU what torch's allocator holds, on a CPU the process' resident set."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    return psutil.Process().memory_info().rss, psutil.virtual_memory().total


def _sequence_step(row: Row) -> SequenceStep:
    seq = row.seq
    whole: tuple[tuple[int, int], ...] = ()
    if seq.request.whole_spans:
        end = seq.num_computed + row.num_new
        whole = tuple((s.start, s.end) for s in seq.pending_spans() if s.start < end)
    return SequenceStep(seq.block_table, seq.num_computed, row.num_new, whole)


def _positions(rows: list[Row]) -> torch.Tensor:
    """[A, T] int64; requests without media share a batch with multi-axis ones by repeating their one axis."""
    num_axes = max(1 if row.seq.request.positions is None else row.seq.request.positions.shape[0] for row in rows)
    return torch.cat([_row_positions(row).expand(num_axes, -1) for row in rows], dim=1)


def _row_positions(row: Row) -> torch.Tensor:
    request, start = row.seq.request, row.seq.num_computed
    end = start + row.num_new
    num_prompt = len(request.token_ids)
    if request.positions is None:
        return torch.arange(start, end)[None] + (request.position_offset if start >= num_prompt else 0)
    prompt = torch.from_numpy(request.positions[:, start : min(end, num_prompt)]).long()
    output = torch.arange(max(start, num_prompt), max(end, num_prompt)) + request.position_offset
    return torch.cat([prompt, output.expand(request.positions.shape[0], -1)], dim=1)

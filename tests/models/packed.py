"""Drive a `ServedModel` without an engine: packed batches, chunked prefill, embeddings scattered, greedy choice."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from triptych.core.prepared import EncoderItem
from triptych.models.base import Expanded
from triptych.models.paged_attention import PagedKv, SequenceStep, build_batch

BLOCK_TOKENS = 8
BLOCKS_PER_SEQUENCE = 128


@dataclass
class Prompt:
    expanded: Expanded
    items: list[EncoderItem] = field(default_factory=list)


@dataclass
class _Sequence:
    prompt: Prompt
    table: list[int]
    rows: torch.Tensor | None  # [T, embed_width] of the prompt's media tokens, zeros elsewhere
    is_media: torch.Tensor  # [T] bool
    token_ids: list[int]
    past: int = 0
    output: list[int] = field(default_factory=list)

    def chunk(self, limit: int) -> int:
        left = len(self.token_ids) - self.past
        end = self.past + min(limit, left)
        if self.prompt.expanded.whole_spans:
            for span in self.prompt.expanded.spans:
                if span.start < end < span.end:
                    end = span.end if span.start <= self.past else span.start
        return end - self.past

    def positions(self, num_new: int, num_axes: int) -> np.ndarray:
        index = np.arange(self.past, self.past + num_new)
        own = self.prompt.expanded.positions
        if own is None:
            return np.tile(index, (num_axes, 1))
        later = np.tile(index + self.prompt.expanded.position_offset, (num_axes, 1))
        known = min(max(0, own.shape[1] - self.past), num_new)
        later[:, :known] = own[:, self.past : self.past + known]
        return later


def first_logits(served, prompt: Prompt, num_axes: int = 1) -> torch.Tensor:
    """[V] float32: what the model says after the prompt."""
    kv = PagedKv(
        served.info.kv, num_blocks=128, block_size_tokens=BLOCK_TOKENS, dtype=served.dtype, device=served.device
    )
    with torch.inference_mode():
        sequence = _start(served, prompt, 0, 1)
        num_new = len(sequence.token_ids)
        embeds = served.embed(torch.tensor(sequence.token_ids))
        where = torch.from_numpy(sequence.positions(num_new, num_axes))
        hidden = served.forward(embeds, where, build_batch(kv, [SequenceStep(sequence.table, 0, num_new)]))
        return served.logits(hidden[-1:])[0]


def run_greedy(served, prompts: list[Prompt], num_new: int, chunk: int = 10_000, num_axes: int = 1) -> list[list[int]]:
    """The greedy tokens of every prompt, all in one packed batch."""
    info = served.info
    kv = PagedKv(
        info.kv,
        num_blocks=BLOCKS_PER_SEQUENCE * len(prompts),
        block_size_tokens=BLOCK_TOKENS,
        dtype=served.dtype,
        device=served.device,
    )
    with torch.inference_mode():
        sequences = [_start(served, prompt, i, len(prompts)) for i, prompt in enumerate(prompts)]
        while any(len(s.output) < num_new for s in sequences):
            _step(served, kv, [s for s in sequences if len(s.output) < num_new], chunk, num_axes)
    return [s.output for s in sequences]


def _start(served, prompt: Prompt, index: int, count: int) -> _Sequence:
    expanded = prompt.expanded
    is_media = torch.zeros(len(expanded.token_ids), dtype=torch.bool)
    rows = None
    if prompt.items:
        encoded = _encode_by_key(served, prompt.items)
        rows = torch.zeros(len(expanded.token_ids), served.info.embed_width, dtype=served.dtype)
        for span in expanded.spans:
            part = encoded[span.item_idx][span.embed_offset : span.embed_offset + span.length]
            rows[span.start : span.end] = part
            is_media[span.start : span.end] = True
    table = list(range(index, BLOCKS_PER_SEQUENCE * count, count))  # interleaved on purpose
    return _Sequence(prompt, table, rows, is_media, list(expanded.token_ids))


def _encode_by_key(served, items: list[EncoderItem]) -> list[torch.Tensor]:
    encoded: dict[int, torch.Tensor] = {}
    for key in {item.batch_key for item in items}:
        chosen = [i for i, item in enumerate(items) if item.batch_key == key]
        encoded |= dict(zip(chosen, served.encode([items[i] for i in chosen]), strict=True))
    return [encoded[i] for i in range(len(items))]


def _step(served, kv: PagedKv, sequences: list[_Sequence], chunk: int, num_axes: int) -> None:
    parts = sorted(((s, s.chunk(chunk)) for s in sequences), key=lambda part: part[1] != 1)
    steps, ids, positions, media = [], [], [], []
    for s, num_new in parts:
        whole = (
            tuple((span.start, span.end) for span in s.prompt.expanded.spans) if s.prompt.expanded.whole_spans else ()
        )
        reached = tuple(w for w in whole if w[0] < s.past + num_new and w[1] > s.past)
        steps.append(SequenceStep(s.table, s.past, num_new, reached))
        ids += s.token_ids[s.past : s.past + num_new]
        positions.append(s.positions(num_new, num_axes))
        mask = torch.zeros(num_new, dtype=torch.bool)
        known = s.is_media[s.past : s.past + num_new]
        mask[: len(known)] = known
        media.append(mask)

    embeds = served.embed(torch.tensor(ids)).clone()
    mask = torch.cat(media)
    rows = [s.rows[s.past : s.past + n][s.is_media[s.past : s.past + n]] for s, n in parts if s.rows is not None]
    media_rows = media_embeds = None
    if bool(mask.any()):
        media_rows, media_embeds = mask.nonzero()[:, 0], torch.cat(rows)
        embeds[media_rows] = media_embeds[:, : served.info.hidden_size]
    where = torch.from_numpy(np.concatenate(positions, axis=1))
    hidden = served.forward(embeds, where, build_batch(kv, steps), media_rows, media_embeds)

    row = 0
    for s, num_new in parts:
        row, s.past = row + num_new, s.past + num_new
        if s.past == len(s.token_ids):
            token = int(served.logits(hidden[row - 1 : row]).argmax())
            s.token_ids.append(token)
            s.output.append(token)

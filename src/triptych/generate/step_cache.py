"""Skips blocks of a denoiser for each row and branch of a batch by itself: some hit, others compute, in one forward.

It stands around the stock blocks' `forward`. At the first block, rows with TeaCache that hit leave before it, rows with
the first-block cache that hit leave after it; the others go on as a smaller batch, and the last block's output is put
together again. Without a cached row in the batch nothing is touched.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from triptych.generate.branch_cache import BranchCache, FirstBlockBranch, TeaBranch
from triptych.generate.kinds.base import Kind

UNBATCHED = frozenset({"image_rotary_emb", "rotary_emb"})  # shared by all rows


_installing = threading.Lock()


def step_cache_of(kind: Kind) -> StepCache:
    """The kind's own, put around its blocks on first use."""
    with _installing:
        if kind.installed_cache is None:
            kind.installed_cache = StepCache(kind)
        installed: StepCache = kind.installed_cache
        return installed


class StepCache:
    """Does nothing outside `active`. Forwards may run on several threads at once; each has its own state."""

    def __init__(self, kind: Kind) -> None:
        blocks = [block for name in kind.blocks for block in getattr(kind.denoiser, name)]
        assert len(blocks) > 1, "a kind with a block list has more than one block"
        self.kind = kind
        self.first, self.last = blocks[0], len(blocks) - 1
        self.returns_pair = False  # (encoder's, picture's) hidden states, as two-stream blocks do
        self._threads = threading.local()
        for index, block in enumerate(blocks):
            names = list(inspect.signature(block.forward).parameters)
            block.forward = partial(self._forward, index, block.forward, names)

    @contextmanager
    def active(self, entries: Sequence[BranchCache | None]) -> Iterator[None]:
        """For one forward, on this thread, of a batch with these entries, one a row of the batch; None computes
        always."""
        self._threads.forward = _CachedForward(self, entries)
        try:
            yield
        finally:
            self._threads.forward = None

    def _forward(self, index: int, block: Callable[..., Any], names: list[str], *args: Any, **kwargs: Any) -> Any:
        forward: _CachedForward | None = getattr(self._threads, "forward", None)
        if forward is None:
            return block(*args, **kwargs)
        return forward.run(index, block, dict(zip(names, args, strict=False)) | kwargs)


class _CachedForward:
    """The state of one forward: which rows of the batch are left, and what they had before the blocks."""

    def __init__(self, owner: StepCache, entries: Sequence[BranchCache | None]) -> None:
        self._owner = owner
        self._entries = entries
        self._unbatched = frozenset() if owner.kind.has_batched_rope else UNBATCHED
        self._rows: list[int] = list(range(len(entries)))  # that compute
        self._picked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a whole tensor and its rows' part
        self._start: torch.Tensor | None = None  # [B, ...] before the first block
        self._after_head: dict[int, torch.Tensor] = {}  # [1, ...] by row

    def run(self, index: int, block: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Block `index` of the forward."""
        if index == 0:
            self._start = inputs["hidden_states"]
            self._leave(self._tea_hits(inputs))
        out = self._run(block, inputs)
        if index == 0:
            out = self._after_first(out)
        return self._finish(out) if index == self._owner.last else out

    def _tea_hits(self, inputs: dict[str, Any]) -> set[int]:
        tea = {row: entry for row, entry in enumerate(self._entries) if isinstance(entry, TeaBranch)}
        if not tea:
            return set()
        signal = self._owner.kind.modulated_input(self._owner.first, inputs)
        return {row for row, entry in tea.items() if entry.decide(signal[row : row + 1])}

    def _leave(self, hits: set[int]) -> None:
        if hits:
            self._rows = [row for row in self._rows if row not in hits]
            self._picked.clear()

    def _run(self, block: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """The block on the rows that compute; they may come whole or as the smaller batch of the block before."""
        if not self._rows:
            hidden = inputs["hidden_states"]
            return (inputs.get("encoder_hidden_states"), hidden) if self._owner.returns_pair else hidden
        if len(self._rows) < len(self._entries):
            inputs = {name: value if name in self._unbatched else self._pick(value) for name, value in inputs.items()}
        out = block(**inputs)
        self._owner.returns_pair = isinstance(out, tuple)
        return out

    def _pick(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._pick(part) for part in value)
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != len(self._entries):
            return value
        if id(value) not in self._picked:
            self._picked[id(value)] = (value, value[self._rows])
        return self._picked[id(value)][1]

    def _after_first(self, out: Any) -> Any:
        """Let rows go whose first block hardly changed; the first block's output without them."""
        assert self._start is not None
        hits = set()
        for position, row in enumerate(self._rows):
            entry = self._entries[row]
            if isinstance(entry, FirstBlockBranch):
                head = _hidden(out)[position : position + 1]
                self._after_head[row] = head
                if entry.decide(head - self._start[row : row + 1]):
                    hits.add(row)
        if not hits:
            return out
        stay = [position for position, row in enumerate(self._rows) if row not in hits]
        self._leave(hits)
        if not stay:
            return out
        return tuple(part[stay] for part in out) if isinstance(out, tuple) else out[stay]

    def _finish(self, out: Any) -> Any:
        assert self._start is not None
        hidden = _hidden(out)
        position_of = {row: position for position, row in enumerate(self._rows)}
        parts = []
        for row, entry in enumerate(self._entries):
            base = self._after_head[row] if row in self._after_head else self._start[row : row + 1]
            position = position_of.get(row)
            if position is None:
                assert entry is not None
                parts.append(base + entry.hit())
                continue
            parts.append(hidden[position : position + 1])
            if entry is not None:
                entry.keep(parts[-1], base)
        whole = hidden if len(position_of) == len(self._entries) else torch.cat(parts)
        return (*out[:-1], whole) if isinstance(out, tuple) else whole


def _hidden(out: Any) -> torch.Tensor:
    return out[-1] if isinstance(out, tuple) else out

"""First-block step cache, for each row and branch of a batch by itself: some rows hit, others compute, in one forward.

The first block always runs. Where its residual has hardly moved since the branch's last computed step, the other blocks
are skipped and what they added then is added again. It works on the stock blocks, through their `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Row

MAX_CONSECUTIVE_HITS = 3
UNBATCHED = frozenset({"image_rotary_emb", "rotary_emb"})  # shared by all rows


@dataclass(slots=True)
class BranchCache:
    """One branch of one row. The first and the last step always compute."""

    threshold: float
    num_steps: int
    step: int = 0
    num_hits: int = 0
    num_consecutive: int = 0
    head_residual: torch.Tensor | None = None  # of the first block, at the last computed step
    next_head: torch.Tensor | None = None  # of this step, kept once the step has been computed
    tail_residual: torch.Tensor | None = None  # of all the others

    def at(self, step: int) -> BranchCache:
        self.step = step
        return self

    def decide(self, head_residual: torch.Tensor) -> bool:
        """Whether this step may skip. Nothing is counted before the forward is through: a failed one is tried again."""
        before = self.head_residual
        may_skip = 0 < self.step < self.num_steps - 1 and self.num_consecutive < MAX_CONSECUTIVE_HITS
        if before is not None and may_skip:
            moved = (head_residual - before).abs().mean() / before.abs().mean()
            if float(moved) < self.threshold:
                return True
        self.next_head = head_residual
        return False

    def hit(self) -> torch.Tensor:
        """The step was skipped: what to add."""
        assert self.tail_residual is not None
        self.num_hits += 1
        self.num_consecutive += 1
        return self.tail_residual

    def keep(self, tail_residual: torch.Tensor) -> None:
        """The step was computed."""
        self.num_consecutive = 0
        self.head_residual, self.tail_residual = self.next_head, tail_residual


class FirstBlockCache:
    """Installed once on a kind's denoiser; does nothing outside `active`. Used by the step loop's thread alone."""

    def __init__(self, kind: Kind) -> None:
        blocks = [block for name in kind.blocks for block in getattr(kind.denoiser, name)]
        assert len(blocks) > 1, "a kind with a block list has more than one block"
        self._last = len(blocks) - 1
        self._unbatched = frozenset() if kind.has_batched_rope else UNBATCHED
        self._entries: Sequence[BranchCache | None] = ()
        self._missed: torch.Tensor | None = None  # [M] rows that compute; None: all do
        self._after_head: torch.Tensor | None = None
        self._returns_pair = False  # (encoder's, picture's) hidden states, as two-stream blocks do
        for index, block in enumerate(blocks):
            block.forward = partial(self._forward, index, block.forward)

    @contextmanager
    def active(self, entries: Sequence[BranchCache | None]) -> Iterator[None]:
        """For one forward of a batch with these entries, one a row of the batch; None computes always."""
        self._entries = entries
        try:
            yield
        finally:
            self._entries, self._missed, self._after_head = (), None, None

    def _forward(self, index: int, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._entries:
            return block(*args, **kwargs)
        if index == 0:
            out = block(*args, **kwargs)
            self._returns_pair = isinstance(out, tuple)
            self._decide(_hidden_in(args, kwargs), _hidden_out(out))
            return out
        out = self._run_missed(block, args, kwargs)
        return self._finish(out) if index == self._last else out

    def _decide(self, before: torch.Tensor, after: torch.Tensor) -> None:
        hits = [
            entry is not None and entry.decide(after[row : row + 1] - before[row : row + 1])
            for row, entry in enumerate(self._entries)
        ]
        self._after_head = after
        missed = [row for row, hit in enumerate(hits) if not hit]
        self._missed = torch.tensor(missed, device=after.device) if any(hits) else None

    def _run_missed(self, block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._missed is None:
            return block(*args, **kwargs)
        hidden = _hidden_in(args, kwargs)
        encoder = kwargs.get("encoder_hidden_states")
        if not len(self._missed):
            return hidden if not self._returns_pair else (encoder, hidden)
        out = block(
            *(self._pick(value) for value in args),
            **{name: value if name in self._unbatched else self._pick(value) for name, value in kwargs.items()},
        )
        if not isinstance(out, tuple):
            return hidden.index_copy(0, self._missed, out)
        encoder_out, hidden_out = out
        if encoder_out is not None and encoder is not None:
            encoder_out = encoder.index_copy(0, self._missed, encoder_out)
        return encoder_out, hidden.index_copy(0, self._missed, hidden_out)

    def _pick(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._pick(part) for part in value)
        is_batched = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == len(self._entries)
        return value[self._missed] if is_batched else value

    def _finish(self, out: Any) -> Any:
        assert self._after_head is not None
        hidden = _hidden_out(out)
        missed = set(range(len(self._entries))) if self._missed is None else set(self._missed.tolist())
        rows = []
        for row, entry in enumerate(self._entries):
            head = self._after_head[row : row + 1]
            if row in missed:
                rows.append(hidden[row : row + 1])
                if entry is not None:
                    entry.keep(rows[-1] - head)
            else:
                assert entry is not None
                rows.append(head + entry.hit())
        whole = torch.cat(rows)
        return (*out[:-1], whole) if isinstance(out, tuple) else whole


def new_caches(row: Row, threshold: float) -> tuple[BranchCache, ...]:
    """One a branch of the row."""
    return tuple(BranchCache(threshold, row.num_steps) for _ in row.branches)


def _hidden_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _hidden_out(out: Any) -> torch.Tensor:
    return out[-1] if isinstance(out, tuple) else out

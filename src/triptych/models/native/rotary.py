"""Cosines and sines of positions, from the stock rotary module, kept in a table where one axis says it all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

FIRST_TABLE = 1024


class RotaryTable:
    """`to_position_ids`: the family's [A, T] -> what its rotary module takes. Values are float32, [T, head_dim]."""

    def __init__(self, rotary: nn.Module, to_position_ids: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._rotary = rotary
        self._to_position_ids = to_position_ids
        self._like = torch.zeros(1, dtype=torch.float32)
        self._cos = self._sin = torch.zeros(0, 0)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[A, T] int64. Rows whose axes agree, which is all text, are looked up; others are computed."""
        first = positions[0]
        if len(positions) > 1 and not bool((positions == first).all()):
            return self._compute(positions)
        highest = int(first.max())
        if highest >= len(self._cos):
            length = max(FIRST_TABLE, 2 * len(self._cos), highest + 1)
            self._cos, self._sin = self._compute(torch.arange(length).expand(len(positions), -1))
        return self._cos.index_select(0, first), self._sin.index_select(0, first)

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(self._like, self._to_position_ids(positions))
        return cos[0].contiguous(), sin[0].contiguous()

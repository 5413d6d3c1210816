"""Weights in the order in which the kernels read them: groups of output columns, each one contiguous stream.

The layouts are described at the heads of `src/gemm.h` and `src/panels.h`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

GROUP = 32
PANEL = 16


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] float32 or bfloat16 -> flat; N is filled up with zeros to a multiple of 32. K % 32 == 0 for bfloat16."""
    columns, width = weight.shape
    weight = F.pad(weight, (0, 0, 0, -columns % GROUP))
    groups = weight.shape[0] // GROUP
    if weight.dtype == torch.float32:
        return weight.view(groups, GROUP, width).transpose(1, 2).contiguous().view(-1)
    tiles = weight.view(groups, 2, 16, width // 32, 16, 2)  # [group, half, column, step, pair, 2]
    return tiles.permute(0, 3, 1, 4, 2, 5).contiguous().view(-1)


def pack_panels(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] of any type -> flat float32, for the products of many rows without tiles. N % 16 == 0."""
    return _panels(weight.float(), unit=1)


def pack_pairs(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> flat bfloat16, the same with two neighbours of a sum together. N % 16 == 0, K % 2 == 0."""
    return _panels(weight.bfloat16(), unit=2)


def _panels(weight: torch.Tensor, unit: int) -> torch.Tensor:
    columns, width = weight.shape
    return weight.view(columns // PANEL, PANEL, width // unit, unit).transpose(1, 2).contiguous().view(-1)


def is_narrow(weight: torch.Tensor) -> bool:
    """Whether every element of this float32 [N, K] fits bfloat16 exactly, as weights do that were saved in it."""
    if weight.dtype != torch.float32 or weight.shape[1] % 32:
        return False
    return not bool((weight.contiguous().view(torch.int32) & 0xFFFF).any())


def interleave_rows(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[I, K] twice -> [2 I, K] in runs of 16 rows, gate then up, so that one group holds a column of each."""
    both = torch.stack([gate.view(-1, 16, gate.shape[1]), up.view(-1, 16, up.shape[1])], dim=1)
    return both.view(-1, gate.shape[1])


def pack_vector(vector: torch.Tensor | None) -> torch.Tensor | None:
    """A norm's weight or a bias: float32, filled up with zeros to a multiple of 32."""
    if vector is None:
        return None
    return F.pad(vector.detach().float(), (0, -len(vector) % GROUP)).contiguous()

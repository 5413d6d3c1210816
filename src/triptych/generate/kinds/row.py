"""One request on the device: its latent, its own scheduler, its own random generator, and its text embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from triptych.generate.request import GenerateRequest

Conditioning = dict[str, torch.Tensor]  # keyword arguments of the denoiser, each [1, ...]


@dataclass(slots=True)
class Inpaint:
    """What the part of the picture that stays is put back from after each step. All at the latent's size."""

    mask: torch.Tensor  # [1, 1, h, w], 1 where drawn anew
    image_latents: torch.Tensor
    noise: torch.Tensor


@dataclass(slots=True)
class Row:
    """`branches`: the prompt's conditioning first, then the negative one when guidance runs two branches.

    `step` counts finished steps; `timesteps[step]` is the next one. Touched by one stage at a time.
    """

    request: GenerateRequest
    branches: tuple[Conditioning, ...]
    latents: torch.Tensor  # [1, ...]
    scheduler: Any
    timesteps: torch.Tensor  # [S]
    generator: torch.Generator
    inpaint: Inpaint | None = None
    step: int = 0
    caches: tuple[Any, ...] = ()  # one `branch_cache.BranchCache` a branch, or none
    clean_estimate: torch.Tensor | None = field(default=None, repr=False)  # [1, ...], kept when a preview is due

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)


def merge(parts: list[Conditioning]) -> Conditioning:
    """Stack the branches of a batch: [1, ...] each to [B, ...]. Sequences of unequal length are padded with zeros."""
    return {name: _stack([part[name] for part in parts]) for name in parts[0]}


def without_padding(embeds: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Text [1, L, D] and its mask [1, L], cut after the last token that counts. What is cut has weight 0 in attention,
    and would cost as much as the rest at every step."""
    kept = mask[0].nonzero()
    length = int(kept.max()) + 1 if len(kept) else 1
    return embeds[:, :length].contiguous(), mask[:, :length].contiguous()


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    longest = max(tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in tensors)
    padded = [tensor if tensor.dim() < 2 or tensor.shape[1] == longest else _pad(tensor, longest) for tensor in tensors]
    return torch.cat(padded)


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    shape = (tensor.shape[0], length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=1)

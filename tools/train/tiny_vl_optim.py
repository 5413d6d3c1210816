"""Muon for the matrices inside the blocks, AdamW for the rest; and a running mean of the weights.

The merger's 768 by 768 matrix is left to AdamW: to orthogonalise it costs as much as nearly all others together.
"""

from __future__ import annotations

from pathlib import Path

import torch
from numerics import PASS_DTYPE


def choose_threads(most: int = 2) -> int:
    """One thread on a busy machine, where every parallel region would wait for a thread that is not running."""
    load = Path("/proc/loadavg")
    if not load.exists():
        return most
    others = int(load.read_text().split()[3].split("/")[0]) - torch.get_num_threads()
    return max(1, min(most, most - others + 1))


POLYNOMIALS = ((8.2872, -23.5959, 17.3004), (4.1071, -2.9479, 0.5448), (3.9487, -2.9089, 0.5518))  # Polar Express
MEAN_GAIN = 1.25  # of the three, over the singular values met in this model's updates


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz: each matrix of the stack with its singular values pushed towards one.

    Three steps, each with coefficients of its own, spread the values as four of the usual five do, at 3/5 of the cost.
    """
    x = matrices.to(PASS_DTYPE)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in POLYNOMIALS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.float() / MEAN_GAIN
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, scaled to the size of an AdamW update; matrices of one shape go in one call."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.01, divided=None):
        """`divided(function, stacks)` applies the function to every stack; processes that train together share it."""
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.divided = divided or (lambda function, stacks: [function(stack) for stack in stacks])

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape: dict[torch.Size, list] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_shape.setdefault(param.shape, []).append(param)
            stacks = []
            for params in by_shape.values():
                updates = []
                for param in params:
                    buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    buffer.lerp_(param.grad, 1 - group["momentum"])
                    updates.append(param.grad.lerp(buffer, group["momentum"]))
                stacks.append(torch.stack(updates))
            for (shape, params), updates in zip(by_shape.items(), self.divided(orthogonal, stacks), strict=True):
                scale = 0.2 * max(shape) ** 0.5
                for param, update in zip(params, updates, strict=True):
                    param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def make_optimizers(model, heads, lr: float, divided=None):
    blocks = [model.model.visual.blocks, model.model.language_model.layers]
    matrices = [param for block in blocks for param in block.parameters() if param.ndim == 2]
    inside = {id(param) for param in matrices}
    rest = [param for param in [*model.parameters(), *heads.parameters()] if id(param) not in inside]
    return [Muon(matrices, lr, divided=divided), torch.optim.AdamW(rest, lr, betas=(0.9, 0.98), weight_decay=0.01)]


class RunningMean:
    """Exponential mean of the weights: what is judged and exported while the rate is still high."""

    def __init__(self, model, decay: float = 0.99):
        self.decay, self.steps = decay, 0
        self.weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model) -> None:
        self.steps += 1
        share = max(1 - self.decay, 1 / (self.steps + 1))
        for name, weight in model.state_dict().items():
            self.weights[name].lerp_(weight, share)

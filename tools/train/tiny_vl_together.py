"""Several processes that train as one: each has batches of its own, their gradients are averaged in shared memory.

On two cores this does nearly twice the work of one process, where two threads of one do hardly more than one thread.
"""

from __future__ import annotations

import torch
import torch.multiprocessing as mp

PATIENCE_S = 900  # for the others; the first also judges and saves


class Together:
    """Shared by `num` processes. Every one calls `average` after each backward pass, with the same parameters."""

    def __init__(self, num: int, params):
        self.num = num
        self.grads = torch.zeros(num, sum(param.numel() for param in params)).share_memory_()
        self.given = torch.zeros(num, len(params), dtype=torch.bool).share_memory_()
        self.seconds_left = torch.zeros(1, dtype=torch.double).share_memory_()
        self.barrier = mp.get_context("spawn").Barrier(num)

    def agree(self, rank: int, seconds_left: float) -> float:
        """The first one's clock, for all: it decides the rate and the end."""
        if rank == 0:
            self.seconds_left[0] = seconds_left
        self.barrier.wait(PATIENCE_S)
        agreed = self.seconds_left.item()
        self.barrier.wait(PATIENCE_S)
        return agreed

    @torch.no_grad()
    def average(self, rank: int, params) -> None:
        """Replaces each gradient by the mean of all; a process without one for a parameter counts as zero."""
        if self.num == 1:
            return
        parts = [param.numel() for param in params]
        for index, (param, mine) in enumerate(zip(params, self.grads[rank].split(parts), strict=True)):
            self.given[rank, index] = param.grad is not None
            mine.copy_(param.grad.flatten()) if param.grad is not None else mine.zero_()
        self.barrier.wait(PATIENCE_S)
        given = self.given.any(0).tolist()
        for param, has, mean in zip(params, given, self.grads.mean(0).split(parts), strict=True):
            param.grad = mean.view_as(param) if has else None
        self.barrier.wait(PATIENCE_S)

    def divided(self, rank: int, function, stacks) -> list[torch.Tensor]:
        """The function of every stack [n, ...], to which each process brings its part of the n."""
        if self.num == 1:
            return [function(stack) for stack in stacks]
        sizes = [stack.numel() for stack in stacks]
        parts = self.grads[0, : sum(sizes)].split(sizes)  # nobody needs the gradients any more
        results = [part.view_as(stack) for part, stack in zip(parts, stacks, strict=True)]
        for stack, result in zip(stacks, results, strict=True):
            mine = slice(len(stack) * rank // self.num, len(stack) * (rank + 1) // self.num)
            if mine.start < mine.stop:
                result[mine] = function(stack[mine])
        self.barrier.wait(PATIENCE_S)
        results = [result.clone() for result in results]
        self.barrier.wait(PATIENCE_S)
        return results

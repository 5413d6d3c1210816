"""One denoising step of a batch of rows: gather branches, run the denoiser, guide, advance each row by itself.

A row that fails (NaN, or an exception that only it causes) is reported and the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from triptych.core.errors import ModelFault, TriptychError
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Conditioning, Row, merge
from triptych.generate.step_cache import BranchCache, FirstBlockCache


@dataclass(slots=True)
class StepOutcome:
    """`failures`: error by index into the rows of the step. `ran_out_of_memory`: the batch was too large for one go."""

    failures: dict[int, TriptychError] = field(default_factory=dict)
    ran_out_of_memory: bool = False


class StepRunner:
    """Runs steps on one kind. `max_forward_tokens` splits a step into several forwards where memory is short: with room
    for one branch, guidance runs as two passes."""

    def __init__(self, kind: Kind, *, max_forward_tokens: int = 1 << 18) -> None:
        self.kind = kind
        self._max_forward_tokens = max_forward_tokens
        self._cache = FirstBlockCache(kind) if kind.blocks and kind.cache_threshold is not None else None

    def step(self, rows: Sequence[Row], *, keep_estimates: Sequence[bool] = ()) -> StepOutcome:
        """Advance each row by one step, in place. Rows share a batch key; their timesteps may differ."""
        outcome = StepOutcome()
        predicted = self._predict_apart(rows, outcome)
        for index, row in enumerate(rows):
            if index in outcome.failures:
                continue
            keep = bool(keep_estimates) and keep_estimates[index]
            self._advance(index, row, predicted[index], outcome, keep)
        return outcome

    def _predict_apart(self, rows: Sequence[Row], outcome: StepOutcome) -> list[torch.Tensor]:
        """The guided prediction of each row. When the batch fails, each row is tried alone to find the culprit."""
        try:
            return self.predict(rows)
        except Exception as error:  # whatever third-party code raises: one of these rows is at fault, find it
            if len(rows) == 1:
                outcome.failures[0] = _fault(error)
                return [rows[0].latents]
            outcome.ran_out_of_memory = is_out_of_memory(error)
        predicted = []
        for index, row in enumerate(rows):
            alone = StepOutcome()
            predicted += self._predict_apart([row], alone)
            if alone.failures:
                outcome.failures[index] = alone.failures[0]
        return predicted

    def predict(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Guided noise predictions, [1, ...] a row. Changes no row."""
        latents, timesteps, branches = [], [], []
        caches: list[BranchCache | None] = []
        for row in rows:
            timestep = row.timesteps[row.step]
            scaled = _scaled(row, timestep)
            for index in reversed(range(len(row.branches))):
                branch = row.branches[index]
                caches.append(row.caches[index].at(row.step) if row.caches else None)
                latents.append(scaled)
                timesteps.append(timestep)
                branches.append(branch)
        outputs = self._forward(latents, timesteps, branches, caches, rows[0])
        return self._guide(rows, outputs)

    def _forward(
        self,
        latents: list[torch.Tensor],
        timesteps: list[torch.Tensor],
        branches: list[Conditioning],
        caches: list[BranchCache | None],
        row: Row,
    ) -> torch.Tensor:
        room = max(1, self._max_forward_tokens // self.kind.branch_tokens(row.request))
        parts = []
        for start in range(0, len(latents), room):
            part = slice(start, start + room)
            inputs = (torch.cat(latents[part]), torch.stack(timesteps[part]), merge(branches[part]), row.request)
            if self._cache is None or not any(caches[part]):
                parts.append(self.kind.forward(*inputs))
            else:
                with self._cache.active(caches[part]):
                    parts.append(self.kind.forward(*inputs))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _guide(self, rows: Sequence[Row], outputs: torch.Tensor) -> list[torch.Tensor]:
        guided, offset = [], 0
        for row in rows:
            num_branches = len(row.branches)
            mine = outputs[offset : offset + num_branches]
            offset += num_branches
            prediction = mine if num_branches == 1 else self.kind.guide(mine[1:2], mine[0:1], row.request)
            guided.append(self.kind.after_guidance(prediction))
        return guided

    def _advance(self, index: int, row: Row, predicted: torch.Tensor, outcome: StepOutcome, keep: bool) -> None:
        try:
            self.kind.advance(row, predicted, keep_estimate=keep)
        except Exception as error:
            outcome.failures[index] = _fault(error)
            return
        if not bool(torch.isfinite(row.latents).all()):
            outcome.failures[index] = ModelFault(f"the latent is not finite after step {row.step} of {row.num_steps}")


def _scaled(row: Row, timestep: torch.Tensor) -> torch.Tensor:
    scale = getattr(row.scheduler, "scale_model_input", None)
    return row.latents if scale is None else scale(row.latents, timestep)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or in host memory (where torch has no class for it)."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _fault(error: Exception) -> ModelFault:
    return ModelFault(f"the model failed: {type(error).__name__}")

"""One denoising step of a batch of rows: gather branches, run the denoiser, guide, advance each row by itself.

A row that fails (NaN, or an exception that only it causes) is reported and the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from triptych.core.errors import ModelFault, TriptychError
from triptych.generate.branch_cache import BranchCache
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Conditioning, Row, merge
from triptych.generate.step_cache import step_cache_of


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

    def step(self, rows: Sequence[Row], *, keep_estimates: Sequence[bool] = ()) -> StepOutcome:
        """Advance each row by one step, in place. Rows share a batch key; their timesteps may differ.

        A row that fails is as if it had left at the edge before: the others' predictions come from a batch without it,
        to the bit. Only a batch that ran out of memory is run row by row.
        """
        outcome = StepOutcome()
        predicted = self._predict_healthy(rows, outcome)
        for index, prediction in predicted.items():
            keep = bool(keep_estimates) and keep_estimates[index]
            self._advance(index, rows[index], prediction, outcome, keep)
        return outcome

    def _predict_healthy(self, rows: Sequence[Row], outcome: StepOutcome) -> dict[int, torch.Tensor]:
        """The guided prediction of each row that has one, by index. What fails is left out, the others run again."""
        healthy = list(range(len(rows)))
        while healthy:
            batch = [rows[index] for index in healthy]
            predicted = self._predict_all(batch, outcome)
            faults = {
                healthy[position]: _fault_of(batch[position], prediction)
                for position, prediction in enumerate(predicted)
                if not _is_sound(prediction)
            }
            if not faults:
                pairs = zip(healthy, predicted, strict=True)
                return {index: found for index, found in pairs if isinstance(found, torch.Tensor)}
            outcome.failures |= faults
            healthy = [index for index in healthy if index not in faults]
        return {}

    def _predict_all(self, rows: Sequence[Row], outcome: StepOutcome) -> list[torch.Tensor | Exception]:
        """Together; where that raises, each alone, which finds the row at fault."""
        try:
            return list(self.predict(rows))
        except Exception as error:  # whatever third-party code raises
            outcome.ran_out_of_memory |= len(rows) > 1 and is_out_of_memory(error)
            if len(rows) == 1:
                return [error]
        return [found for row in rows for found in self._predict_all([row], outcome)]

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
            if not any(caches[part]):
                parts.append(self.kind.forward(*inputs))
            else:
                with step_cache_of(self.kind).active(caches[part]):
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
        for cache in row.caches:
            cache.settle()
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


def _is_sound(prediction: torch.Tensor | Exception) -> bool:
    return isinstance(prediction, torch.Tensor) and bool(torch.isfinite(prediction).all())


def _fault_of(row: Row, prediction: torch.Tensor | Exception) -> ModelFault:
    if isinstance(prediction, Exception):
        return _fault(prediction)
    return ModelFault(f"the prediction is not finite at step {row.step + 1} of {row.num_steps}")


def _fault(error: Exception) -> ModelFault:
    return ModelFault(f"the model failed: {type(error).__name__}")

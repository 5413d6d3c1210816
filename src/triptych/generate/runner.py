"""One denoising step of a batch of rows: gather branches, run the denoiser, guide, advance each row by itself.

A row that fails (NaN, or an exception that only it causes) is reported and the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from triptych.core.errors import ModelFault, TriptychError
from triptych.generate.branch_cache import BranchCache
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Conditioning, Row, merge
from triptych.generate.schedule import ONE_WORKER, Way
from triptych.generate.step_cache import step_cache_of
from triptych.generate.step_workers import StepWorkers


@dataclass(slots=True)
class StepOutcome:
    """`failures`: error by index into the rows of the step. `ran_out_of_memory`: the batch was too large for one go."""

    failures: dict[int, TriptychError] = field(default_factory=dict)
    ran_out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class _Branch:
    """What one branch of one row brings to a forward."""

    latents: torch.Tensor  # [1, ...], scaled for the denoiser
    timestep: torch.Tensor  # []
    conditioning: Conditioning
    cache: BranchCache | None


class StepRunner:
    """Runs steps on one kind. `max_forward_tokens` splits a step into several forwards where memory is short: with room
    for one branch, guidance runs as two passes. `workers` run parts of a step at the same time; without them a step is
    run by the caller's thread alone, whatever the way."""

    def __init__(self, kind: Kind, *, max_forward_tokens: int = 1 << 18, workers: StepWorkers | None = None) -> None:
        self.kind = kind
        self._max_forward_tokens = max_forward_tokens
        self._workers = workers

    def step(self, rows: Sequence[Row], *, keep_estimates: Sequence[bool] = (), way: Way = ONE_WORKER) -> StepOutcome:
        """Advance each row by one step, in place. Rows share a batch key; their timesteps may differ.

        A row that fails is as if it had left at the edge before: the others' predictions come from a batch without it,
        to the bit. Only a batch that ran out of memory is run row by row.
        """
        outcome = StepOutcome()
        predicted = self._predict_healthy(rows, outcome, way)
        for index, prediction in predicted.items():
            keep = bool(keep_estimates) and keep_estimates[index]
            self._advance(index, rows[index], prediction, outcome, keep)
        return outcome

    def _predict_healthy(self, rows: Sequence[Row], outcome: StepOutcome, way: Way) -> dict[int, torch.Tensor]:
        """The guided prediction of each row that has one, by index. What fails is left out, the others run again."""
        healthy = list(range(len(rows)))
        while healthy:
            batch = [rows[index] for index in healthy]
            predicted = self._predict_all(batch, outcome, way)
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

    def _predict_all(self, rows: Sequence[Row], outcome: StepOutcome, way: Way) -> list[torch.Tensor | Exception]:
        """Together; where that raises, each alone, which finds the row at fault."""
        try:
            return list(self.predict(rows, way))
        except Exception as error:  # whatever third-party code raises
            outcome.ran_out_of_memory |= len(rows) > 1 and is_out_of_memory(error)
            if len(rows) == 1:
                return [error]
        return [found for row in rows for found in self._predict_all([row], outcome, way)]

    def predict(self, rows: Sequence[Row], way: Way = ONE_WORKER) -> list[torch.Tensor]:
        """Guided noise predictions, [1, ...] a row. Changes no row."""
        entries: list[_Branch] = []
        for row in rows:
            timestep = row.timesteps[row.step]
            scaled = _scaled(row, timestep)
            for index in reversed(range(len(row.branches))):
                cache = row.caches[index].at(row.step) if row.caches else None
                entries.append(_Branch(scaled, timestep, row.branches[index], cache))
        return self._guide(rows, torch.cat(self._forward_all(entries, rows[0], way)))

    def _forward_all(self, entries: list[_Branch], row: Row, way: Way) -> list[torch.Tensor]:
        """One part for each worker, and each part in as many forwards as memory asks for. `row` is any of them."""
        if self._workers is None:
            return self._forwards(entries, row, 1)
        num_parts = min(way.num_workers, len(entries))
        edges = [round(part * len(entries) / num_parts) for part in range(num_parts + 1)]
        parts = [partial(self._forwards, entries[start:end], row, num_parts) for start, end in pairwise(edges)]
        return [output for outputs in self._workers.run(parts, way) for output in outputs]

    def _forwards(self, entries: list[_Branch], row: Row, num_parts: int) -> list[torch.Tensor]:
        room = max(1, self._max_forward_tokens // self.kind.branch_tokens(row.request) // num_parts)
        return [self._forward(entries[start : start + room], row) for start in range(0, len(entries), room)]

    def _forward(self, entries: list[_Branch], row: Row) -> torch.Tensor:
        inputs = (
            torch.cat([entry.latents for entry in entries]),
            torch.stack([entry.timestep for entry in entries]),
            merge([entry.conditioning for entry in entries]),
            row.request,
        )
        caches = [entry.cache for entry in entries]
        if not any(caches):
            return self.kind.forward(*inputs)
        with step_cache_of(self.kind).active(caches):
            return self.kind.forward(*inputs)

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

"""What the step scheduler knows of a request: its batch key, its length and its cost. No tensor, no prompt."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.generate.schedule.way import Way


@dataclass(frozen=True, slots=True)
class BatchKey:
    """What rows of one denoising step must agree on (G2). Steps, guidance scale, seed and timestep are not part of it.

    `variant` holds what else a kind of model cannot mix in one forward (the shape of its text embeddings).
    """

    model: str
    width_px: int
    height_px: int
    num_frames: int = 1
    variant: str = ""

    def __str__(self) -> str:
        size = f"{self.width_px}x{self.height_px}"
        return f"{size}x{self.num_frames}f" if self.num_frames > 1 else size


@dataclass(frozen=True, slots=True)
class Job:
    """One row. `num_branches` is 2 with classifier-free guidance, else 1; `branch_tokens` is the cost of one branch in
    one step, in latent tokens."""

    job_id: str
    key: BatchKey
    num_steps: int
    num_branches: int
    branch_tokens: int

    def __post_init__(self) -> None:
        assert min(self.num_steps, self.num_branches, self.branch_tokens) > 0, self

    @property
    def step_tokens(self) -> int:
        return self.num_branches * self.branch_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One denoising step: rows of one key, in order of arrival of their deadline, and the way to run them."""

    key: BatchKey
    job_ids: tuple[str, ...]
    num_branches: int
    step_tokens: int
    branch_tokens: int
    way: Way

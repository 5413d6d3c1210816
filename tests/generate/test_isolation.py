"""A row that fails or leaves at a step edge, and its neighbours to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from triptych.core.errors import ModelFault
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Row
from triptych.generate.runner import StepRunner

from .conftest import Toys
from .test_parity import sized, start

NUM_STEPS = 5
VICTIM = 1


def rows_of(kind: Kind, name: str) -> list[Row]:
    with torch.inference_mode():
        return [
            start(kind, sized(name, str(index), seed=index, num_steps=NUM_STEPS, prompt=prompt))
            for index, prompt in enumerate(("a red square", "the victim", "three green circles"))
        ]


@torch.inference_mode()
def run(runner: StepRunner, rows: list[Row], at_edge: Callable[[int, list[Row]], list[Row]]) -> dict[int, Exception]:
    """To the end; `at_edge` gives the rows of the next step. Failed rows leave."""
    failures: dict[int, Exception] = {}
    for edge in range(NUM_STEPS):
        rows = at_edge(edge, rows)
        outcome = runner.step(rows)
        failures |= {int(rows[index].request.request_id): error for index, error in outcome.failures.items()}
        rows = [row for index, row in enumerate(rows) if index not in outcome.failures]
    return failures


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("fault", ["nan", "raise"])
@pytest.mark.parametrize("name", ["stable_diffusion", "stable_diffusion_3", "pixart"])
def test_neighbours_of_a_failed_row_are_those_of_one_that_left(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, name: str, fault: str, step: int
):
    """A row fails inside step `step`: the others' latents equal, bit for bit, those where it was cancelled before it.
    At its first step that is a batch it never was in."""
    kind = toys.kind(name)
    left, failed = rows_of(kind, name), rows_of(kind, name)
    run(
        StepRunner(kind),
        left,
        lambda edge, rows: [row for row in rows if row is not left[VICTIM] or edge < step],
    )
    text = failed[VICTIM].branches[0]["encoder_hidden_states"]
    real, now = kind.forward, [0]

    def forward(latents: torch.Tensor, timestep: torch.Tensor, cond: dict[str, torch.Tensor], request: Any) -> Any:
        out = real(latents, timestep, cond, request)
        length = text.shape[1]
        mine = (cond["encoder_hidden_states"][:, :length] == text).flatten(1).all(dim=1)
        if now[0] != step or not bool(mine.any()):
            return out
        if fault == "raise":
            raise RuntimeError("bad row")
        out[mine] = float("nan")
        return out

    def at_edge(edge: int, rows: list[Row]) -> list[Row]:
        now[0] = edge
        return rows

    monkeypatch.setattr(kind, "forward", forward)
    failures = run(StepRunner(kind), failed, at_edge)

    assert list(failures) == [VICTIM]
    assert isinstance(failures[VICTIM], ModelFault)
    for index in (0, 2):
        assert failed[index].step == NUM_STEPS
        assert torch.equal(failed[index].latents, left[index].latents)


@pytest.mark.parametrize("name", ["stable_diffusion_3", "pixart"])
def test_the_same_history_of_batches_gives_the_same_bits(toys: Toys, name: str):
    """A neighbour that leaves by cancel, and a different one that ends there: the batches had the same shapes, so the
    rows that stay are equal to the bit, whoever the neighbour was."""
    kind = toys.kind(name)
    cancelled, ended = rows_of(kind, name), rows_of(kind, name)
    with torch.inference_mode():
        ended[VICTIM] = start(kind, sized(name, "1", seed=99, num_steps=3, prompt="the victim"))
    run(
        StepRunner(kind),
        cancelled,
        lambda edge, rows: [row for row in rows if row is not cancelled[VICTIM] or edge < 3],
    )
    run(StepRunner(kind), ended, lambda edge, rows: [row for row in rows if row.step < row.num_steps])

    for index in (0, 2):
        assert torch.equal(cancelled[index].latents, ended[index].latents)

"""What a loaded model runs on, in and with: one table for the start-up log, `/v1/models` and `triptych doctor`."""

from __future__ import annotations

from dataclasses import replace

from triptych.models.base import ServedModel
from triptych.models.native import accelerate
from triptych.models.native.choose import Choice
from triptych.models.registry import load_served_model


def load_with_facts(path: str, *, dtype: str, device: str, runner: str) -> ServedModel:
    """The model as it is served, its facts in `info.extra`. Raises InvalidRequest, UnknownModel."""
    served, choice = accelerate(load_served_model(path, dtype, device), runner)
    served.info = replace(served.info, extra=_facts(served, choice))
    return served


def _facts(served: ServedModel, choice: Choice) -> dict[str, str]:
    return {
        "dtype": str(served.dtype).removeprefix("torch."),
        "device": str(served.device),
        "runner": choice.runner,
        "runner_reason": choice.reason,
        "tower": choice.tower,
        "tower_reason": choice.tower_reason,
    }


def as_text(facts: dict[str, str]) -> str:
    """One line for a log or a terminal."""
    return (
        f"{facts['dtype']} on {facts['device']}, language {facts['runner']} ({facts['runner_reason']}), "
        f"tower {facts['tower']} ({facts['tower_reason']})"
    )

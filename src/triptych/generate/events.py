"""What the engine says of a request: any number of steps and previews, then exactly one final event."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from triptych.core.errors import TriptychError
from triptych.core.events import FinishReason


class StepEvent(msgspec.Struct, frozen=True, tag="step"):
    """`step` of `num_steps` is done."""

    request_id: str
    step: int
    num_steps: int


class PreviewEvent(msgspec.Struct, frozen=True, tag="preview"):
    """A picture of what the latent is heading for: [h, w, 3] uint8, at the latent's size. `index` counts from 0."""

    request_id: str
    index: int
    step: int
    pixels: npt.NDArray[np.uint8]


class GenerateFinal(msgspec.Struct, frozen=True, tag="final"):
    """The last word. `frames`: [F, H, W, 3] uint8 when `reason` is STOP, else None; `error` when it is ERROR.

    `counters`: text_tokens, image_tokens, latent_tokens (one branch), steps, branches, step_ms (sum of the steps this
    row was in), mean_batch_rows, preview_ms, first_preview_ms, cache_hits, cache_lookups, flagged (1: the safety
    checker blackened the picture).
    """

    request_id: str
    reason: FinishReason
    frames: npt.NDArray[np.uint8] | None = None
    error: TriptychError | None = None
    stage_ms: dict[str, float] = {}
    counters: dict[str, float] = {}


GenerateEvent = StepEvent | PreviewEvent | GenerateFinal

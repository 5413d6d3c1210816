"""What a caller asks for, and what a model can do: checked against each other before anything is queued. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, InvalidMedia, InvalidRequest, UnsupportedMedia
from triptych.generate.cache_setting import NO_CACHE, STEP_CACHES

MAX_PROMPT_CHARS = 16_384
MAX_GUIDANCE = 100.0
MAX_PREVIEWS = 3
MAX_SEED = 2**63 - 1


class Task(StrEnum):
    TEXT_TO_IMAGE = "text-to-image"
    IMAGE_TO_IMAGE = "image-to-image"
    INPAINT = "inpaint"
    TEXT_TO_VIDEO = "text-to-video"


EDIT_TASKS = (Task.IMAGE_TO_IMAGE, Task.INPAINT)


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What one loaded model can do. `is_distilled`: guidance was distilled into the weights, so one branch runs."""

    name: str
    architecture: str
    tasks: frozenset[Task]
    size_multiple_px: int
    default_width_px: int
    default_height_px: int
    default_num_steps: int
    default_guidance_scale: float
    is_distilled: bool = False
    frames_multiple: int = 1  # num_frames - 1 is a multiple of it
    default_num_frames: int = 1
    default_frames_per_s: float = 16.0
    step_caches: tuple[str, ...] = ()  # calibrated, and inside the quality gate
    step_cache_min_steps: dict[str, int] = field(default_factory=dict)  # the fewest steps they are for, by name
    step_cache_reasons: dict[str, str] = field(default_factory=dict)  # why the others are off, by name
    step_cache_edit_reasons: dict[tuple[str, Task], str] = field(default_factory=dict)  # why not for an edit
    default_step_cache: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One picture or clip. `seed` fixes it, whoever shares the batch. A call for several pictures makes several.

    `init_image`: [H, W, 3] uint8, already of the request's size; `strength` is the share of the steps run on it.
    `mask`: [H, W] uint8, 255 where the picture is to be drawn anew. `step_cache`: name of a calibrated cache, or None.
    """

    request_id: str
    prompt: str
    width_px: int
    height_px: int
    num_steps: int
    guidance_scale: float
    seed: int
    negative_prompt: str | None = None
    num_frames: int = 1
    frames_per_s: float = 16.0
    init_image: npt.NDArray[np.uint8] | None = field(default=None, repr=False)
    mask: npt.NDArray[np.uint8] | None = field(default=None, repr=False)
    strength: float = 0.8
    num_previews: int = 0
    step_cache: str | None = None
    tenant: str = ""
    arrival_s: float = 0.0
    deadline_s: float | None = None

    @property
    def task(self) -> Task:
        return task_of(self.init_image, self.mask, self.num_frames)

    @property
    def num_pixels(self) -> int:
        return self.width_px * self.height_px


def task_of(init_image: object, mask: object, num_frames: int) -> Task:
    """What a request with these fields asks for."""
    if mask is not None:
        return Task.INPAINT
    if init_image is not None:
        return Task.IMAGE_TO_IMAGE
    return Task.TEXT_TO_VIDEO if num_frames > 1 else Task.TEXT_TO_IMAGE


def check_request(request: GenerateRequest, traits: ModelTraits, tier: Tier) -> None:
    """Raise the error that names the rule or limit, its value and the request's. Returns when the request can run."""
    _check_budget(request, tier)
    _check_ranges(request)
    _check_task(request, traits)
    _check_size(request, traits)
    _check_pictures(request)
    _check_step_cache(request, traits)


def _check_budget(request: GenerateRequest, tier: Tier) -> None:
    for limit, allowed, requested, param in (
        ("max_generated_pixels", tier.max_generated_pixels, request.num_pixels, "size"),
        ("max_generated_frames", tier.max_generated_frames, request.num_frames, "num_frames"),
        ("max_steps", tier.max_steps, request.num_steps, "num_inference_steps"),
    ):
        if requested > allowed:
            raise BudgetExceeded(limit, allowed=allowed, requested=requested, param=param)


def _check_ranges(request: GenerateRequest) -> None:
    for name, value, low, high in (
        ("num_inference_steps", request.num_steps, 1, float("inf")),
        ("guidance_scale", request.guidance_scale, 0.0, MAX_GUIDANCE),
        ("seed", request.seed, 0, MAX_SEED),
        ("strength", request.strength, 0.0, 1.0),
        ("partial_images", request.num_previews, 0, MAX_PREVIEWS),
        ("num_frames", request.num_frames, 1, float("inf")),
        ("fps", request.frames_per_s, 1.0, 120.0),
    ):
        if not low <= value <= high:  # also refuses NaN
            raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, got {value:g}", param=name)
    if not request.prompt.strip():
        raise InvalidRequest("prompt is empty", param="prompt")
    for name, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt or "")):
        if len(text) > MAX_PROMPT_CHARS:
            raise BudgetExceeded("max_prompt_chars", allowed=MAX_PROMPT_CHARS, requested=len(text), param=name)


def _check_task(request: GenerateRequest, traits: ModelTraits) -> None:
    is_video_model = Task.TEXT_TO_VIDEO in traits.tasks
    if request.task not in traits.tasks and not (is_video_model and request.task is Task.TEXT_TO_IMAGE):
        able = ", ".join(sorted(traits.tasks))
        raise UnsupportedMedia(f"{traits.name} ({traits.architecture}) does {able}, not {request.task}")


def _check_size(request: GenerateRequest, traits: ModelTraits) -> None:
    multiple = traits.size_multiple_px
    for name, value in (("width", request.width_px), ("height", request.height_px)):
        if value < multiple or value % multiple:
            raise InvalidRequest(f"{name} must be a positive multiple of {multiple} px, got {value}", param="size")
    if (request.num_frames - 1) % traits.frames_multiple:
        raise InvalidRequest(
            f"num_frames must be 1 more than a multiple of {traits.frames_multiple}, got {request.num_frames}",
            param="num_frames",
        )


def _check_pictures(request: GenerateRequest) -> None:
    size = (request.height_px, request.width_px)
    if request.mask is not None and request.init_image is None:
        raise InvalidRequest("a mask needs an image", param="mask")
    if request.init_image is not None and request.init_image.shape != (*size, 3):
        raise InvalidMedia(f"image is {_size(request.init_image)}, the request is {size[1]}x{size[0]}", param="image")
    if request.mask is not None and request.mask.shape != size:
        raise InvalidMedia(f"mask is {_size(request.mask)}, the picture is {size[1]}x{size[0]}", param="mask")
    if request.init_image is not None and int(request.num_steps * request.strength) < 1:
        raise InvalidRequest(
            f"strength {request.strength:g} of {request.num_steps} steps leaves no step to run", param="strength"
        )


def _check_step_cache(request: GenerateRequest, traits: ModelTraits) -> None:
    if request.step_cache is not None and request.step_cache not in traits.step_caches:
        known = ", ".join((*STEP_CACHES, NO_CACHE))
        reason = traits.step_cache_reasons.get(request.step_cache, f"known: {known}")
        raise InvalidRequest(f"step cache {request.step_cache!r} is not available here; {reason}", param="step_cache")
    off = _why_off(request.step_cache, traits, request.task, request.num_steps)
    if off is not None:
        raise InvalidRequest(f"step cache {request.step_cache!r} is off here; {off}", param="step_cache")


def chosen_step_cache(name: str | None, traits: ModelTraits, task: Task, num_steps: int) -> str | None:
    """What a caller's `step_cache` field means for this model, task and number of steps: nothing is its default where
    that is calibrated for them, `none` is no cache."""
    if name is None:
        return traits.default_step_cache if why_no_default_cache(traits, task, num_steps) is None else None
    return None if name == NO_CACHE else name


def why_no_default_cache(traits: ModelTraits, task: Task, num_steps: int) -> str | None:
    """Why the model's default cache is off here; None where it is on, or there is none."""
    return _why_off(traits.default_step_cache, traits, task, num_steps)


def _why_off(name: str | None, traits: ModelTraits, task: Task, num_steps: int) -> str | None:
    """Why a calibrated cache is off for such a request; None where it is on, or no cache is meant."""
    if name is None:
        return None
    least = traits.step_cache_min_steps.get(name, 1)
    if num_steps < least:
        return f"it was calibrated at {least} steps and more, the request has {num_steps}"
    return traits.step_cache_edit_reasons.get((name, task))


def _size(array: npt.NDArray[np.uint8]) -> str:
    return f"{array.shape[1]}x{array.shape[0]}"

"""What a step cache costs in quality and brings in speed: the same seeds drawn with and without it, and compared.

`triptych quality` prints it for one setting, `triptych calibrate` runs it over many. Pictures are drawn one at a time,
each case without the cache and at once with it; with one setting that makes a fair speedup on a machine whose load
changes, with many it does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from triptych.core.config import Tier
from triptych.core.errors import UnsupportedMedia
from triptych.generate.branch_cache import BranchCache, new_caches
from triptych.generate.cache_setting import CacheSetting
from triptych.generate.edit_cases import edit_fields
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Row
from triptych.generate.quality import Quality, compare, gate_failures
from triptych.generate.request import EDIT_TASKS, GenerateRequest, Task, check_request
from triptych.generate.runner import StepRunner

PROMPTS = ("two green circles above a red square", "a blue triangle on white", "a quiet harbour at dawn")

Frames = npt.NDArray[np.uint8]  # [F, H, W, 3]
Judge = Callable[[str, Frames], bool]  # (prompt, frames): whether they show what it asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The cases: every prompt at every size, number of steps, guidance scale and seed. None: the model's own, and half
    of it (for guidance: without)."""

    prompts: tuple[str, ...] = PROMPTS
    sizes_px: tuple[tuple[int, int], ...] | None = None  # width, height
    num_steps: tuple[int, ...] | None = None
    guidance_scales: tuple[float, ...] | None = None
    num_seeds: int = 1
    num_frames: int | None = None
    task: Task | None = None  # an edit; None: drawn from text alone


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One picture both ways. Times are of the denoising loop alone. `is_right` is the judge's word."""

    prompt: str
    width_px: int
    height_px: int
    num_frames: int
    num_steps: int
    guidance_scale: float
    seed: int
    psnr_db: float
    ssim: float
    mean_difference: float
    latent_error: float
    flicker: float
    hit_rate: float
    plain_s: float
    cached_s: float
    plain_is_right: bool | None = None
    is_right: bool | None = None
    task: str = Task.TEXT_TO_IMAGE

    @property
    def group(self) -> str:
        frames = f"x{self.num_frames}f" if self.num_frames > 1 else ""
        edit = f"{self.task}, " if self.task in EDIT_TASKS else ""
        return (
            f"{edit}{self.width_px}x{self.height_px}{frames}, {self.num_steps} steps, guidance {self.guidance_scale:g}"
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Over cases: the worst quality, the share of branch steps skipped, the denoising time without over with the cache
    (None where the two were not drawn in turn), and the shares that the judge calls right. `failures`: what keeps it
    from the gate."""

    num_cases: int
    psnr_db: float
    ssim: float
    mean_difference: float
    latent_error: float
    flicker: float
    hit_rate: float
    speedup: float | None
    plain_score: float | None = None
    score: float | None = None
    failures: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        return not self.failures


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One setting over all cases; `is_complete` is False where it was dropped at its first failure."""

    setting: CacheSetting
    summary: Summary
    cases: tuple[Case, ...] = ()
    is_complete: bool = True

    @property
    def passes(self) -> bool:
        return self.summary.passes and self.is_complete


@dataclass(frozen=True, slots=True)
class Drawn:
    """`latents` as the denoiser left them; `hit_rate` over the steps of all branches. `is_saturated`: every
    step that could be skipped was, so that a higher threshold gives the same."""

    frames: Frames
    latents: torch.Tensor
    seconds: float
    hit_rate: float
    is_saturated: bool = False


OnCase = Callable[[CacheSetting, Case, Frames, Frames], None]  # setting, case, frames without and with the cache


def evaluate(
    kind: Kind,
    requests: Sequence[GenerateRequest],
    settings: Sequence[CacheSetting],
    *,
    judge: Judge | None = None,
    drops_failing: bool = False,
    on_case: OnCase = lambda setting, case, plain, cached: None,
) -> list[Report]:
    """One report a setting, in order. With `drops_failing` a setting is not tried further once a case fails the gate,
    nor is any above it in threshold alone; of those that were not tried at all there is no report. A threshold above
    one that already skipped all it could is not drawn again. Raises UnsupportedMedia for a kind
    without blocks to skip, and what the model raises."""
    if not kind.blocks:
        raise UnsupportedMedia(f"{type(kind.pipeline).__name__} has no list of blocks to skip")
    cases: dict[CacheSetting, list[Case]] = {setting: [] for setting in settings}
    dropped: set[CacheSetting] = set()
    draw_one(kind, requests[0])  # the first of all pays for allocations
    for request in requests:
        plain = draw_one(kind, request)
        saturated: list[tuple[CacheSetting, Drawn]] = []
        for setting in settings:
            if setting in dropped:
                continue
            cached = _known_from(saturated, setting) or draw_one(kind, request, partial(new_caches, setting=setting))
            if cached.is_saturated:
                saturated.append((setting, cached))
            cases[setting].append(_case(request, plain, cached, judge))
            on_case(setting, cases[setting][-1], plain.frames, cached.frames)
            if drops_failing and gate_failures(cases[setting][-1].psnr_db, cases[setting][-1].ssim):
                dropped |= {other for other in settings if _is_same_or_above(other, setting)}
    return [
        Report(setting=setting, summary=summarise(found), cases=tuple(found), is_complete=len(found) == len(requests))
        for setting, found in cases.items()
        if found
    ]


def _known_from(saturated: Sequence[tuple[CacheSetting, Drawn]], setting: CacheSetting) -> Drawn | None:
    """The picture of a setting that differs by a lower threshold alone and skipped all it could."""
    for lower, drawn in saturated:
        if _is_same_or_above(setting, lower):
            return drawn
    return None


def _is_same_or_above(setting: CacheSetting, lower: CacheSetting) -> bool:
    """Whether it is `lower` with the same threshold or a higher one."""
    is_of_its_kind = msgspec.structs.replace(lower, threshold=setting.threshold) == setting
    return is_of_its_kind and lower.threshold <= setting.threshold


@torch.inference_mode()
def draw_one(
    kind: Kind, request: GenerateRequest, make_caches: Callable[[Row], tuple[BranchCache, ...]] = lambda row: ()
) -> Drawn:
    """One picture alone, as the engine draws it. Raises what the model raises."""
    branches = [kind.encode_text(request.prompt, is_negative=False)]
    if kind.uses_guidance(request):
        branches.append(kind.encode_text(request.negative_prompt, is_negative=True))
    row, runner = kind.prepare(request, tuple(branches)), StepRunner(kind)
    row.caches = make_caches(row)
    started_s = time.perf_counter()
    while row.step < row.num_steps:
        outcome = runner.step([row])
        if outcome.failures:
            raise outcome.failures[0]
    seconds = time.perf_counter() - started_s
    lookups = len(row.caches) * row.num_steps
    hit_rate = sum(cache.num_hits for cache in row.caches) / lookups if lookups else 0.0
    is_saturated = bool(row.caches) and not any(cache.num_refused for cache in row.caches)
    return Drawn(kind.decode(row)[0], row.latents, seconds, hit_rate, is_saturated)


def _case(request: GenerateRequest, plain: Drawn, cached: Drawn, judge: Judge | None) -> Case:
    error = float((cached.latents - plain.latents).norm() / plain.latents.norm())
    quality: Quality = compare(cached.frames, plain.frames, error)
    return Case(
        prompt=request.prompt,
        width_px=request.width_px,
        height_px=request.height_px,
        num_frames=request.num_frames,
        num_steps=request.num_steps,
        guidance_scale=request.guidance_scale,
        seed=request.seed,
        psnr_db=quality.psnr_db,
        ssim=quality.ssim,
        mean_difference=quality.mean_difference,
        latent_error=quality.latent_error,
        flicker=quality.flicker,
        hit_rate=cached.hit_rate,
        plain_s=plain.seconds,
        cached_s=cached.seconds,
        plain_is_right=judge(request.prompt, plain.frames) if judge else None,
        is_right=judge(request.prompt, cached.frames) if judge else None,
        task=request.task,
    )


def summarise(cases: Sequence[Case]) -> Summary:
    """The worst of each measure; flicker by its size."""
    psnr_db, ssim = min(case.psnr_db for case in cases), min(case.ssim for case in cases)
    judged = [case for case in cases if case.is_right is not None]
    plain_score = sum(bool(case.plain_is_right) for case in judged) / len(judged) if judged else None
    score = sum(bool(case.is_right) for case in judged) / len(judged) if judged else None
    loss_points = 100 * (plain_score - score) if plain_score is not None and score is not None else 0.0
    return Summary(
        num_cases=len(cases),
        psnr_db=psnr_db,
        ssim=ssim,
        mean_difference=max(case.mean_difference for case in cases),
        latent_error=max(case.latent_error for case in cases),
        flicker=max((case.flicker for case in cases), key=abs),
        hit_rate=sum(case.hit_rate for case in cases) / len(cases),
        speedup=sum(case.plain_s for case in cases) / sum(case.cached_s for case in cases),
        plain_score=plain_score,
        score=score,
        failures=tuple(gate_failures(psnr_db, ssim, loss_points)),
    )


def requests_of(kind: Kind, grid: Grid) -> list[GenerateRequest]:
    """The grid's cases for this model, every seed another. Raises what `check_request` raises."""
    traits = kind.traits()
    width_px, height_px = traits.default_width_px, traits.default_height_px
    half = tuple(
        max(1, side // 2 // traits.size_multiple_px) * traits.size_multiple_px for side in (width_px, height_px)
    )
    steps, scale = traits.default_num_steps, traits.default_guidance_scale
    default_frames = 1 + 4 * traits.frames_multiple if traits.frames_multiple > 1 else 1
    axes = product(
        grid.prompts,
        dict.fromkeys(grid.sizes_px or ((width_px, height_px), (half[0], half[1]))),
        dict.fromkeys(grid.num_steps or (steps, max(8, steps // 2))),
        dict.fromkeys(grid.guidance_scales or (scale, 1.0)),
        range(grid.num_seeds),
    )
    requests = []
    for index, (prompt, size_px, num_steps, guidance_scale, _) in enumerate(axes):
        request = GenerateRequest(
            request_id=f"case-{index}",
            prompt=prompt,
            width_px=size_px[0],
            height_px=size_px[1],
            num_steps=num_steps,
            guidance_scale=guidance_scale,
            seed=index,
            num_frames=grid.num_frames or default_frames,
            frames_per_s=traits.default_frames_per_s,
            **(edit_fields(grid.task, size_px[0], size_px[1], index) if grid.task else {}),
        )
        check_request(request, traits, Tier())
        requests.append(request)
    return requests

"""Find the largest first-block threshold whose pictures pass the quality gate, and write it beside the model.

Fixed seeds over prompts, sizes, steps and guidance, each drawn with and without the cache. The file holds the whole
table; a threshold that fails anywhere is not used, and a model without one serves without a cache and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from triptych.core.errors import InvalidRequest, UnsupportedMedia
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.load import load_kind
from triptych.generate.picture_files import write_whole
from triptych.generate.quality import Quality, compare
from triptych.generate.request import GenerateRequest
from triptych.generate.runner import StepRunner
from triptych.generate.step_cache import new_caches

FILE_NAME = "step_cache.json"
THRESHOLDS = (0.02, 0.04, 0.08, 0.12, 0.16, 0.24, 0.32)
PROMPTS = ("two green circles above a red square", "a blue triangle on white", "a quiet harbour at dawn")


class Trial(msgspec.Struct, frozen=True):
    """One threshold over all cases: the worst quality, the hit share, and the time against no cache."""

    threshold: float
    psnr_db: float
    ssim: float
    mean_difference: float
    latent_error: float
    flicker: float
    hit_rate: float
    speedup: float
    passes: bool


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`threshold` None: no setting passed."""

    cache: str
    architecture: str
    threshold: float | None
    num_cases: int
    trials: list[Trial]


@dataclass(frozen=True, slots=True)
class _Drawn:
    frames: npt.NDArray[np.uint8]
    latents: torch.Tensor
    seconds: float
    hit_rate: float


def calibrate(
    kind: Kind,
    requests: Sequence[GenerateRequest] | None = None,
    *,
    thresholds: Sequence[float] = THRESHOLDS,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Calibration:
    """Try thresholds from small to large until one fails. Raises UnsupportedMedia for a kind without a block list."""
    if not kind.blocks:
        raise UnsupportedMedia(f"{type(kind.pipeline).__name__} has no list of blocks to skip")
    cases = list(requests or default_cases(kind))
    kind.cache_threshold = kind.cache_threshold if kind.cache_threshold is not None else 0.0
    runner = StepRunner(kind)
    plain = [_draw(kind, runner, case, None) for case in cases]
    trials: list[Trial] = []
    for threshold in sorted(thresholds):
        cached = [_draw(kind, runner, case, threshold) for case in cases]
        trials.append(_trial(threshold, plain, cached))
        on_trial(trials[-1])
        if not trials[-1].passes:
            break
    passed = [trial.threshold for trial in trials if trial.passes and trial.hit_rate > 0]
    kind.cache_threshold = passed[-1] if passed else None
    return Calibration("first-block", type(kind.pipeline).__name__, kind.cache_threshold, len(cases), trials)


def default_cases(kind: Kind) -> list[GenerateRequest]:
    """Two sizes, two step counts, with and without guidance, over the prompts."""
    traits = kind.traits()
    half = [max(1, side // 2 // traits.size_multiple_px) * traits.size_multiple_px for side in kind.default_size_px()]
    sizes = ((traits.default_width_px, traits.default_height_px), (half[0], half[1]))
    num_frames = 1 + 4 * traits.frames_multiple if traits.frames_multiple > 1 else 1
    cases = []
    for index, prompt in enumerate(PROMPTS):
        width_px, height_px = sizes[index % 2]
        for num_steps, guidance_scale in (
            (traits.default_num_steps, traits.default_guidance_scale),
            (max(8, traits.default_num_steps // 2), 1.0),
        ):
            request = GenerateRequest(
                request_id=f"case-{len(cases)}",
                prompt=prompt,
                width_px=width_px,
                height_px=height_px,
                num_steps=num_steps,
                guidance_scale=guidance_scale,
                seed=len(cases),
                num_frames=num_frames,
                frames_per_s=traits.default_frames_per_s,
            )
            cases.append(request)
    return cases


@torch.inference_mode()
def _draw(kind: Kind, runner: StepRunner, request: GenerateRequest, threshold: float | None) -> _Drawn:
    branches = [kind.encode_text(request.prompt, is_negative=False)]
    if kind.uses_guidance(request):
        branches.append(kind.encode_text(request.negative_prompt, is_negative=True))
    row = kind.prepare(request, tuple(branches))
    if threshold is not None:
        row.caches = new_caches(row, threshold)
    started_s = time.perf_counter()
    while row.step < row.num_steps:
        outcome = runner.step([row])
        if outcome.failures:
            raise outcome.failures[0]
    seconds = time.perf_counter() - started_s
    lookups = len(row.caches) * row.num_steps
    hit_rate = sum(cache.num_hits for cache in row.caches) / lookups if lookups else 0.0
    return _Drawn(kind.decode(row)[0], row.latents, seconds, hit_rate)


def _trial(threshold: float, plain: Sequence[_Drawn], cached: Sequence[_Drawn]) -> Trial:
    qualities: list[Quality] = []
    for ours, reference in zip(cached, plain, strict=True):
        error = float((ours.latents - reference.latents).norm() / reference.latents.norm())
        qualities.append(compare(ours.frames, reference.frames, error))
    return Trial(
        threshold=threshold,
        psnr_db=min(quality.psnr_db for quality in qualities),
        ssim=min(quality.ssim for quality in qualities),
        mean_difference=max(quality.mean_difference for quality in qualities),
        latent_error=max(quality.latent_error for quality in qualities),
        flicker=max(quality.flicker for quality in qualities),
        hit_rate=sum(drawn.hit_rate for drawn in cached) / len(cached),
        speedup=sum(drawn.seconds for drawn in plain) / sum(drawn.seconds for drawn in cached),
        passes=all(quality.passes for quality in qualities),
    )


def calibrate_folder(folder: Path, *, on_trial: Callable[[Trial], None] = lambda trial: None) -> Calibration:
    """Load the model in `folder`, calibrate, and write the result beside it. What a command line calls."""
    kind = load_kind(folder, name=folder.name)
    calibration = calibrate(kind, on_trial=on_trial)
    save_calibration(folder, calibration)
    return calibration


def save_calibration(folder: Path, calibration: Calibration) -> Path:
    path = folder / FILE_NAME
    write_whole(path, msgspec.json.format(msgspec.json.encode(calibration), indent=2))
    return path


def load_threshold(folder: Path, kind: Kind) -> None:
    """Set the kind's threshold from the folder's calibration, where there is one for its architecture. Raises
    InvalidRequest for a file that is none."""
    path = folder / FILE_NAME
    if not path.is_file() or not kind.blocks:
        return
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{folder.name}/{FILE_NAME}: {error}") from error
    if calibration.architecture == type(kind.pipeline).__name__:
        kind.cache_threshold = calibration.threshold


def as_table(calibration: Calibration) -> str:
    """For the terminal and the docs."""
    lines = [
        "| threshold | PSNR dB | SSIM | mean diff | latent error | hits | speedup | gate |",
        "| --- |" + " --- |" * 7,
    ]
    lines += [
        f"| {t.threshold:g} | {t.psnr_db:.1f} | {t.ssim:.4f} | {t.mean_difference:.2f} | {t.latent_error:.4f} "
        f"| {t.hit_rate:.0%} | {t.speedup:.2f} | {'pass' if t.passes else 'fail'} |"
        for t in calibration.trials
    ]
    return "\n".join(lines)

"""Find the step-cache settings whose pictures pass the quality gate; write them beside the model with their tables.

Without such a file, or with one of other weights, a cache stays off and says why. It is a model's default only where
the file says so, which `calibrate` does on request and for a setting inside the gate alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from triptych.core.errors import InvalidRequest, UnsupportedMedia
from triptych.generate.cache_setting import FIRST_BLOCK, STEP_CACHES, TEACACHE, CacheSetting
from triptych.generate.evaluate import Case, Grid, Judge, OnCase, Report, Summary, evaluate, requests_of, summarise
from triptych.generate.fingerprint import model_fingerprint
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.load import load_kind
from triptych.generate.picture_files import write_whole
from triptych.generate.request import EDIT_TASKS, GenerateRequest, Task
from triptych.generate.tea_fit import TeaFit, fit_teacache

T = TypeVar("T")

FILE_NAME = "step_cache.json"
THRESHOLDS = {
    FIRST_BLOCK: (0.04, 0.08, 0.12, 0.18, 0.26, 0.38, 0.55, 0.8),
    TEACACHE: (0.05, 0.1, 0.2, 0.3, 0.45, 0.65, 1.0, 1.5),
}
ORDERS = (0, 1)
WARM_UP_SHARES = (0.0, 0.25, 0.4)
MIN_CASES = 16  # the worst of fewer says little of the next picture
MIN_HIT_RATE = 0.01


@dataclass(frozen=True, slots=True)
class Ladder:
    """Which settings are tried: every combination, thresholds from below. No thresholds: each cache's own."""

    thresholds: Sequence[float] = ()
    orders: Sequence[int] = ORDERS
    warm_up_shares: Sequence[float] = WARM_UP_SHARES

    def settings(self, caches: Sequence[str], fit: TeaFit | None) -> list[CacheSetting]:
        return [
            CacheSetting(
                cache=name,
                threshold=threshold,
                order=order,
                warm_up_share=warm_up_share,
                coefficients=fit.coefficients if name == TEACACHE and fit is not None else (),
            )
            for name in caches
            for order in self.orders
            for warm_up_share in self.warm_up_shares
            for threshold in sorted(self.thresholds or THRESHOLDS[name])
        ]


class CacheCalibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`setting` None: nothing passed, and `reason` says what came nearest. `trials` hold the cases of the chosen
    setting only. `edits`: what that setting costs edits, by task; it is for those whose summary passes. `min_steps`:
    the fewest that it was calibrated at; with fewer, each skipped step would weigh more."""

    setting: CacheSetting | None
    reason: str
    trials: tuple[Report, ...]
    fit: TeaFit | None = None
    edits: dict[str, Summary] = {}
    min_steps: int = 1


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `step_cache.json` holds. `default`: the cache of a request that names none."""

    architecture: str
    fingerprint: str
    caches: dict[str, CacheCalibration]
    default: str | None = None


def calibrate(
    kind: Kind,
    requests: Sequence[GenerateRequest],
    *,
    edits: Sequence[GenerateRequest] = (),
    caches: Sequence[str] = STEP_CACHES,
    ladder: Ladder | None = None,
    judge: Judge | None = None,
    default: str | None = None,
    fingerprint: str = "",
    on_case: Callable[[CacheSetting, Case], None] = lambda setting, case: None,
) -> Calibration:
    """Try the settings of `ladder` and take the one that skips most inside the gate on `requests`; it is drawn once
    more in turn with no cache, for its speedup, and then on `edits`, which it is for where they pass too. Raises
    UnsupportedMedia for a kind without a block list, InvalidRequest when `default` did not pass."""
    if not kind.blocks:
        raise UnsupportedMedia(f"{type(kind.pipeline).__name__} has no list of blocks to skip")
    fit = fit_teacache(kind, requests) if TEACACHE in caches else None
    reports = evaluate(
        kind,
        requests,
        (ladder or Ladder()).settings(caches, fit),
        judge=judge,
        drops_failing=True,
        on_case=lambda setting, case, plain, cached: on_case(setting, case),
    )
    found = {}
    for name in caches:
        mine = [report for report in reports if report.setting.cache == name]
        chosen = _timed(kind, requests, _choose(name, mine, fit), judge)
        min_steps = min(request.num_steps for request in requests)
        edited = _edited(kind, edits, chosen.setting)
        found[name] = msgspec.structs.replace(chosen, edits=edited, min_steps=min_steps)
    if default is not None and (default not in found or found[default].setting is None):
        reason = found[default].reason if default in found else f"it was not calibrated, only {', '.join(found)}"
        raise InvalidRequest(f"{default!r} is refused as default: {reason}")
    return Calibration(
        architecture=type(kind.pipeline).__name__, fingerprint=fingerprint, caches=found, default=default
    )


def _choose(name: str, reports: Sequence[Report], fit: TeaFit | None) -> CacheCalibration:
    """The passing setting that skips most; of equals the one with the higher SSIM."""
    passing = [report for report in reports if report.passes and report.summary.hit_rate >= MIN_HIT_RATE]
    best = max(passing, key=lambda report: (report.summary.hit_rate, report.summary.ssim), default=None)
    reason = ""
    if best is None:
        hitting = [report for report in reports if report.summary.hit_rate >= MIN_HIT_RATE]
        nearest = max(hitting, key=lambda report: report.summary.ssim, default=None)
        why = "; ".join(nearest.summary.failures) if nearest else "no threshold tried skips a step"
        reason = f"no calibration passed the quality gate: {why}"
    return CacheCalibration(
        setting=best.setting if best else None,
        reason=reason,
        trials=tuple(_untimed(report) for report in reports),
        fit=fit if name == TEACACHE else None,
    )


def _untimed(report: Report) -> Report:
    """The picture without a cache was drawn once for many settings: its time is compared with none of them."""
    return msgspec.structs.replace(report, cases=(), summary=msgspec.structs.replace(report.summary, speedup=None))


def _timed(
    kind: Kind, requests: Sequence[GenerateRequest], found: CacheCalibration, judge: Judge | None
) -> CacheCalibration:
    if found.setting is None:
        return found
    (report,) = evaluate(kind, requests, [found.setting], judge=judge)
    trials = tuple(report if trial.setting == found.setting else trial for trial in found.trials)
    return msgspec.structs.replace(found, trials=trials)


def _edited(kind: Kind, edits: Sequence[GenerateRequest], setting: CacheSetting | None) -> dict[str, Summary]:
    """By task. Edits are not judged: what they show is not the prompt's alone."""
    if setting is None or not edits:
        return {}
    (report,) = evaluate(kind, edits, [setting])
    tasks = dict.fromkeys(case.task for case in report.cases)
    return {str(task): summarise([case for case in report.cases if case.task == task]) for task in tasks}


def edits_of(kind: Kind, grid: Grid) -> list[GenerateRequest]:
    """The edits that a model is calibrated on: every prompt at its own size, steps and guidance; none where it has
    none."""
    traits = kind.traits()
    own = replace(
        grid,
        sizes_px=_first(grid.sizes_px) or ((traits.default_width_px, traits.default_height_px),),
        num_steps=_first(grid.num_steps) or (traits.default_num_steps,),
        guidance_scales=_first(grid.guidance_scales) or (traits.default_guidance_scale,),
        num_seeds=1,
    )
    return [
        request for task in EDIT_TASKS if task in kind.tasks for request in requests_of(kind, replace(own, task=task))
    ]


def _first(values: tuple[T, ...] | None) -> tuple[T, ...] | None:
    return values[:1] if values else None


def calibrate_folder(
    folder: Path,
    grid: Grid | None = None,
    *,
    caches: Sequence[str] = STEP_CACHES,
    ladder: Ladder | None = None,
    judge: Judge | None = None,
    default: str | None = None,
    on_case: Callable[[CacheSetting, Case], None] = lambda setting, case: None,
) -> Calibration:
    """Load the model in `folder`, calibrate, and write the result beside it. What the command line calls. Raises
    InvalidRequest for fewer than `MIN_CASES`."""
    kind = load_kind(folder, name=folder.name)
    requests = requests_of(kind, grid or Grid())
    if len(requests) < MIN_CASES:
        raise InvalidRequest(
            f"{len(requests)} pictures are too few to calibrate on, {MIN_CASES} are the least: "
            "the gate is on the worst of them; add prompts, sizes or seeds",
            param="prompts",
        )
    calibration = calibrate(
        kind,
        requests,
        edits=edits_of(kind, grid or Grid()),
        caches=caches,
        ladder=ladder,
        judge=judge,
        default=default,
        fingerprint=model_fingerprint(folder),
        on_case=on_case,
    )
    save_calibration(folder, calibration)
    return calibration


def quality_of_folder(
    folder: Path,
    cache: str,
    grid: Grid | None = None,
    *,
    threshold: float | None = None,
    order: int | None = None,
    warm_up_share: float | None = None,
    judge: Judge | None = None,
    on_case: OnCase = lambda setting, case, plain, cached: None,
) -> Report:
    """Measure one setting of a cache on the model in `folder`: the calibrated one, with what is given put in
    its place. Raises InvalidRequest where that leaves something open."""
    kind = load_kind(folder, name=folder.name)
    known = read_calibration(folder, kind)
    setting = setting_for(cache, known, threshold=threshold, order=order, warm_up_share=warm_up_share)
    return evaluate(kind, requests_of(kind, grid or Grid()), [setting], judge=judge, on_case=on_case)[0]


def setting_for(
    cache: str,
    known: Calibration | None,
    *,
    threshold: float | None,
    order: int | None,
    warm_up_share: float | None = None,
) -> CacheSetting:
    """Raises InvalidRequest where neither the calibration nor the caller says what is needed."""
    found = known.caches.get(cache) if known else None
    base = found.setting if found else None
    coefficients = base.coefficients if base else found.fit.coefficients if found and found.fit else ()
    if base is None and threshold is None:
        why = found.reason if found and found.reason else "the model was not calibrated for it"
        raise InvalidRequest(f"{cache} needs a threshold here: {why}", param="threshold")
    if cache == TEACACHE and not coefficients:
        raise InvalidRequest("teacache needs its polynomial: run `triptych calibrate` first", param="cache")
    try:
        return CacheSetting(
            cache=cache,
            threshold=base.threshold if threshold is None and base else threshold or 0.0,
            order=order if order is not None else base.order if base else 0,
            warm_up_share=warm_up_share if warm_up_share is not None else base.warm_up_share if base else 0.0,
            coefficients=coefficients,
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def save_calibration(folder: Path, calibration: Calibration) -> Path:
    path = folder / FILE_NAME
    write_whole(path, msgspec.json.format(msgspec.json.encode(calibration), indent=2))
    return path


def read_calibration(folder: Path, kind: Kind) -> Calibration | None:
    """The folder's calibration, where there is one for these weights; why not is left in `kind.step_cache_reasons`.
    Raises InvalidRequest for a file that is none."""
    path = folder / FILE_NAME
    if not path.is_file() or not kind.blocks:
        return None
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{folder.name}/{FILE_NAME}: {error}; calibrate the model again") from error
    if calibration.fingerprint != model_fingerprint(folder):
        reason = f"{FILE_NAME} is of other weights or another scheduler: calibrate the model again"
        kind.step_cache_reasons = dict.fromkeys(STEP_CACHES, reason)
        return None
    return calibration


def load_calibration(folder: Path, kind: Kind) -> None:
    """Give the kind the settings that passed, and the reasons of those that did not. Raises InvalidRequest."""
    calibration = read_calibration(folder, kind)
    if calibration is None:
        return
    for name, found in calibration.caches.items():
        if found.setting is not None:
            kind.step_caches[name] = found.setting
            kind.step_cache_min_steps[name] = found.min_steps
            kind.step_cache_edits[name] = {Task(task): "; ".join(found.edits[task].failures) for task in found.edits}
        else:
            kind.step_cache_reasons[name] = found.reason
    if calibration.default in kind.step_caches:
        kind.default_step_cache = calibration.default

"""Quality measures on pictures whose answer is known, and calibration from measuring to serving."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from triptych.cli import main
from triptych.core.config import Tier
from triptych.core.errors import InvalidMedia, InvalidRequest, UnsupportedMedia
from triptych.generate import quality
from triptych.generate.branch_cache import new_caches
from triptych.generate.build import build_engine
from triptych.generate.cache_setting import FIRST_BLOCK, STEP_CACHES, TEACACHE, CacheSetting
from triptych.generate.calibrate import FILE_NAME, Ladder, calibrate, edits_of, save_calibration
from triptych.generate.contact_sheet import TEXT_PX, ContactSheet
from triptych.generate.edit_cases import edit_fields
from triptych.generate.evaluate import Case, Grid, Report, draw_one, evaluate, requests_of, summarise
from triptych.generate.fingerprint import model_fingerprint
from triptych.generate.kinds.load import load_kind
from triptych.generate.quality import compare, psnr_db, ssim
from triptych.generate.quality_table import by_group, by_setting
from triptych.generate.request import Task, check_request, chosen_step_cache, why_no_default_cache

from .conftest import Toys, request_of
from .test_engine import CONFIG, final_of


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)


def test_equal_pictures_are_perfect():
    """A picture against itself: 100 dB, SSIM 1, no difference; it passes."""
    found = compare(noise(0), noise(0))

    assert (found.psnr_db, found.mean_difference, found.flicker) == (100.0, 0.0, 0.0)
    assert found.ssim == pytest.approx(1.0)
    assert found.passes


def test_known_error_gives_known_psnr():
    """An offset of 10 levels everywhere is 20 log10(255/10) dB."""
    flat = np.full((8, 8, 3), 100.0)

    assert psnr_db(flat, flat + 10) == pytest.approx(20 * np.log10(25.5))


def test_ssim_is_that_of_its_definition():
    """One window of 11 px is one position: there the value is the formula's, with Gaussian weights."""
    random = np.random.default_rng(3)
    a = np.repeat(random.uniform(0, 255, (11, 11, 1)), 3, axis=2)
    b = np.clip(a + random.normal(0, 20, a.shape[:2])[..., None], 0, 255)
    line = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    weights = np.outer(line, line) / np.outer(line, line).sum()
    x, y = a[..., 0], b[..., 0]
    mean_x, mean_y = (weights * x).sum(), (weights * y).sum()
    var_x, var_y = (weights * (x - mean_x) ** 2).sum(), (weights * (y - mean_y) ** 2).sum()
    cov = (weights * (x - mean_x) * (y - mean_y)).sum()
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    expected = (2 * mean_x * mean_y + c1) * (2 * cov + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))

    assert ssim(a, b) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(InvalidMedia, match="window of 11 px, the picture is 8x8"):
        ssim(a[:8, :8], b[:8, :8])


def test_strangers_and_noise_fail():
    """Unrelated pictures have SSIM near 0 and fail the gate; SSIM falls as noise grows."""
    picture = noise(1)[0].astype(float)
    random = np.random.default_rng(2)
    noisier = [ssim(picture, picture + random.normal(0, scale, picture.shape)) for scale in (5, 20, 80)]

    assert not compare(noise(1), noise(2)).passes
    assert compare(noise(1), noise(2)).ssim < 0.1
    assert noisier == sorted(noisier, reverse=True)


def test_flicker_is_what_was_added():
    """A still clip that begins to blink by 8 levels has 8 levels more flicker."""
    still = np.full((4, 16, 16, 3), 100, np.uint8)
    blinking = still.copy()
    blinking[1::2] += 8

    assert compare(blinking, still).flicker == pytest.approx(8.0)


GREEDY: dict[str, Any] = dict(caches=[FIRST_BLOCK], ladder=Ladder((1e9,), (0,), (0.0,)))  # skips what it may


def settings_of(*thresholds: float, cache: str = FIRST_BLOCK) -> list[CacheSetting]:
    return [CacheSetting(cache=cache, threshold=threshold) for threshold in thresholds]


async def test_calibration_turns_the_cache_on_within_the_gate(toys: Toys, tmp_path: Path):
    """Calibrate, save, load: the engine then takes both caches by name, hits, and the pictures pass the gate."""
    folder = Path(shutil.copytree(toys.folder("pixart"), tmp_path / "pixart"))
    kind = load_kind(folder, name="pixart")
    cases = [request_of(str(seed), seed=seed, num_steps=16) for seed in range(2)]
    found = calibrate(kind, cases, fingerprint=model_fingerprint(folder), default=TEACACHE)
    save_calibration(folder, found)
    engine = build_engine(folder, name="pixart", config=CONFIG)
    await engine.start()
    try:
        plain = await final_of(engine, request_of("plain", seed=0, num_steps=16))
        cached = [
            await final_of(engine, request_of(name, seed=0, num_steps=16, step_cache=name)) for name in STEP_CACHES
        ]
        stats = await engine.stats()
    finally:
        await engine.close()

    assert (engine.traits.step_caches, engine.traits.default_step_cache) == (STEP_CACHES, TEACACHE)
    assert chosen_step_cache(None, engine.traits, Task.TEXT_TO_IMAGE, 16) == TEACACHE
    assert chosen_step_cache("none", engine.traits, Task.TEXT_TO_IMAGE, 16) is None
    for name, final in zip(STEP_CACHES, cached, strict=True):
        trials = found.caches[name].trials
        (chosen,) = [trial for trial in trials if trial.setting == found.caches[name].setting]
        assert chosen.passes
        assert len(chosen.cases) == len(cases)
        assert 0 < final.counters["cache_hits"] < final.counters["cache_lookups"]
        assert compare(final.frames, plain.frames).passes
        assert "| pass |" in by_setting(trials)
    few = request_of("few", num_steps=15, step_cache=TEACACHE)
    assert chosen_step_cache(None, engine.traits, few.task, 15) is None
    with pytest.raises(InvalidRequest, match="calibrated at 16 steps and more, the request has 15"):
        check_request(few, engine.traits, Tier())
    assert "cache_hits" not in plain.counters
    assert stats["step_cache_hits"] == sum(final.counters["cache_hits"] for final in cached)


def test_a_cache_is_on_for_the_edits_it_was_calibrated_for(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The setting is tried on each kind of edit: where that passes a request may name it and gets it by default, where
    it fails it is refused by name, off by default, and the reason is said."""
    folder = Path(shutil.copytree(toys.folder("stable_diffusion_3"), tmp_path / "sd3"))
    kind, cases = load_kind(folder, name="sd3"), [request_of(num_steps=8)]
    edits = [
        request_of(f"{task}", num_steps=12, **edit_fields(task, 32, 32, 0))
        for task in (Task.IMAGE_TO_IMAGE, Task.INPAINT)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(quality, "MIN_SSIM", -1.0)
        patch.setattr(quality, "MIN_PSNR_DB", 0.0)
        found = calibrate(
            kind,
            cases,
            edits=edits,
            **GREEDY,
            fingerprint=model_fingerprint(folder),
            default=FIRST_BLOCK,
        )
    tried = found.caches[FIRST_BLOCK]
    assert set(tried.edits) == {Task.IMAGE_TO_IMAGE, Task.INPAINT}
    assert all(summary.hit_rate > 0 and summary.passes for summary in tried.edits.values())
    failing = msgspec.structs.replace(tried.edits[Task.INPAINT], failures=("SSIM 0.5 is below 0.95",))
    tried = msgspec.structs.replace(tried, edits=tried.edits | {str(Task.INPAINT): failing})
    save_calibration(folder, msgspec.structs.replace(found, caches={FIRST_BLOCK: tried}))
    traits = build_engine(folder, name="sd3").traits

    assert chosen_step_cache(None, traits, Task.IMAGE_TO_IMAGE, 12) == FIRST_BLOCK
    check_request(dataclasses.replace(edits[0], step_cache=FIRST_BLOCK), traits, Tier())
    assert chosen_step_cache(None, traits, Task.INPAINT, 12) is None
    assert "fails the quality gate for inpaint: SSIM 0.5" in why_no_default_cache(traits, Task.INPAINT, 12)
    with pytest.raises(InvalidRequest, match="'first-block' is off here; it fails the quality gate for inpaint"):
        check_request(dataclasses.replace(edits[1], step_cache=FIRST_BLOCK), traits, Tier())


def test_a_calibration_on_text_alone_leaves_edits_without_a_cache(toys: Toys, tmp_path: Path):
    """A file that says nothing of edits is used for pictures from text, and edits say that they were not calibrated."""
    kind = load_kind(Path(shutil.copytree(toys.folder("stable_diffusion_3"), tmp_path / "sd3")), name="sd3")
    kind.step_caches, kind.default_step_cache = {FIRST_BLOCK: settings_of(0.1)[0]}, FIRST_BLOCK
    traits = kind.traits()

    assert chosen_step_cache(None, traits, Task.TEXT_TO_IMAGE, 12) == FIRST_BLOCK
    assert chosen_step_cache(None, traits, Task.IMAGE_TO_IMAGE, 12) is None
    assert "was not calibrated for image-to-image" in why_no_default_cache(traits, Task.IMAGE_TO_IMAGE, 12)


def test_edits_are_calibrated_at_the_models_own_values(toys: Toys):
    """One case a prompt and kind of edit; a model without edits has none."""
    grid = Grid(prompts=("a", "b"), num_steps=(12, 6))
    requests = edits_of(toys.kind("stable_diffusion_3"), grid)

    assert [(request.prompt, request.task) for request in requests] == [
        (prompt, task) for task in (Task.IMAGE_TO_IMAGE, Task.INPAINT) for prompt in ("a", "b")
    ]
    assert {request.num_steps for request in requests} == {12}
    assert edits_of(toys.kind("qwen_image"), grid) == []


def test_a_calibration_of_other_weights_is_not_used(toys: Toys, tmp_path: Path):
    """Weights or a scheduler that changed after the calibration switch the caches off, with the reason."""
    folder = Path(shutil.copytree(toys.folder("pixart"), tmp_path / "pixart"))
    kind = load_kind(folder, name="pixart")
    found = calibrate(kind, [request_of(num_steps=8)], **GREEDY, fingerprint=model_fingerprint(folder))
    save_calibration(folder, found)
    scheduler = folder / "scheduler" / "scheduler_config.json"
    before = build_engine(folder, name="pixart").traits
    scheduler.write_text(scheduler.read_text().replace("}", ', "solver_order": 1}'))
    after = build_engine(folder, name="pixart").traits

    assert before.step_caches == (FIRST_BLOCK,)
    assert after.step_caches == ()
    assert "other weights or another scheduler" in after.step_cache_reasons[FIRST_BLOCK]


def test_without_a_passing_threshold_the_cache_stays_off(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where nothing passes the gate no setting is kept, it is refused as default, and the traits say why."""
    monkeypatch.setattr(quality, "MIN_PSNR_DB", 101.0)
    folder = Path(shutil.copytree(toys.folder("stable_diffusion_3"), tmp_path / "sd3"))
    kind, cases = load_kind(folder, name="sd3"), [request_of(num_steps=12, guidance_scale=9.0)]
    found = calibrate(kind, cases, **GREEDY, fingerprint=model_fingerprint(folder))
    save_calibration(folder, found)
    traits = build_engine(folder, name="sd3").traits

    assert (found.caches[FIRST_BLOCK].setting, traits.step_caches) == (None, ())
    assert "no calibration passed the quality gate: PSNR" in traits.step_cache_reasons[FIRST_BLOCK]
    with pytest.raises(InvalidRequest, match="'first-block' is refused as default: no calibration passed"):
        calibrate(kind, cases, **GREEDY, default=FIRST_BLOCK)


def test_kinds_without_blocks_and_bad_files_say_so(toys: Toys, tmp_path: Path):
    """A UNet cannot be calibrated; a calibration file that is none is named."""
    with pytest.raises(UnsupportedMedia, match="has no list of blocks"):
        calibrate(toys.kind("stable_diffusion"), [request_of()])
    folder = Path(shutil.copytree(toys.folder("pixart"), tmp_path / "pixart"))
    (folder / FILE_NAME).write_text('{"architecture": 3}')
    with pytest.raises(InvalidRequest, match=r"pixart/step_cache.json: Expected `str`.*calibrate the model again"):
        build_engine(folder, name="pixart")


def test_a_failing_setting_is_dropped_and_a_saturated_one_not_drawn_again(
    toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The reports are those of drawing every setting on every case, up to the case where a setting first failed;
    one above a setting that failed is not drawn at all, one that differs in more is."""
    kind = load_kind(toys.folder("stable_diffusion_3"), name="sd3")
    cases = [request_of(str(seed), seed=seed, num_steps=9, guidance_scale=9.0) for seed in range(2)]
    settings = settings_of(0.0, 1e6, 1e9)
    full = evaluate(kind, cases, settings)
    worst_db = max(case.psnr_db for case in full[1].cases)
    monkeypatch.setattr(quality, "MIN_PSNR_DB", worst_db + 1)
    drawn: list[tuple[float, float]] = []
    settings.append(msgspec.structs.replace(settings[-1], warm_up_share=0.9))
    short = evaluate(
        kind,
        cases,
        settings,
        drops_failing=True,
        on_case=lambda setting, *rest: drawn.append((setting.threshold, setting.warm_up_share)),
    )

    assert drawn == [(0.0, 0.0), (1e6, 0.0), (1e9, 0.9), (0.0, 0.0), (1e9, 0.9)]
    assert [report.setting for report in short] == [settings[0], settings[1], settings[3]]
    assert [report.is_complete for report in short] == [True, False, True]
    assert [report.passes for report in short] == [True, False, True]
    assert full[1].cases[0].psnr_db == full[2].cases[0].psnr_db == short[1].cases[0].psnr_db < 100.0
    assert full[1].cases[0].cached_s == full[2].cases[0].cached_s  # the same drawing


def test_a_report_is_the_worst_of_what_was_drawn(toys: Toys):
    """The summary's error is that of an independent drawing, and its score counts the judge's answers."""
    kind = load_kind(toys.folder("pixart"), name="pixart")
    cases = [request_of(str(seed), seed=seed, num_steps=8, prompt=f"seed {seed}") for seed in range(2)]
    setting = settings_of(1e9)[0]
    (report,) = evaluate(kind, cases, [setting], judge=lambda prompt, frames: prompt == "seed 1")
    differences = []
    for case in cases:
        plain = draw_one(kind, case)
        cached = draw_one(kind, case, lambda row: new_caches(row, setting))
        differences.append(np.abs(plain.frames.astype(float) - cached.frames).mean())

    assert report.summary.mean_difference == pytest.approx(max(differences))
    assert (report.summary.plain_score, report.summary.score) == (0.5, 0.5)
    assert report.summary.hit_rate == pytest.approx(5 / 8)


def case_of(**changes: Any) -> Case:
    form: dict[str, Any] = dict(prompt="p", width_px=32, height_px=32, num_frames=1, num_steps=4, guidance_scale=1.0)
    form |= dict(seed=0, psnr_db=40.0, ssim=0.99, mean_difference=0.1, latent_error=0.01, flicker=0.0, hit_rate=0.5)
    return Case(**(form | dict(plain_s=2.0, cached_s=1.0) | changes))


def test_one_lost_picture_of_many_fails_the_gate_beyond_a_point():
    """One of 50 is two points and fails; one of 200 is half a point and passes; one won is no loss."""
    right, lost = (case_of(plain_is_right=True, is_right=is_right) for is_right in (True, False))

    assert "falls by 2.0 points" in summarise([lost, *[right] * 49]).failures[0]
    assert summarise([lost, *[right] * 199]).passes
    assert summarise([case_of(plain_is_right=False, is_right=True), right]).passes


@pytest.mark.parametrize(
    ("changes", "words"), [(dict(psnr_db=27.9), "PSNR 27.9 dB is below 28"), (dict(ssim=0.949), "SSIM 0.949 is below")]
)
def test_the_worst_case_decides(changes: dict[str, Any], words: str):
    """One case below the gate fails all, by its name."""
    summary = summarise([case_of(), case_of(**changes), case_of()])

    assert words in summary.failures[0]
    assert not summary.passes


def test_the_sheet_shows_the_worst_cases_first():
    """Of three cases a sheet for two keeps those with the lowest SSIM; tiles are the pictures and their difference."""
    sheet = ContactSheet(max_cases=2)
    plain = np.full((1, 32, 32, 3), 100, np.uint8)
    setting = settings_of(0.1)[0]
    for level, ssim_value in ((101, 0.99), (110, 0.90), (105, 0.95)):
        sheet.add(setting, case_of(ssim=ssim_value), plain, np.full_like(plain, level))
    pixels = np.asarray(sheet.image())
    row_px = pixels.shape[0] // 2

    tiles = pixels[row_px - 20, TEXT_PX + 20 :: 166], pixels[-20, TEXT_PX + 20 :: 166]
    assert [tile[0] for tile in tiles[0][:3]] == [100, 110, 40]
    assert [tile[0] for tile in tiles[1][:3]] == [100, 105, 20]


def test_the_grid_is_every_combination(toys: Toys):
    """Two prompts, sizes, step counts and scales are sixteen cases with a seed each; a bad size is refused by name."""
    kind = toys.kind("pixart")
    grid = Grid(prompts=("a", "b"), sizes_px=((32, 32), (48, 32)), num_steps=(4, 8), guidance_scales=(1.0, 4.0))
    requests = requests_of(kind, grid)

    assert len({(r.prompt, r.width_px, r.num_steps, r.guidance_scale) for r in requests}) == 16
    assert sorted(request.seed for request in requests) == list(range(16))
    with pytest.raises(InvalidRequest, match="width must be a positive multiple of 4 px, got 33"):
        requests_of(kind, Grid(sizes_px=((33, 32),)))


CASES = ["--prompt", "a cat", "--size", "32x32", "--steps", "12", "--guidance", "4"]


def test_the_verbs_calibrate_and_quality(toys: Toys, tmp_path: Path):
    """`calibrate` writes the file, `quality` measures the calibrated setting by the same code and writes its report."""
    folder, out = shutil.copytree(toys.folder("pixart"), tmp_path / "pixart"), tmp_path / "out"
    run = CliRunner().invoke
    early = run(main, ["quality", str(folder), "--cache", "teacache", "--threshold", "0.1", *CASES])
    few = run(main, ["calibrate", str(folder), "--cache", "first-block", *CASES])
    enough = [*CASES, "--seeds", "16"]
    first = run(main, ["calibrate", str(folder), "--cache", "first-block", "--default", "first-block", *enough])
    second = run(main, ["quality", str(folder), "--cache", "first-block", "-o", str(out), *CASES])

    assert (early.exit_code, "needs its polynomial" in early.output) == (1, True)
    assert (few.exit_code, "1 pictures are too few to calibrate on, 16 are the least" in few.output) == (1, True)
    assert first.exit_code == 0, first.output
    assert "default: first-block" in first.output
    assert second.exit_code == 0, second.output
    assert "inside the gate" in second.output
    report = json.loads((out / "quality.json").read_text())
    trials = json.loads((Path(folder) / FILE_NAME).read_text())["caches"]["first-block"]["trials"]
    chosen = next(trial for trial in trials if trial["cases"])
    assert report["cases"][0]["psnr_db"] == pytest.approx(chosen["cases"][0]["psnr_db"])
    assert "| all | 1 |" in (out / "quality.md").read_text()
    with Image.open(out / "contact-sheet.png") as sheet:
        assert sheet.width > TEXT_PX


def test_calibrate_tries_the_steps_of_the_ladder_that_are_named(toys: Toys, tmp_path: Path):
    """Thresholds from below, and only the order and the warm-ups that were asked for."""
    folder = shutil.copytree(toys.folder("pixart"), tmp_path / "pixart")
    named = ["--threshold", "0.3", "--threshold", "0.1", "--order", "1", "--warm-up", "0.5", "--warm-up", "0.25"]
    found = CliRunner().invoke(
        main, ["calibrate", str(folder), "--cache", "first-block", *named, *CASES, "--seeds", "16"]
    )
    trials = json.loads((Path(folder) / FILE_NAME).read_text())["caches"]["first-block"]["trials"]
    tried = [trial["setting"] for trial in trials]

    assert found.exit_code == 0, found.output
    assert [(one["warm_up_share"], one["order"], one["threshold"]) for one in tried] == [
        (0.5, 1, 0.1), (0.5, 1, 0.3), (0.25, 1, 0.1), (0.25, 1, 0.3),
    ]  # fmt: skip


def test_quality_refuses_a_setting_outside_the_gate(toys: Toys, monkeypatch: pytest.MonkeyPatch):
    """A setting that fails is refused as default and the exit code says so; judged cases show the task score."""
    monkeypatch.setattr(quality, "MIN_SSIM", 1.1)
    asked = ["--threshold", "9", "--judge", "shapes", "--num-prompts", "2", *CASES[2:]]
    found = CliRunner().invoke(main, ["quality", str(toys.folder("pixart")), "--cache", "first-block", *asked])

    assert found.exit_code == 1
    assert "refused as default: SSIM" in found.output
    assert "| 0% to 0% |" in found.output


def test_the_table_groups_by_size_steps_and_guidance():
    """A row for each group with its worst case, and one for all."""
    cases = (case_of(psnr_db=30.0), case_of(psnr_db=35.0), case_of(num_steps=8))
    setting = settings_of(0.1)[0]
    lines = by_group(Report(setting=setting, summary=summarise(cases), cases=cases)).splitlines()

    assert lines[2].startswith("| 32x32, 4 steps, guidance 1 | 2 | 30.0 |")
    assert lines[3].startswith("| 32x32, 8 steps, guidance 1 | 1 | 40.0 |")
    assert lines[4].startswith("| all | 3 | 30.0 |")


def test_a_clip_is_measured_over_its_frames(toys: Toys):
    """Of a clip the worst frame counts, and the change of flicker is reported; its table says how many frames."""
    kind = load_kind(toys.folder("wan"), name="wan")
    (request,) = requests_of(
        kind, Grid(prompts=("a cat",), sizes_px=((64, 32),), num_steps=(6,), guidance_scales=(1.0,), num_frames=5)
    )
    shown: list[np.ndarray] = []
    (report,) = evaluate(
        kind, [request], settings_of(1e9), on_case=lambda setting, case, plain, cached: shown.extend((plain, cached))
    )
    plain, cached = shown
    frames_db = [psnr_db(a.astype(float), b.astype(float)) for a, b in zip(plain, cached, strict=True)]
    moves = [np.abs(np.diff(frames.astype(float), axis=0)).mean() for frames in (cached, plain)]

    assert plain.shape == (5, 32, 64, 3)
    assert report.summary.psnr_db == pytest.approx(min(frames_db))
    assert report.summary.flicker == pytest.approx(moves[0] - moves[1]) != 0.0
    assert "| 64x32x5f, 6 steps, guidance 1 |" in by_group(report)

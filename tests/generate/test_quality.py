"""Quality measures on pictures whose answer is known, and calibration from measuring to serving."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from triptych.core.errors import InvalidRequest, UnsupportedMedia
from triptych.core.events import FinishReason
from triptych.generate import quality
from triptych.generate.build import build_engine
from triptych.generate.calibrate import FILE_NAME, as_table, calibrate, save_calibration
from triptych.generate.kinds.load import load_kind
from triptych.generate.quality import compare, psnr_db, ssim

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
    still = np.full((4, 8, 8, 3), 100, np.uint8)
    blinking = still.copy()
    blinking[1::2] += 8

    assert compare(blinking, still).flicker == pytest.approx(8.0)


async def test_calibration_turns_the_cache_on_within_the_gate(toys: Toys, tmp_path: Path):
    """Calibrate, save, load: the engine then takes the cache by name, hits, and the picture passes the gate."""
    folder = Path(shutil.copytree(toys.folder("pixart"), tmp_path / "pixart"))
    kind = load_kind(folder, name="pixart")
    cases = [request_of(str(seed), seed=seed, num_steps=16) for seed in range(2)]
    found = calibrate(kind, cases, thresholds=(1e-6, 0.01, 0.05, 1e9))
    save_calibration(folder, found)
    engine = build_engine(folder, name="pixart", config=CONFIG)
    await engine.start()
    try:
        cached = await final_of(engine, request_of("a", seed=0, num_steps=16, step_cache="first-block"))
        plain = await final_of(engine, request_of("b", seed=0, num_steps=16))
        stats = await engine.stats()
    finally:
        await engine.close()

    assert found.threshold is not None
    assert all(trial.passes for trial in found.trials if trial.threshold <= found.threshold)
    assert engine.traits.step_caches == ("first-block",)
    assert cached.reason is FinishReason.STOP
    assert 0 < cached.counters["cache_hits"] < cached.counters["cache_lookups"]
    assert "cache_hits" not in plain.counters
    assert compare(cached.frames, plain.frames).passes
    assert stats["step_cache_hits"] == cached.counters["cache_hits"]
    assert "| pass |" in as_table(found)


def test_without_a_passing_threshold_the_cache_stays_off(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where nothing passes the gate no threshold is kept, and the traits say why there is no cache."""
    monkeypatch.setattr(quality, "MIN_PSNR_DB", 101.0)
    folder = Path(shutil.copytree(toys.folder("stable_diffusion_3"), tmp_path / "sd3"))
    kind = load_kind(folder, name="sd3")
    found = calibrate(kind, [request_of(num_steps=12, guidance_scale=9.0)], thresholds=(1e9,))

    assert (found.threshold, kind.traits().step_caches) == (None, ())
    assert "no calibration that passed" in kind.traits().step_cache_reason


def test_kinds_without_blocks_and_bad_files_say_so(toys: Toys, tmp_path: Path):
    """A UNet cannot be calibrated; a calibration file that is none is named."""
    with pytest.raises(UnsupportedMedia, match="has no list of blocks"):
        calibrate(toys.kind("stable_diffusion"))
    folder = Path(shutil.copytree(toys.folder("pixart"), tmp_path / "pixart"))
    (folder / FILE_NAME).write_text('{"cache": 3}')
    with pytest.raises(InvalidRequest, match=r"pixart/step_cache.json: Expected `str`"):
        build_engine(folder, name="pixart")

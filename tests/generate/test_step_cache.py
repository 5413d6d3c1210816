"""The first-block cache on stock blocks: never wrong where it computes, per row where it hits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.load import load_kind
from triptych.generate.kinds.row import Row
from triptych.generate.runner import StepRunner
from triptych.generate.step_cache import MAX_CONSECUTIVE_HITS, new_caches
from triptych.testing.toy_diffusion import make_diffusion_folder

from .test_parity import BOUND, relative_error, run_alone, sized, start

CACHEABLE = ["stable_diffusion_3", "flux", "pixart", "qwen_image", "wan", "ltx"]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    """Kinds of their own: the cache wraps the blocks' forward."""
    root: Path = tmp_path_factory.mktemp("cached")
    made = {name: load_kind(make_diffusion_folder(name, root / name), name=name) for name in CACHEABLE}
    for kind in made.values():
        kind.cache_threshold = 1.0
    return made


@torch.inference_mode()
def run_cached(kind: Kind, rows: list[Row], thresholds: list[float | None]) -> None:
    runner = StepRunner(kind)
    for row, threshold in zip(rows, thresholds, strict=True):
        if threshold is not None:
            row.caches = new_caches(row, threshold)
    while unfinished := [row for row in rows if row.step < row.num_steps]:
        assert not runner.step(unfinished).failures


@pytest.mark.parametrize("name", CACHEABLE)
def test_a_cache_that_never_hits_changes_nothing(kinds: dict[str, Kind], name: str):
    """With threshold 0 the latent is the one without a cache."""
    kind, request = kinds[name], sized(name, num_steps=4)
    with torch.inference_mode():
        row = start(kind, request)
    run_cached(kind, [row], [0.0])

    assert sum(cache.num_hits for cache in row.caches) == 0
    assert relative_error(row.latents, run_alone(kind, request).latents) <= BOUND


@pytest.mark.parametrize("name", CACHEABLE)
def test_rows_hit_and_compute_in_one_batch(kinds: dict[str, Kind], name: str):
    """A row that always hits, one that never does and one without a cache, together: each is as alone."""
    kind = kinds[name]
    requests = [sized(name, str(index), seed=index, num_steps=8) for index in range(3)]
    thresholds = [1e9, 0.0, None]
    with torch.inference_mode():
        together = [start(kind, request) for request in requests]
        alone = [start(kind, request) for request in requests]
    run_cached(kind, together, thresholds)
    for row, threshold in zip(alone, thresholds, strict=True):
        run_cached(kind, [row], [threshold])

    for one, other in zip(together, alone, strict=True):
        assert relative_error(one.latents, other.latents) <= BOUND
    assert all(cache.num_hits > 0 for cache in together[0].caches)
    assert relative_error(together[0].latents, run_alone(kind, requests[0]).latents) > BOUND


def test_first_and_last_steps_compute_and_runs_of_hits_are_bounded(kinds: dict[str, Kind]):
    """With a threshold that always passes: 10 steps are 1 computed, 3 hits, 1, 3, 1 and the last computed."""
    kind = kinds["pixart"]
    with torch.inference_mode():
        row = start(kind, sized("pixart", num_steps=10))
    run_cached(kind, [row], [1e9])

    assert [cache.num_hits for cache in row.caches] == [2 * MAX_CONSECUTIVE_HITS] * len(row.branches)

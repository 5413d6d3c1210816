"""The step caches on stock blocks: never wrong where they compute, per row where they hit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.generate.branch_cache import FirstBlockBranch, TeaBranch, new_caches, rescale
from triptych.generate.cache_setting import FIRST_BLOCK, TEACACHE, CacheSetting
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.load import load_kind
from triptych.generate.kinds.row import Row
from triptych.generate.runner import StepRunner
from triptych.generate.schedule import Way
from triptych.generate.step_cache import step_cache_of
from triptych.generate.step_workers import StepWorkers
from triptych.generate.tea_fit import fit_points, fit_teacache
from triptych.testing.toy_diffusion import make_diffusion_folder

from .test_parity import BOUND, relative_error, run_alone, sized, start

CACHEABLE = ["stable_diffusion_3", "flux", "pixart", "qwen_image", "wan", "ltx"]
CACHES = [FIRST_BLOCK, TEACACHE]


def setting_of(cache: str, threshold: float, **changes: Any) -> CacheSetting:
    """TeaCache with the identity as its polynomial."""
    coefficients = (1.0, 0.0) if cache == TEACACHE else ()
    return CacheSetting(cache=cache, threshold=threshold, coefficients=coefficients, **changes)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    """Kinds of their own: the cache wraps the blocks' forward."""
    root: Path = tmp_path_factory.mktemp("cached")
    return {name: load_kind(make_diffusion_folder(name, root / name), name=name) for name in CACHEABLE}


@torch.inference_mode()
def run_cached(kind: Kind, rows: list[Row], settings: list[CacheSetting | None], num_workers: int = 1) -> None:
    workers = StepWorkers(num_workers)
    runner = StepRunner(kind, workers=workers)
    for row, setting in zip(rows, settings, strict=True):
        if setting is not None:
            row.caches = new_caches(row, setting)
    while unfinished := [row for row in rows if row.step < row.num_steps]:
        assert not runner.step(unfinished, way=Way(num_workers, 1)).failures
    workers.close()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", CACHEABLE)
def test_a_cache_that_never_hits_changes_nothing(kinds: dict[str, Kind], name: str, cache: str):
    """With threshold 0 the latent is the one without a cache."""
    kind, request = kinds[name], sized(name, num_steps=4)
    with torch.inference_mode():
        row = start(kind, request)
    run_cached(kind, [row], [setting_of(cache, 0.0)])

    assert sum(branch.num_hits for branch in row.caches) == 0
    assert relative_error(row.latents, run_alone(kind, request).latents) <= BOUND


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", CACHEABLE)
def test_rows_hit_and_compute_in_one_batch(kinds: dict[str, Kind], name: str, num_workers: int):
    """Rows that always hit with either cache, that never do, and one without a cache, together: each is as alone."""
    kind = kinds[name]
    settings = [
        setting_of(FIRST_BLOCK, 1e9),
        setting_of(TEACACHE, 1e9, order=1),
        None,
        setting_of(TEACACHE, 0.0),
        setting_of(FIRST_BLOCK, 0.0),
    ]
    requests = [sized(name, str(index), seed=index, num_steps=7 + index) for index in range(len(settings))]
    with torch.inference_mode():
        together = [start(kind, request) for request in requests]
        alone = [start(kind, request) for request in requests]
    run_cached(kind, together, settings, num_workers)
    for row, setting in zip(alone, settings, strict=True):
        run_cached(kind, [row], [setting])

    for one, other in zip(together, alone, strict=True):
        assert relative_error(one.latents, other.latents) <= BOUND
        assert [branch.num_hits for branch in one.caches] == [branch.num_hits for branch in other.caches]
    for row, request in zip(together[:2], requests[:2], strict=True):
        assert all(branch.num_hits > 0 for branch in row.caches)
        assert relative_error(row.latents, run_alone(kind, request).latents) > BOUND


@pytest.mark.parametrize("cache", CACHES)
def test_a_batch_of_hits_alone_runs_no_skipped_block(
    kinds: dict[str, Kind], cache: str, monkeypatch: pytest.MonkeyPatch
):
    """While every row hits, the first-block cache runs one block, TeaCache none."""
    kind, calls = kinds["pixart"], []
    step_cache_of(kind)
    for index, block in enumerate(kind.denoiser.transformer_blocks):
        inner = block.attn1.forward
        monkeypatch.setattr(block.attn1, "forward", lambda *a, i=index, f=inner, **k: calls.append(i) or f(*a, **k))
    with torch.inference_mode():
        rows = [start(kind, sized("pixart", str(seed), seed=seed, num_steps=4)) for seed in range(2)]
        run_cached(kind, rows, [setting_of(cache, 1e9)] * 2)

    computed = [0, 1, 2, 3]
    skipped = [0] if cache == FIRST_BLOCK else []
    assert calls == computed + 2 * skipped + computed


@pytest.mark.parametrize("cache", CACHES)
def test_first_and_last_steps_compute_and_runs_of_hits_are_bounded(kinds: dict[str, Kind], cache: str):
    """With a threshold that always passes: 10 steps are 1 computed, 3 hits, 1, 3, 1 and the last computed."""
    kind = kinds["pixart"]
    setting = setting_of(cache, 1e9)
    with torch.inference_mode():
        row = start(kind, sized("pixart", num_steps=10))
    run_cached(kind, [row], [setting])

    assert [branch.num_hits for branch in row.caches] == [2 * setting.max_consecutive_hits] * len(row.branches)
    assert not any(branch.num_refused for branch in row.caches)


@pytest.mark.parametrize("cache", CACHES)
def test_steps_of_the_warm_up_compute(kinds: dict[str, Kind], cache: str):
    """With a threshold that always passes and half of the steps to warm up: of 9 steps 5 computed, 3 hits, the last."""
    setting = msgspec.structs.replace(setting_of(cache, 1e9), warm_up_share=0.5)
    with torch.inference_mode():
        row = start(kinds["pixart"], sized("pixart", num_steps=9))
    run_cached(kinds["pixart"], [row], [setting])

    assert [branch.num_hits for branch in row.caches] == [3] * len(row.branches)


@pytest.mark.parametrize("name", CACHEABLE)
def test_the_modulated_input_is_what_the_stock_block_attends_over(
    kinds: dict[str, Kind], name: str, monkeypatch: pytest.MonkeyPatch
):
    """TeaCache's signal equals the tensor that diffusers' own first block gives to its attention."""
    kind, seen, signals = kinds[name], [], []
    block = getattr(kind.denoiser, kind.blocks[0])[0]
    attention = block.attn1 if hasattr(block, "attn1") else block.attn
    hook = attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]),
        with_kwargs=True,
    )
    real = kind.modulated_input
    monkeypatch.setattr(kind, "modulated_input", lambda *args: signals.append(real(*args)) or signals[-1])
    try:
        with torch.inference_mode():
            rows = [start(kind, sized(name, str(seed), seed=seed, num_steps=2)) for seed in range(2)]
            run_cached(kind, rows, [setting_of(TEACACHE, 0.0)] * 2)
    finally:
        hook.remove()

    assert len(seen) == len(signals) == 2
    for one, other in zip(signals, seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_failed_forward_counts_nothing(kinds: dict[str, Kind], monkeypatch: pytest.MonkeyPatch):
    """A step whose forward raised and was tried again ends with the same decisions and the same latent."""
    kind = kinds["pixart"]
    settings = [setting_of(TEACACHE, 1e9), setting_of(FIRST_BLOCK, 1e9)]
    requests = [sized("pixart", str(seed), seed=seed, num_steps=6) for seed in range(2)]
    with torch.inference_mode():
        calm, troubled = ([start(kind, request) for request in requests] for _ in range(2))
    run_cached(kind, calm, settings)
    real, calls = kind.forward, []

    def forward(latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = real(latents, *rest)
        calls.append(len(latents))
        if len(calls) == 3:
            raise RuntimeError("once")
        return out

    monkeypatch.setattr(kind, "forward", forward)
    run_cached(kind, troubled, settings)

    for one, other in zip(calm, troubled, strict=True):
        assert [branch.num_hits for branch in one.caches] == [branch.num_hits for branch in other.caches]
        assert relative_error(other.latents, one.latents) <= BOUND


def test_order_one_follows_a_line():
    """Residuals that grow with the timestep by a straight line are foretold exactly."""
    branch = FirstBlockBranch(setting_of(FIRST_BLOCK, 1.0, order=1), [900.0, 800.0, 500.0, 100.0])
    for step in (0, 1):
        branch.at(step).keep(torch.full((1, 2), 3 * branch._timesteps[step]), torch.zeros(1, 2))
        branch.settle()

    assert torch.equal(branch.at(2).hit(), torch.full((1, 2), 1500.0))


def teacache_as_published(signals: list[float], coefficients: tuple[float, ...], threshold: float) -> list[bool]:
    """The loop of TeaCache4FLUX on numbers: which steps run the blocks."""
    accumulated, computes = 0.0, []
    for step, signal in enumerate(signals):
        if step in (0, len(signals) - 1):
            should, accumulated = True, 0.0
        else:
            change = abs(signal - signals[step - 1]) / abs(signals[step - 1])
            accumulated += float(np.poly1d(coefficients)(change))
            should = accumulated >= threshold
            accumulated = 0.0 if should else accumulated
        computes.append(should)
    return computes


@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=12),
    st.tuples(*[st.floats(0.0, 2.0)] * 3),
    st.floats(0.01, 2.0),
)
def test_teacache_decides_as_published(signals: list[float], coefficients: tuple[float, ...], threshold: float):
    """Over random signals and polynomials the steps computed are those of the authors' loop."""
    setting = CacheSetting(cache=TEACACHE, threshold=threshold, coefficients=coefficients, max_consecutive_hits=99)
    branch = TeaBranch(setting, [float(index) for index in range(len(signals))])
    computes = []
    for step, signal in enumerate(signals):
        hit = branch.at(step).decide(torch.tensor([[signal]], dtype=torch.float64))
        if hit:
            branch.hit()
        else:
            branch.keep(torch.ones(1, 1), torch.zeros(1, 1))
        branch.settle()
        computes.append(not hit)

    assert computes == teacache_as_published(signals, coefficients, threshold)


def test_fit_finds_a_polynomial_and_wants_points():
    """Points of a known polynomial give its coefficients back; too few points are refused."""
    true = (30.0, -20.0, 4.0, 0.5, 0.01)
    changes = np.linspace(0.01, 0.4, 40)
    fit = fit_points([(float(change), rescale(true, float(change))) for change in changes])

    assert fit.coefficients == pytest.approx(true, rel=1e-6)
    assert fit.r_squared == pytest.approx(1.0)
    with pytest.raises(InvalidRequest, match="3 step changes are too few"):
        fit_points([(0.1, 0.1)] * 3)


def test_fit_on_a_model_sees_every_step_of_every_branch(kinds: dict[str, Kind]):
    """Two branches of 9 steps are 16 changes; the fit explains something of them."""
    fit = fit_teacache(kinds["pixart"], [sized("pixart", num_steps=9)])

    assert fit.num_points == 2 * 8
    assert 0.0 < fit.r_squared <= 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(cache="magic"), "cache must be one of first-block, teacache"),
        (dict(threshold=float("nan")), "threshold must be 0 or more"),
        (dict(order=2), "order must be 0 or 1"),
        (dict(cache=TEACACHE), "coefficients belong to teacache"),
        (dict(max_consecutive_hits=0), "at least 1"),
        (dict(warm_up_share=1.0), "warm_up_share must be at least 0 and below 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], words: str):
    """Each mistake is named."""
    with pytest.raises(ValueError, match=words):
        CacheSetting(**(dict(cache=FIRST_BLOCK, threshold=0.1) | changes))

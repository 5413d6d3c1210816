"""Each kind against its stock pipeline, and a batch of strangers against each row alone."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FluxImg2ImgPipeline,
    PixArtSigmaPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
)
from diffusers.pipelines.pixart_alpha import pipeline_pixart_sigma
from PIL import Image

from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.load import load_kind
from triptych.generate.kinds.row import Row
from triptych.generate.request import GenerateRequest
from triptych.generate.runner import StepRunner
from triptych.generate.schedule import Way
from triptych.generate.step_workers import StepWorkers
from triptych.testing.toy_diffusion import TOYS

from .conftest import Toys, request_of

BOUND = 2e-5  # largest latent error, over the largest absolute latent; float32
SIZES = {"wan": (64, 32, 5), "ltx": (64, 32, 9)}
GUIDANCE_NAMES = {"qwen_image": "true_cfg_scale"}


def sized(kind: str, request_id: str = "r", **changes: Any) -> GenerateRequest:
    width_px, height_px, num_frames = SIZES.get(kind, (48, 32, 1))
    return request_of(request_id, width_px=width_px, height_px=height_px, num_frames=num_frames, **changes)


def start(kind: Kind, request: GenerateRequest) -> Row:
    branches = [kind.encode_text(request.prompt, is_negative=False)]
    if kind.uses_guidance(request):
        branches.append(kind.encode_text(request.negative_prompt, is_negative=True))
    return kind.prepare(request, tuple(branches))


@torch.inference_mode()
def run_alone(kind: Kind, request: GenerateRequest) -> Row:
    row, runner = start(kind, request), StepRunner(kind)
    while row.step < row.num_steps:
        assert not runner.step([row]).failures
    return row


def stock_latents(pipeline: Any, request: GenerateRequest, name: str, **extra: Any) -> torch.Tensor:
    form: dict[str, Any] = dict(
        prompt=request.prompt,
        num_inference_steps=request.num_steps,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="latent",
        return_dict=False,
    )
    takes_size = name != "stable_diffusion" or "image" not in extra or "mask_image" in extra
    if takes_size:
        form |= dict(width=request.width_px, height=request.height_px)
    if request.negative_prompt is not None:
        form["negative_prompt"] = request.negative_prompt
    form[GUIDANCE_NAMES.get(name, "guidance_scale")] = request.guidance_scale
    if name in SIZES:
        form["num_frames"] = request.num_frames
    if name == "ltx":
        form["frame_rate"] = request.frames_per_s
    if name == "pixart":
        form["use_resolution_binning"] = False
        form["clean_caption"] = False
    return pipeline(**(form | extra))[0]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", sorted(TOYS))
def test_latent_equals_the_stock_pipeline(toys: Toys, name: str):
    """Same seed, same latent as diffusers' own loop, within float error."""
    kind = toys.kind(name)
    negative = None if name == "flux" else "blurred"
    request = sized(name, negative_prompt=negative, num_steps=5)

    theirs = stock_latents(kind.pipeline, request, name)

    assert relative_error(run_alone(kind, request).latents, theirs) <= BOUND


@pytest.mark.parametrize("name", sorted(TOYS))
def test_picture_equals_the_stock_pipeline(toys: Toys, name: str):
    """Decoded pixels are the stock ones, to one level."""
    kind = toys.kind(name)
    request = sized(name, num_steps=2, negative_prompt=None if name == "flux" else "")
    row = run_alone(kind, request)
    stock = stock_latents(kind.pipeline, request, name, output_type="np")

    with torch.inference_mode():
        frames, flagged = kind.decode(row)

    theirs = (np.asarray(stock).reshape(frames.shape) * 255).round()
    assert not flagged
    assert np.abs(frames.astype(int) - theirs).max() <= 1


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("name", sorted(TOYS))
def test_a_row_does_not_depend_on_its_batch(toys: Toys, name: str, num_workers: int):
    """Rows of other seeds, prompts, lengths and guidance join and leave at random edges; each latent is as alone,
    also where a step's branches are shared out among workers."""
    kind, workers = toys.kind(name), StepWorkers(num_workers)
    runner = StepRunner(kind, workers=workers)
    random = np.random.default_rng(5)
    requests = [
        sized(
            name,
            str(index),
            prompt="a " + "very " * index + "red square",
            seed=index,
            num_steps=int(random.integers(2, 7)),
            guidance_scale=(5.0, 1.0, 2.5, 7.0)[index],
            negative_prompt="dark" if index % 2 else "",
        )
        for index in range(4)
    ]
    with torch.inference_mode():
        waiting = [start(kind, request) for request in requests]
        running, done = [waiting.pop(0)], []
        while running or waiting:
            if waiting and random.random() < 0.6:
                running.append(waiting.pop(0))
            if not running:
                continue
            assert not runner.step(running, way=Way(num_workers, 1)).failures
            done += [row for row in running if row.step == row.num_steps]
            running = [row for row in running if row.step < row.num_steps]

    workers.close()
    for row in done:
        alone = run_alone(kind, row.request)
        assert relative_error(row.latents, alone.latents) <= BOUND
    assert len(done) == len(requests)


def stock_sibling(stock: Any, kind: Kind) -> Any:
    """Another stock pipeline over the same components, with a scheduler of its own."""
    options = {"requires_safety_checker": False} if kind.name == "stable_diffusion" else {}
    components = kind.pipeline.components
    pipeline = stock(**components | {"scheduler": copy.deepcopy(components["scheduler"])}, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(width_px: int, height_px: int) -> np.ndarray:
    grid = np.stack(np.meshgrid(np.linspace(0, 255, width_px), np.linspace(255, 0, height_px)), axis=-1)
    return np.concatenate([grid, np.full((height_px, width_px, 1), 90.0)], axis=-1).astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("stable_diffusion", StableDiffusionImg2ImgPipeline),
        ("stable_diffusion_3", StableDiffusion3Img2ImgPipeline),
        ("flux", FluxImg2ImgPipeline),
    ],
)
def test_image_to_image_equals_the_stock_pipeline(toys: Toys, name: str, stock: Any):
    """Starting from a picture gives the stock latent."""
    kind = toys.kind(name)
    request = sized(name, init_image=picture(48, 32), strength=0.6, num_steps=7)
    pipeline = stock_sibling(stock, kind)

    theirs = stock_latents(pipeline, request, name, image=Image.fromarray(request.init_image), strength=0.6)

    assert relative_error(run_alone(kind, request).latents, theirs) <= BOUND


@pytest.mark.parametrize("is_flow", [False, True])
def test_pixart_starts_from_a_picture_as_stable_diffusion_does(
    toys: Toys, is_flow: bool, monkeypatch: pytest.MonkeyPatch
):
    """The stock pipeline, begun at the tail of the schedule from the latent that stock image-to-image would begin
    from, gives our latent; a masked row keeps what lies outside the mask."""
    folder = toys.folder("pixart")
    kind = load_kind(folder, name="pixart")
    config = dict(prediction_type="flow_prediction", use_flow_sigmas=True) if is_flow else {}
    kind.pipeline.scheduler = scheduler = DPMSolverMultistepScheduler(**config)
    request = sized("pixart", init_image=picture(48, 32), strength=0.6, num_steps=7)
    scheduler.set_timesteps(7)
    edit = SimpleNamespace(scheduler=scheduler, vae=kind.vae)
    tail, num_steps = StableDiffusionImg2ImgPipeline.get_timesteps(edit, 7, 0.6, "cpu")
    pixels = torch.from_numpy(request.init_image).permute(2, 0, 1)[None].float() / 127.5 - 1
    generator = torch.Generator().manual_seed(request.seed)
    latents = StableDiffusionImg2ImgPipeline.prepare_latents(
        edit, pixels, tail[:1], 1, 1, torch.float32, "cpu", generator
    )
    monkeypatch.setattr(pipeline_pixart_sigma, "retrieve_timesteps", lambda *args, **kwargs: (tail, num_steps))
    pipeline = PixArtSigmaPipeline(**kind.pipeline.components | {"scheduler": copy.deepcopy(scheduler)})
    pipeline.set_progress_bar_config(disable=True)

    theirs = stock_latents(pipeline, request, "pixart", latents=latents)
    masked = dataclasses.replace(request, mask=np.pad(np.full((32, 24), 255, np.uint8), ((0, 0), (24, 0))))
    row = run_alone(kind, masked)

    assert num_steps == 4
    assert relative_error(run_alone(kind, request).latents, theirs) <= BOUND
    kept = row.inpaint.mask == 0
    assert 0 < kept.float().mean() < 1
    assert torch.equal(row.latents[kept.expand_as(row.latents)], row.inpaint.image_latents[kept.expand_as(row.latents)])


@pytest.mark.parametrize(
    ("name", "stock", "strength"),
    [
        ("stable_diffusion", StableDiffusionInpaintPipeline, 0.7),
        ("stable_diffusion", StableDiffusionInpaintPipeline, 1.0),
        ("stable_diffusion_3", StableDiffusion3InpaintPipeline, 0.7),
    ],
)
def test_inpainting_equals_the_stock_pipeline(toys: Toys, name: str, stock: Any, strength: float):
    """Drawing anew under a mask gives the stock latent."""
    kind = toys.kind(name)
    mask = np.zeros((32, 48), np.uint8)
    mask[8:24, 10:30] = 255
    request = sized(name, init_image=picture(48, 32), mask=mask, strength=strength, num_steps=6)
    pipeline = stock_sibling(stock, kind)

    theirs = stock_latents(
        pipeline,
        request,
        name,
        image=Image.fromarray(request.init_image),
        mask_image=Image.fromarray(mask),
        strength=strength,
    )

    assert relative_error(run_alone(kind, request).latents, theirs) <= BOUND


def test_two_passes_equal_one_doubled_batch(toys: Toys):
    """With room for one branch a forward, guidance runs as two passes and gives the same latent."""
    kind = toys.kind("stable_diffusion_3")
    request = sized("stable_diffusion_3")
    with torch.inference_mode():
        row, runner = start(kind, request), StepRunner(kind, max_forward_tokens=1)
        while row.step < row.num_steps:
            runner.step([row])

    assert relative_error(row.latents, run_alone(kind, request).latents) <= BOUND

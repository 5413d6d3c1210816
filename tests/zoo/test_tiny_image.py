"""tiny-image as an ordinary folder: stock diffusers loads it, and what it draws for a prompt can be measured."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers import PixArtAlphaPipeline
from PIL import Image

from triptych import zoo
from triptych.cli import main
from triptych.generate.evaluate import draw_one
from triptych.generate.kinds.load import load_kind
from triptych.generate.request import GenerateRequest
from triptych.testing.judge import look, verdict
from triptych.testing.prompts import MAX_OBJECTS, Prompt, invent_prompt

SEED = 2024  # the evaluation's, so that its figures tell what to expect here
MAX_BYTES = 15_000_000
GUIDANCE = 2.0  # the folder's own
LEAST_GROUNDS = 9  # of ten that do not ask for white; chance is one in six


@pytest.fixture(scope="module")
def pipeline() -> PixArtAlphaPipeline:
    folder = zoo.folder("tiny-image")
    pipeline = PixArtAlphaPipeline.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: PixArtAlphaPipeline, texts: list[str], *, width_px: int = 64) -> np.ndarray:
    """[B, H, W, 3] uint8, seeds counting up from zero."""
    drawn = pipeline(
        texts,
        width=width_px,
        height=64,
        num_inference_steps=20,
        guidance_scale=GUIDANCE,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(texts))],
        use_resolution_binning=False,
        clean_caption=False,
        output_type="np",
    ).images
    return (drawn * 255).round().astype(np.uint8)


def held_out(num: int, max_objects: int = MAX_OBJECTS) -> list[Prompt]:
    rng = random.Random(SEED)
    invented = (invent_prompt(rng, held_out=True) for _ in range(100 * num))
    return [prompt for prompt in invented if prompt.num_objects <= max_objects][:num]


def test_folder_is_small_and_safe():
    """Weights are safetensors alone, 15 MB or less in all."""
    files = [path for path in zoo.folder("tiny-image").rglob("*") if path.is_file()]

    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md"}


def test_draw_without_a_model_gives_the_stock_picture(pipeline: PixArtAlphaPipeline, tmp_path: Path):
    """`triptych draw` takes the embedded model; the file is the stock pipeline's picture of that seed, to one level.
    Steps are the class's, guidance is the folder's."""
    out = tmp_path / "out.png"
    options = ["--width-px", "64", "--height-px", "64", "--seed", "0"]
    found = CliRunner().invoke(main, ["draw", "a red circle on white", "-o", str(out), *options])
    assert found.exit_code == 0, found.output

    with Image.open(out) as picture:
        ours = np.asarray(picture).astype(int)
    assert np.abs(ours - draw(pipeline, ["a red circle on white"])[0]).max() <= 1


@pytest.mark.parametrize("seed", range(3))
def test_an_edit_changes_what_it_is_asked_to_and_keeps_the_place(seed: int):
    """From a red circle, "a blue circle": another colour, the same place to a few pixels."""
    kind = load_kind(zoo.folder("tiny-image"), name="tiny-image")
    form: dict[str, Any] = dict(request_id="r", width_px=64, height_px=64, num_steps=20, guidance_scale=GUIDANCE)
    red = draw_one(kind, GenerateRequest(**form, prompt="a red circle on white", seed=seed)).frames[0]
    edit = GenerateRequest(**form, prompt="a blue circle on white", seed=seed + 10, init_image=red, strength=0.6)
    blue = draw_one(kind, edit).frames[0]

    (before,), (after,) = look(red).things, look(blue).things
    assert (before.colour, after.colour, after.shape) == ("red", "blue", "circle")
    assert np.hypot(after.x_px - before.x_px, after.y_px - before.y_px) <= 6


def test_draws_at_other_aspects(pipeline: PixArtAlphaPipeline):
    """Any multiple of 8 pixels is a size."""
    assert draw(pipeline, ["a blue square"], width_px=104).shape == (1, 64, 104, 3)


def test_draws_on_the_ground_that_was_asked_for(pipeline: PixArtAlphaPipeline):
    """Held-out prompts that do not ask for white get their background."""
    prompts = [prompt for prompt in held_out(40) if prompt.background != "white"][:10]
    pictures = draw(pipeline, [str(prompt) for prompt in prompts])

    right = [look(picture).background == prompt.background for prompt, picture in zip(prompts, pictures, strict=True)]
    assert sum(right) >= LEAST_GROUNDS


@pytest.mark.parametrize(("num", "max_objects", "least_right"), [(10, 2, 9), (20, MAX_OBJECTS, 16)])
def test_draws_held_out_prompts(pipeline: PixArtAlphaPipeline, num: int, max_objects: int, least_right: int):
    """Count, colours, shapes, background and relation, by measured pixels. Of the twenty, two fail."""
    prompts = held_out(num, max_objects)
    pictures = draw(pipeline, [str(prompt) for prompt in prompts])

    right = [verdict(prompt, look(picture)).is_right for prompt, picture in zip(prompts, pictures, strict=True)]
    assert sum(right) >= least_right

"""tiny-image as an ordinary folder: stock diffusers loads it, and what it draws for a prompt can be measured."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from diffusers import PixArtAlphaPipeline

from triptych.generate.kinds.load import load_kind
from triptych.testing.judge import look, verdict
from triptych.testing.prompts import Prompt, invent_prompt
from triptych.zoo import folder

SEED = 2024  # the evaluation's, so that its figures tell what to expect here
MAX_BYTES = 15_000_000


@pytest.fixture(scope="module")
def pipeline() -> PixArtAlphaPipeline:
    pipeline = PixArtAlphaPipeline.from_pretrained(folder("tiny-image"), dtype=torch.float32, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: PixArtAlphaPipeline, texts: list[str], *, guidance: float = 4.0, width_px: int = 64) -> np.ndarray:
    """[B, H, W, 3] uint8, seeds counting up from zero."""
    drawn = pipeline(
        texts,
        width=width_px,
        height=64,
        num_inference_steps=20,
        guidance_scale=guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(texts))],
        use_resolution_binning=False,
        clean_caption=False,
        output_type="np",
    ).images
    return (drawn * 255).round().astype(np.uint8)


def held_out(num: int) -> list[Prompt]:
    rng = random.Random(SEED)
    invented = (invent_prompt(rng, held_out=True) for _ in range(100 * num))
    return [prompt for prompt in invented if prompt.num_objects <= 2][:num]


def test_folder_is_small_and_safe():
    """Weights are safetensors alone, 15 MB or less in all."""
    files = [path for path in folder("tiny-image").rglob("*") if path.is_file()]

    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md"}


def test_served_kind_draws_what_the_stock_pipeline_draws(pipeline: PixArtAlphaPipeline):
    """The server's own loader takes the folder, and its size rule fits the model's 8-pixel tokens."""
    kind = load_kind(folder("tiny-image"), name="tiny-image")

    ours = kind.encode_text("a red circle on white", is_negative=False)
    theirs, mask, _, _ = pipeline.encode_prompt("a red circle on white", do_classifier_free_guidance=False)
    assert kind.traits().size_multiple_px == 8
    assert (kind.traits().default_width_px, kind.traits().default_height_px) == (128, 128)
    assert torch.equal(ours["encoder_hidden_states"], theirs)
    assert torch.equal(ours["encoder_attention_mask"], mask)


def test_draws_at_other_aspects(pipeline: PixArtAlphaPipeline):
    """Any multiple of 8 pixels is a size."""
    assert draw(pipeline, ["a blue square"], width_px=104).shape == (1, 64, 104, 3)


def test_draws_on_the_ground_that_was_asked_for(pipeline: PixArtAlphaPipeline):
    """Of ten held-out prompts that do not ask for white at least five get their background; chance is one in six."""
    prompts = [prompt for prompt in held_out(40) if prompt.background != "white"][:10]

    pictures = draw(pipeline, [str(prompt) for prompt in prompts])

    assert (
        sum(look(picture).background == prompt.background for prompt, picture in zip(prompts, pictures, strict=True))
        >= 5
    )


@pytest.mark.xfail(reason="trained for 533 short steps: colours and grounds, no outlines yet", strict=True)
def test_draws_ten_held_out_prompts_rightly(pipeline: PixArtAlphaPipeline):
    """Count, colours, shapes, background and relation, by measured pixels, in nine of ten."""
    prompts = held_out(10)

    pictures = draw(pipeline, [str(prompt) for prompt in prompts])

    assert sum(verdict(prompt, look(picture)).is_right for prompt, picture in zip(prompts, pictures, strict=True)) >= 9

"""What is refused before it is queued, and with which words."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, InvalidMedia, InvalidRequest, UnsupportedMedia
from triptych.generate.request import GenerateRequest, ModelTraits, Task, check_request

TRAITS = ModelTraits(
    name="m",
    architecture="StableDiffusionPipeline",
    tasks=frozenset({Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT}),
    size_multiple_px=8,
    default_width_px=64,
    default_height_px=64,
    default_num_steps=20,
    default_guidance_scale=5.0,
)
GOOD = GenerateRequest(
    request_id="r", prompt="a cat", width_px=64, height_px=32, num_steps=4, guidance_scale=5.0, seed=1
)
PICTURE = np.zeros((32, 64, 3), np.uint8)


def test_a_good_request_passes():
    """Nothing is raised for a request inside every rule."""
    check_request(GOOD, TRAITS, Tier())


@pytest.mark.parametrize(
    ("change", "tier", "kind", "words"),
    [
        ({"width_px": 63}, {}, InvalidRequest, "width must be a positive multiple of 8 px, got 63"),
        ({"height_px": 0}, {}, InvalidRequest, "height must be a positive multiple of 8 px, got 0"),
        ({"width_px": 4096}, {"max_generated_pixels": 1000}, BudgetExceeded, "max_generated_pixels is 1000"),
        ({"num_steps": 151}, {}, BudgetExceeded, "max_steps is 150, the request has 151"),
        ({"num_steps": 0}, {}, InvalidRequest, "num_inference_steps must be between 1 and inf, got 0"),
        ({"guidance_scale": float("nan")}, {}, InvalidRequest, "guidance_scale must be between 0 and 100, got nan"),
        ({"guidance_scale": -1.0}, {}, InvalidRequest, "guidance_scale must be between 0 and 100, got -1"),
        ({"seed": -1}, {}, InvalidRequest, "seed must be between 0 and"),
        ({"num_previews": 4}, {}, InvalidRequest, "partial_images must be between 0 and 3, got 4"),
        ({"prompt": "  "}, {}, InvalidRequest, "prompt is empty"),
        ({"prompt": "x" * 20_000}, {}, BudgetExceeded, "max_prompt_chars is 16384, the request has 20000"),
        ({"num_frames": 9}, {}, UnsupportedMedia, "does image-to-image, inpaint, text-to-image, not text-to-video"),
        ({"num_frames": 9}, {"max_generated_frames": 5}, BudgetExceeded, "max_generated_frames is 5"),
        ({"init_image": np.zeros((8, 8, 3), np.uint8)}, {}, InvalidMedia, "image is 8x8, the request is 64x32"),
        ({"mask": np.zeros((32, 64), np.uint8)}, {}, InvalidRequest, "a mask needs an image"),
        ({"init_image": PICTURE, "mask": np.zeros((64, 32), np.uint8)}, {}, InvalidMedia, "mask is 32x64"),
        ({"init_image": PICTURE, "strength": 0.1}, {}, InvalidRequest, "strength 0.1 of 4 steps leaves no step"),
        ({"step_cache": "teacache"}, {}, InvalidRequest, "step cache 'teacache' is not available here"),
    ],
)
def test_a_bad_request_is_refused_by_name(change, tier, kind, words):
    """Each refusal is of the right kind and names the rule and the value."""
    with pytest.raises(kind) as caught:
        check_request(dataclasses.replace(GOOD, **change), TRAITS, Tier(**tier))

    assert words in str(caught.value)

"""`draw`: a prompt to a file, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from triptych.cli import main
from triptych.core.errors import BudgetExceeded, InvalidRequest, UnsupportedMedia
from triptych.generate.draw import DrawOptions, draw
from triptych.generate.evaluate import draw_one
from triptych.generate.events import GenerateEvent, PreviewEvent, StepEvent
from triptych.generate.kinds.load import load_kind
from triptych.generate.request import GenerateRequest
from triptych.generate.terminal_preview import half_blocks

from .conftest import Toys


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


OPTIONS = DrawOptions(width_px=32, height_px=32, num_steps=4, seed=1, num_previews=1)


async def test_a_prompt_becomes_a_file(toys: Toys, tmp_path: Path):
    """The file is the picture; progress and a preview were seen on the way; nothing else was left behind."""
    seen: list[GenerateEvent] = []
    out = tmp_path / "out.png"
    drawn = await draw("a cat", out, folder=toys.folder("pixart"), options=OPTIONS, on_event=seen.append)

    assert pixels_of(out).shape == (32, 32, 3)
    assert [event.step for event in seen if isinstance(event, StepEvent)] == [1, 2, 3, 4]
    assert sum(isinstance(event, PreviewEvent) for event in seen) == 1
    assert drawn.stage_ms["denoise_ms"] > 0
    assert os.listdir(tmp_path) == ["out.png"]


async def test_the_same_seed_draws_the_same_picture(toys: Toys, tmp_path: Path):
    """Two calls with one seed write equal pictures."""
    pictures = []
    for name in ("a.png", "b.png"):
        await draw("a cat", tmp_path / name, folder=toys.folder("pixart"), options=OPTIONS)
        pictures.append(pixels_of(tmp_path / name))

    assert (pictures[0] == pictures[1]).all()


@pytest.mark.parametrize(
    ("name", "options", "kind", "words"),
    [
        ("out.gif", {}, InvalidRequest, "must end in .png, .jpg, .jpeg, .webp, .mp4, got 'out.gif'"),
        ("none/out.png", {}, InvalidRequest, "no folder"),
        ("out.mp4", {}, InvalidRequest, "draws pictures, not clips"),
        ("out.png", {"num_steps": 1000}, BudgetExceeded, "max_steps is 150"),
        ("out.png", {"width_px": 33}, InvalidRequest, "multiple of 4"),
    ],
)
async def test_mistakes_leave_no_file(toys: Toys, tmp_path: Path, name: str, options: dict, kind: type, words: str):
    """Each mistake is named, and nothing is written."""
    with pytest.raises(kind) as caught:
        await draw("a cat", tmp_path / name, folder=toys.folder("pixart"), options=DrawOptions(**options))

    assert words in str(caught.value)
    assert not os.listdir(tmp_path)


async def test_an_unknown_pipeline_is_refused_with_the_list(tmp_path: Path):
    """A folder of another kind says which kinds are served; a foreign library's code is not imported."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "ShapEPipeline"}')
    with pytest.raises(UnsupportedMedia, match=r"'ShapEPipeline' is not served; supported: FluxPipeline, LTXPipeline"):
        await draw("x", tmp_path / "o.png", folder=tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "vae": ["evil_module", "Vae"]}')
    with pytest.raises(UnsupportedMedia, match="'vae' is of 'evil_module'"):
        await draw("x", tmp_path / "o.png", folder=tmp_path)


def test_a_preview_is_half_blocks_of_its_pixels():
    """Two rows of pixels are one line of text: ink is the upper pixel, ground the lower; an odd last row is doubled."""
    pixels = np.array([[[255, 0, 0]], [[0, 255, 0]], [[0, 0, 255]]], np.uint8)
    text = half_blocks(pixels)
    styles = [(span.style.color.triplet.hex, span.style.bgcolor.triplet.hex) for span in text.spans]

    assert text.plain == "▀\n▀\n"
    assert styles == [("#ff0000", "#00ff00"), ("#0000ff", "#0000ff")]
    assert len(half_blocks(np.zeros((64, 128, 3), np.uint8)).plain.splitlines()) == 12


def test_the_verb_draws_with_previews_and_refuses_an_uncalibrated_cache(toys: Toys, tmp_path: Path):
    """`triptych draw` writes the picture and says seed and stages; a step cache that is off says why."""
    out = tmp_path / "out.png"
    asked = ["draw", "a cat", "-o", str(out), "--model", str(toys.folder("pixart")), "--steps", "4", "--seed", "1"]
    asked += ["--width-px", "32", "--height-px", "32", "--previews"]
    done = CliRunner().invoke(main, asked)
    refused = CliRunner().invoke(main, [*asked, "--step-cache", "teacache"])

    assert done.exit_code == 0, done.output
    assert "seed 1" in done.output
    assert pixels_of(out).shape == (32, 32, 3)
    assert refused.exit_code == 1
    assert "it was not calibrated" in refused.output


def test_the_verb_edits_a_picture(toys: Toys, tmp_path: Path):
    """`--image` and `--mask` draw what a request with those pixels draws, at the picture's size rounded down."""
    pixels = np.random.default_rng(0).integers(0, 256, (35, 50, 3), np.uint8)
    mask = np.zeros((35, 50), np.uint8)
    mask[:, 25:] = 255
    for name, array in (("in", pixels), ("mask", mask), ("small", mask[:30])):
        Image.fromarray(array).save(tmp_path / f"{name}.png")
    out = tmp_path / "out.png"
    asked = ["draw", "a cat", "-o", str(out), "--model", str(toys.folder("pixart")), "--steps", "5", "--seed", "1"]
    edit = [*asked, "--image", str(tmp_path / "in.png"), "--mask", str(tmp_path / "mask.png"), "--strength", "0.7"]
    done = CliRunner().invoke(main, edit)

    assert done.exit_code == 0, done.output
    kind = load_kind(toys.folder("pixart"), name="pixart")
    multiple = kind.traits().size_multiple_px
    size_px = (50 // multiple * multiple, 35 // multiple * multiple)
    request = GenerateRequest(
        request_id="r",
        prompt="a cat",
        width_px=size_px[0],
        height_px=size_px[1],
        num_steps=5,
        guidance_scale=kind.default_guidance_scale,
        seed=1,
        init_image=np.asarray(Image.fromarray(pixels).resize(size_px, Image.Resampling.LANCZOS)),
        mask=np.asarray(Image.fromarray(mask).resize(size_px, Image.Resampling.NEAREST)),
        strength=0.7,
    )
    assert np.array_equal(pixels_of(out), draw_one(kind, request).frames[0])
    for wrong, words in (
        (["--mask", str(tmp_path / "mask.png")], "mask needs an image to start from"),
        (["--strength", "0.5"], "strength needs an image to start from"),
        (["--image", str(tmp_path / "none.png")], "cannot read"),
        (["--image", str(tmp_path / "in.png"), "--mask", str(tmp_path / "small.png")], "mask is 50x30, the picture is"),
    ):
        refused = CliRunner().invoke(main, [*asked, *wrong])
        assert (refused.exit_code, words in refused.output) == (1, True), refused.output

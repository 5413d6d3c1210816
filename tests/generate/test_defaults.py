"""Steps and guidance of a request that names none: configured, else the folder's, else the pipeline class's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from triptych.core.config import GenerateConfig
from triptych.core.errors import InvalidRequest
from triptych.generate.build import build_engine
from triptych.generate.draw import DrawOptions, request_for
from triptych.generate.kinds.load import load_kind
from triptych.generate.kinds.pixart import PixArt

from .conftest import Toys


@pytest.fixture
def folder(toys: Toys, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toys.folder("pixart"), tmp_path / "distilled"))


def defaults_of(folder: Path, **configured: float) -> tuple[int, float]:
    """What a request without steps and guidance would be run with."""
    engine = build_engine(folder, name="distilled", config=GenerateConfig(warm_up=False, **configured))
    request = request_for("a cat", engine.traits, DrawOptions())
    return request.num_steps, request.guidance_scale


def test_the_folder_goes_before_the_class_and_the_configuration_before_both(folder: Path):
    own = (PixArt.default_num_steps, PixArt.default_guidance_scale)
    assert defaults_of(folder) == own

    (folder / "generation_config.json").write_text('{"num_inference_steps": 4, "guidance_scale": 1, "seed": 3}')
    assert defaults_of(folder) == (4, 1.0)
    assert defaults_of(folder, guidance_scale=0.0) == (4, 0.0)
    assert defaults_of(folder, num_inference_steps=2, guidance_scale=1.5) == (2, 1.5)

    (folder / "generation_config.json").write_text('{"num_inference_steps": 4}')
    assert defaults_of(folder) == (4, own[1])
    assert (PixArt.default_num_steps, PixArt.default_guidance_scale) == own


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"num_inference_steps": 0}', "distilled/generation_config.json: Expected `int` >= 1"),
        ('{"guidance_scale": "two"}', r"guidance_scale`"),
        ('{"guidance_scale": 101}', "<= 100"),
        ("{", "generation_config.json"),
    ],
)
def test_a_wrong_file_is_named(folder: Path, text: str, words: str):
    (folder / "generation_config.json").write_text(text)

    with pytest.raises(InvalidRequest, match=words):
        load_kind(folder, name="distilled")


def test_a_wrong_configuration_is_named():
    with pytest.raises(ValueError, match="num_inference_steps must be at least 1, got 0"):
        GenerateConfig(num_inference_steps=0)
    with pytest.raises(ValueError, match="guidance_scale must be between 0 and 100, got -1"):
        GenerateConfig(guidance_scale=-1)

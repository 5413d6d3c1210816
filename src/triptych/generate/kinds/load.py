"""From a diffusers folder to a `Kind`. Only known pipeline classes are built, from safetensors alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import msgspec
import torch
import transformers

from triptych.core.errors import InvalidRequest, UnsupportedMedia
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.defaults import read_defaults
from triptych.generate.kinds.flux import Flux
from triptych.generate.kinds.pixart import PixArt
from triptych.generate.kinds.qwen_image import QwenImage
from triptych.generate.kinds.sd3 import StableDiffusion3
from triptych.generate.kinds.stable_diffusion import StableDiffusion, StableDiffusionXL
from triptych.generate.kinds.video import Ltx, Wan

KINDS: dict[str, type[Kind]] = {
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXL,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "FluxPipeline": Flux,
    "PixArtAlphaPipeline": PixArt,
    "PixArtSigmaPipeline": PixArt,
    "QwenImagePipeline": QwenImage,
    "WanPipeline": Wan,
    "LTXPipeline": Ltx,
}
LIBRARIES = frozenset({"diffusers", "transformers", "stable_diffusion"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def is_diffusion_folder(folder: Path) -> bool:
    return (folder / "model_index.json").is_file()


def load_kind(folder: Path, *, name: str, dtype: str = "auto", device: str = "cpu") -> Kind:
    """Raises InvalidRequest for a broken folder, UnsupportedMedia (with the list) for a pipeline that is not served."""
    pipeline_class, defaults = check_index(folder), read_defaults(folder)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    torch_dtype = torch.float32 if dtype == "auto" and device == "cpu" else DTYPES.get(dtype, torch.bfloat16)
    try:
        pipeline: Any = getattr(diffusers, pipeline_class).from_pretrained(
            folder,
            dtype=torch_dtype,
            use_safetensors=True,
            local_files_only=True,
            **_absent(pipeline_class, folder),
        )
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{folder.name} cannot be loaded as {pipeline_class}: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to(device)
    kind = KINDS[pipeline_class](pipeline, name)
    kind.set_defaults(defaults.num_inference_steps, defaults.guidance_scale)
    return kind


def _absent(pipeline_class: str, folder: Path) -> dict[str, None]:
    """Components that the pipeline names and the folder was saved without (Stable Diffusion 3 without T5)."""
    index = msgspec.json.decode((folder / "model_index.json").read_bytes())
    expected, _ = getattr(diffusers, pipeline_class)._get_signature_keys(getattr(diffusers, pipeline_class))
    return {name: None for name in expected if index.get(name, [None])[0] is None}


def check_index(folder: Path) -> str:
    """The pipeline class of `model_index.json`, once it and every component's library are known ones."""
    try:
        index = msgspec.json.decode((folder / "model_index.json").read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise InvalidRequest(f"{folder.name} has no model_index.json: not a diffusers folder") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{folder.name}/model_index.json: {error}") from error
    pipeline_class = index.get("_class_name")
    if pipeline_class not in KINDS:
        raise UnsupportedMedia(f"pipeline {pipeline_class!r} is not served; supported: {', '.join(sorted(KINDS))}")
    for component, origin in index.items():
        if isinstance(origin, list) and origin[0] is not None and origin[0] not in LIBRARIES:
            raise UnsupportedMedia(
                f"component {component!r} is of {origin[0]!r}; code is taken from {', '.join(sorted(LIBRARIES))} only"
            )
    return str(pipeline_class)

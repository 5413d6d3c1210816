"""From a configured folder to an engine: what `launch` and `draw` call. The model is loaded here, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import torch

from triptych.core.config import GenerateConfig
from triptych.generate.calibrate import load_calibration
from triptych.generate.engine import GenerateEngine
from triptych.generate.fingerprint import model_fingerprint
from triptych.generate.kinds.load import is_diffusion_folder, load_kind
from triptych.generate.knee_store import KneeStore, default_folder

__all__ = ["build_engine", "is_diffusion_folder"]


def build_engine(folder: Path, *, name: str, config: GenerateConfig | None = None) -> GenerateEngine:
    """Load and wrap; `start` it before use. Raises InvalidRequest, UnsupportedMedia as `load_kind` does."""
    config = config or GenerateConfig()
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = load_kind(folder, name=name, dtype=config.dtype, device=device)
    kind.set_defaults(config.num_inference_steps, config.guidance_scale)
    load_calibration(folder, kind)
    return GenerateEngine(kind, config, knees=lambda: KneeStore(default_folder(), kind, model_fingerprint(folder)))

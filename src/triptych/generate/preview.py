"""Previews from a linear map of latent channels to RGB, fitted once for each VAE on pictures that it encodes itself.

A matrix product at the latent's size: no decoder runs, so a preview costs well under a step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Row

FIT_SIZE_PX = 64
NUM_FIT_PICTURES = 8


class LatentPreview:
    """`weights`: [C + 1, 3], the last row a bias. `r_squared`: how much of the fit pictures' colour it explains."""

    def __init__(self, kind: Kind, weights: torch.Tensor, r_squared: float) -> None:
        self._kind = kind
        self._weights = weights
        self.r_squared = r_squared

    def __call__(self, row: Row) -> npt.NDArray[np.uint8]:
        """[h, w, 3] uint8 of what the row is heading for, at the latent's size; of a clip, the first frame."""
        clean = row.latents if row.clean_estimate is None else row.clean_estimate
        latents = self._kind.to_vae(self._kind.unpack(clean.float(), row.request))
        channels = _by_position(latents)
        height, width = latents.shape[-2:]
        colours = (_with_bias(channels) @ self._weights).reshape(height, width, 3)
        return ((colours * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()


def fit_preview(kind: Kind) -> LatentPreview:
    """Least squares from the VAE's own latents (its mean) to the pixels under each latent position."""
    size_px = max(FIT_SIZE_PX, 8 * kind.vae_px)
    pictures = _smooth_pictures(size_px).to(kind.device, kind.vae.dtype)
    inputs, targets = [], []
    for picture in pictures:
        latents = kind.encode_mean(picture[None])
        inputs.append(_by_position(latents.float()))
        shrunk = torch.nn.functional.adaptive_avg_pool2d(picture[None].float(), (latents.shape[-2], latents.shape[-1]))
        targets.append(_by_position(shrunk))
    design, colours = _with_bias(torch.cat(inputs)), torch.cat(targets)
    weights = torch.linalg.lstsq(design, colours).solution
    unexplained = ((design @ weights - colours) ** 2).sum() / ((colours - colours.mean(0)) ** 2).sum()
    return LatentPreview(kind, weights, 1.0 - float(unexplained))


def _smooth_pictures(size_px: int) -> torch.Tensor:
    """Random fields of colour, [N, 3, H, W] in -1..1: coarse noise blown up, so that every hue has room."""
    generator = torch.Generator("cpu").manual_seed(0)
    coarse = torch.rand(NUM_FIT_PICTURES, 3, 5, 5, generator=generator) * 2 - 1
    return torch.nn.functional.interpolate(coarse, size=(size_px, size_px), mode="bilinear", align_corners=True)


def _by_position(latents: torch.Tensor) -> torch.Tensor:
    """[1, C, (F,) h, w] to [h * w, C]; the first frame of a clip."""
    plane = latents[0, :, 0] if latents.dim() == 5 else latents[0]
    return plane.flatten(1).T


def _with_bias(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)

"""Where things go, read from the noise: what makes the way from a noise to its picture one and not many.

With noise and picture drawn apart, a noise may become any layout of its prompt, and what a denoiser of three million
parameters is asked at the beginning is the mean of all. Here the noise of a training pair decides: two fields are
means over channels of it, smoothed; the things of a prompt's first group stand on the peaks of the first field, those
of its second group on those of the second. Any noise has its layout, so noise stays noise, and drawing is as ever.

Couplings of noise and data that are not independent: Pooladian and others, "Multisample Flow Matching", 2023.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from triptych.testing.prompts import Prompt, largest_radius_px
from triptych.testing.scene_paint import colour_rgb
from triptych.testing.scenes import Scene, SceneObject, paint

NUM_FIELDS = 2
SMOOTHING = 0.14  # deviation of the kernel over the short side
TOKEN_PX = 8
_BEFORE = {"above": (1, 0), "below": (1, 1), "left of": (0, 0), "right of": (0, 1)}  # axis, group that comes first

Floats = npt.NDArray[np.float64]


def fields_of(noise: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] to [B, F, h, w]: means over neighbouring channels, deviation 1 for noise of deviation 1."""
    grouped = noise.unflatten(1, (NUM_FIELDS, -1))
    return grouped.mean(2) * grouped.shape[2] ** 0.5


def noise_with(fields: torch.Tensor, channels: int) -> torch.Tensor:
    """[B, F, h, w] to new noise [B, C, h, w] that has those fields; all else in it is drawn."""
    num, _, height, width = fields.shape
    grouped = torch.randn(num, NUM_FIELDS, channels // NUM_FIELDS, height, width)
    grouped += (fields / grouped.shape[2] ** 0.5 - grouped.mean(2))[:, :, None]
    return grouped.flatten(1, 2)


def lay_out_by(fields: Floats, prompt: Prompt) -> Scene:
    """A painted scene of the fields' size, [F, h, w] in tokens.

    Raises ValueError where there is no room for what is asked.
    """
    size_px = (fields.shape[2] * TOKEN_PX, fields.shape[1] * TOKEN_PX)
    smooth = [_smoothed(field, size_px) for field in fields]
    radius_px = 0.86 * largest_radius_px(prompt.num_objects, size_px)
    for _ in range(40):
        places = _places(prompt, smooth, size_px, radius_px)
        if places is not None:
            break
        radius_px *= 0.97
    else:
        raise ValueError(f"no room for {prompt} in {size_px[0]}x{size_px[1]} px")
    objects = tuple(
        SceneObject(group.shape, group.colour, *place, radius_px, colour_rgb(group.colour)) for group, place in places
    )
    rgb = (255, 255, 255) if prompt.background == "white" else colour_rgb(prompt.background)
    return paint(Scene(*size_px, prompt.background, objects, background_rgb=rgb))


def _smoothed(field: Floats, size_px: tuple[int, int]) -> Floats:
    """[h, w] in tokens to [H, W] in pixels, of the same variance everywhere."""
    kernels = []
    for side_px in (size_px[1], size_px[0]):
        centres = (np.arange(side_px // TOKEN_PX) + 0.5) * TOKEN_PX
        distance = (np.arange(side_px)[:, None] - centres) / (SMOOTHING * min(size_px))
        kernel = np.exp(-0.5 * distance**2)
        kernels.append(kernel / np.linalg.norm(kernel, axis=1, keepdims=True))
    return kernels[0] @ field @ kernels[1].T


def _places(prompt: Prompt, smooth: list[Floats], size_px: tuple[int, int], radius_px: float):
    """(group, centre) of each thing, highest free peak first; None where there was no room for one."""
    margin_px = 1.12 * radius_px + 1
    columns, rows = np.arange(size_px[0]), np.arange(size_px[1])[:, None]
    inside = (np.minimum(columns, size_px[0] - columns) >= margin_px) & (
        np.minimum(rows, size_px[1] - rows) >= margin_px
    )
    places = []
    for index, group in enumerate(prompt.groups):
        free = inside & _side(prompt, index, (columns, rows), size_px, radius_px)
        for _, (x_px, y_px) in places:
            free &= np.hypot(columns - x_px, rows - y_px) > 2.25 * radius_px + 2
        for _ in range(group.count):
            if not free.any():
                return None
            row, column = np.unravel_index(np.where(free, smooth[index], -np.inf).argmax(), free.shape)
            places.append((group, (float(column), float(row))))
            free &= np.hypot(columns - column, rows - row) > 2.25 * radius_px + 2
    return places


def _side(prompt: Prompt, index: int, axes, size_px: tuple[int, int], radius_px: float):
    """Where things of that group may stand: all, or one side of a line that leaves the larger group more room."""
    if prompt.relation is None:
        return True
    axis, earlier = _BEFORE[prompt.relation]
    first, other = prompt.groups[earlier], prompt.groups[1 - earlier]
    room_px = 2.3 * radius_px + 1
    cut_px = size_px[axis] * (0.5 + 0.05 * (first.count - other.count))
    cut_px = float(np.clip(cut_px, min(room_px, size_px[axis] / 2), max(size_px[axis] - room_px, size_px[axis] / 2)))
    return axes[axis] <= cut_px - 1.05 * radius_px if index == earlier else axes[axis] >= cut_px + 1.05 * radius_px

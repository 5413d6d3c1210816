"""Pictures and masks to edit where quality is measured: made here, the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from triptych.generate.request import EDIT_TASKS, Task

STRENGTH = 0.6


def edit_fields(task: Task, width_px: int, height_px: int, index: int) -> dict[str, Any]:
    """What an edit has beyond a request for text; nothing for other tasks. An inpainting draws the right half anew."""
    if task not in EDIT_TASKS:
        return {}
    fields: dict[str, Any] = {"init_image": sample_picture(width_px, height_px, index), "strength": STRENGTH}
    if task is Task.INPAINT:
        fields["mask"] = np.zeros((height_px, width_px), np.uint8)
        fields["mask"][:, width_px // 2 :] = 255
    return fields


def sample_picture(width_px: int, height_px: int, index: int) -> npt.NDArray[np.uint8]:
    """[H, W, 3]: a ground that shades from one colour to another, and a disc of a third, by `index`."""
    rng = np.random.default_rng(index)
    near, far, disc = rng.uniform(0, 255, (3, 3))
    y, x = np.mgrid[0:height_px, 0:width_px]
    shade = ((x / width_px + y / height_px) / 2)[..., None]
    centre_x, centre_y = rng.uniform(0.3, 0.7, 2) * (width_px, height_px)
    is_disc = (x - centre_x) ** 2 + (y - centre_y) ** 2 < (min(width_px, height_px) / 4) ** 2
    return np.where(is_disc[..., None], disc, near + (far - near) * shade).round().astype(np.uint8)

"""A small picture as coloured half blocks, two pixels a character, for terminals that show colour."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

MAX_COLUMNS = 48


def half_blocks(pixels: npt.NDArray[np.uint8], max_columns: int = MAX_COLUMNS) -> Text:
    """[h, w, 3] uint8 to lines of upper half blocks: ink is the upper pixel, ground the lower. Shrunk to fit."""
    image = Image.fromarray(pixels)
    if image.width > max_columns:
        image = image.resize((max_columns, max(1, round(image.height * max_columns / image.width))))
    grid = np.asarray(image)
    if len(grid) % 2:
        grid = np.concatenate([grid, grid[-1:]])
    text = Text()
    for upper, lower in zip(grid[::2], grid[1::2], strict=True):
        for ink, ground in zip(upper, lower, strict=True):
            style = Style(color=Color.from_rgb(*ink.tolist()), bgcolor=Color.from_rgb(*ground.tolist()))
            text.append("▀", style)
        text.append("\n")
    return text

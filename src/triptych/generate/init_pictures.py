"""Pictures and masks that an edit begins with, at the size of the request. The media plane has opened them before."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from triptych.core.errors import InvalidMedia
from triptych.generate.request import ModelTraits

Pixels = npt.NDArray[np.uint8]


def nearest_size(width_px: int, height_px: int, traits: ModelTraits) -> tuple[int, int]:
    """A picture's own size, rounded down to what the model takes."""
    multiple = traits.size_multiple_px
    return max(multiple, width_px // multiple * multiple), max(multiple, height_px // multiple * multiple)


def fit_picture(pixels: Pixels, size_px: tuple[int, int]) -> Pixels:
    """[H, W, 3] at `size_px`, width and height."""
    return _resized(pixels, size_px, Image.Resampling.LANCZOS)


def fit_mask(mask: Pixels, size_px: tuple[int, int]) -> Pixels:
    """[H, W] at `size_px`; no value in between appears."""
    return _resized(mask, size_px, Image.Resampling.NEAREST)


def read_mask(data: bytes) -> Pixels:
    """[H, W], 255 where the picture is drawn anew: transparent where the file has an alpha channel, as OpenAI's masks
    are, else white. The file's size was checked before. Raises InvalidMedia."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "WEBP", "JPEG")) as picture:
            if picture.has_transparency_data:
                alpha = np.asarray(picture.convert("RGBA"))[..., 3]
                return np.where(alpha < 128, 255, 0).astype(np.uint8)
            return np.asarray(picture.convert("L"))
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise InvalidMedia("the mask cannot be decoded; PNG, WebP and JPEG are taken", param="mask") from error


def check_mask_size(mask_px: tuple[int, int], picture_px: tuple[int, int]) -> None:
    """Raises InvalidMedia when the mask is not of the picture's own size."""
    if mask_px != picture_px:
        theirs, ours = (f"{width}x{height}" for width, height in (mask_px, picture_px))
        raise InvalidMedia(f"mask is {theirs}, the picture is {ours}", param="mask")


def _resized(pixels: Pixels, size_px: tuple[int, int], how: Image.Resampling) -> Pixels:
    if pixels.shape[1::-1] == size_px:
        return np.ascontiguousarray(pixels)
    return np.asarray(Image.fromarray(pixels).resize(size_px, how))

"""Pillow's resampling by the native kernels, bit for bit and several times faster; by Pillow itself where they are not.

Pillow 13 runs the vertical pass first for some shrinking sizes and does not say which. The kernels serve sizes where
the horizontal pass always comes first: nothing gets lower, or a square becomes a smaller square. A check at first use
compares both, so that another Pillow is never silently different.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image

from triptych.models.native.build import NativeUnavailable, load_library

FILTERS = frozenset({Image.Resampling.LANCZOS, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC})
CHECKED_SIZES = (((5, 7), (9, 21)), ((8, 6), (8, 3)), ((24, 24), (7, 7)), ((3, 3), (16, 16)), ((16, 9), (18, 4)))


def resized(pixels: npt.NDArray[np.uint8], height_px: int, width_px: int, resample: int) -> npt.NDArray[np.uint8]:
    """[H, W, 3] -> [height_px, width_px, 3], as `PIL.Image.resize` gives it."""
    if pixels.shape[:2] == (height_px, width_px):
        return pixels
    kind = Image.Resampling(int(resample))
    height, width = pixels.shape[:2]
    if kind in FILTERS and _horizontal_comes_first(height, width, height_px, width_px):
        library = _library()
        if library is not None:
            return _call(library, np.ascontiguousarray(pixels), height_px, width_px, kind)
    return np.asarray(Image.fromarray(pixels).resize((width_px, height_px), kind))


def is_native() -> bool:
    return _library() is not None


def _horizontal_comes_first(height: int, width: int, height_px: int, width_px: int) -> bool:
    return height_px >= height or (height == width and height_px == width_px)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = load_library()
        library.triptych_resample.restype = ctypes.c_char_p
    except (NativeUnavailable, AttributeError):
        return None
    return library if all(_agrees(library, *sizes) for sizes in CHECKED_SIZES) else None


def _agrees(library: ctypes.CDLL, size: tuple[int, int], target: tuple[int, int]) -> bool:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    return all(
        np.array_equal(_call(library, pixels, *target, kind), np.asarray(image.resize(target[::-1], kind)))
        for kind in FILTERS
    )


def _call(
    library: ctypes.CDLL, pixels: npt.NDArray[np.uint8], height_px: int, width_px: int, kind: Image.Resampling
) -> npt.NDArray[np.uint8]:
    out = np.empty((height_px, width_px, 3), dtype=np.uint8)
    height, width = pixels.shape[:2]
    message = library.triptych_resample(
        pixels.ctypes.data_as(ctypes.c_void_p),
        height,
        width,
        out.ctypes.data_as(ctypes.c_void_p),
        height_px,
        width_px,
        int(kind),
    )
    assert message is None, message
    return out

"""Still pictures to pixels: JPEG by libjpeg-turbo, scaled while decoding where the model shrinks it anyway; all else by
Pillow. The first frame of an animation stands for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL.ImageFile import ImageFile

from triptych.core.errors import InvalidMedia
from triptych.core.media import DecodedImage, DecodeSpec
from triptych.media.budget import DecodeGuard
from triptych.media.decode.picture import open_picture, orientation_of, picture_errors
from triptych.media.decode.rgb import apply_profile, orient, to_rgb
from triptych.media.sniff import JPEG, Kind

# A scaled decode stays this many times above what the model will keep, so that the model's own filter does the rest.
SCALE_MARGIN = 2.0


def decode_image(data: bytes, kind: Kind, spec: DecodeSpec, guard: DecodeGuard) -> DecodedImage:
    """Pixels as a person sees them: turned, on the background, in sRGB. Raises InvalidMedia, BudgetExceeded,
    UnsupportedMedia. With `spec.fit_px` a JPEG may come smaller than its header says, never below what fits."""
    with picture_errors(kind):
        picture = open_picture(data, kind)
        guard.see_picture(*picture.size)
        orientation = orientation_of(picture)
        pixels = _jpeg_pixels(data, picture, spec, orientation) if kind is JPEG else None
        if pixels is None:
            picture.load()
            guard.see_picture(*picture.size)
            pixels = to_rgb(picture, spec.background_rgb)
        pixels = orient(pixels, orientation)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise InvalidMedia(f"the {kind.mime} file decoded to nothing")
    full_px = picture.size[::-1] if orientation >= 5 else picture.size
    return DecodedImage(pixels, None if pixels.shape[1::-1] == full_px else full_px)


def scaled_size(width_px: int, height_px: int, fit_px: tuple[int, int]) -> tuple[int, int]:
    """The least size (width, height) that a decode for `fit_px` must have: the fitted size times the margin."""
    scale = min(1.0, fit_px[0] / width_px, fit_px[1] / height_px) * SCALE_MARGIN
    return round(min(1.0, scale) * width_px), round(min(1.0, scale) * height_px)


def _jpeg_divisor(width_px: int, height_px: int, at_least: tuple[int, int]) -> int:
    """By how much libjpeg-turbo divides the size while decoding. By halves alone: its other scales are slower than
    decoding everything. And only without a remainder: a last column that stands for less than the others would stretch
    the picture by up to a pixel."""
    halves = (n for n in (8, 4, 2) if width_px % n == 0 and height_px % n == 0)
    return next((n for n in halves if width_px // n >= at_least[0] and height_px // n >= at_least[1]), 1)


def _jpeg_pixels(data: bytes, picture: ImageFile, spec: DecodeSpec, orientation: int) -> npt.NDArray[np.uint8] | None:
    """None where libjpeg-turbo alone does not suffice: CMYK, or a stream with faults that Pillow may forgive."""
    if picture.mode not in ("RGB", "L"):
        return None
    width_px, height_px = picture.size
    if spec.fit_px is not None:
        fit_px = spec.fit_px[::-1] if orientation >= 5 else spec.fit_px
        divisor = _jpeg_divisor(width_px, height_px, scaled_size(width_px, height_px, fit_px))
        width_px, height_px = width_px // divisor, height_px // divisor
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=height_px, min_width=width_px)
    except ValueError:
        return None
    profile = picture.info.get("icc_profile")
    return apply_profile(pixels, profile) if profile and picture.mode == "RGB" else pixels

"""One defined RGB result for every mode of picture: profile to sRGB, then alpha over the background, 16 bits to 8.

16-bit samples are scaled (v * 255 / 65535, rounded), not cut. A broken profile is passed over, as browsers do.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from triptych.core.errors import UnsupportedMedia

MAX_PROFILE_BYTES = 4 * 2**20
BAND_PIXELS = 64 * 1024
_PROFILED_MODES = frozenset({"RGB", "RGBA", "L", "CMYK"})


def to_rgb(picture: Image.Image, background_rgb: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """A loaded picture as [H, W, 3] uint8 sRGB. Raises UnsupportedMedia for samples without a defined range."""
    if picture.mode in ("F", "I") or picture.mode.startswith("I;16"):
        return _from_wide(picture)
    profile = picture.info.get("icc_profile")
    picture = _with_plain_mode(picture)
    if profile:
        picture = _to_srgb(picture, profile)
    if picture.mode == "RGBA" and picture.getchannel("A").getextrema() != (255, 255):
        return _over(picture, background_rgb)
    return _filled(picture, lambda band: np.asarray(band.convert("RGB")))


def apply_profile(pixels: npt.NDArray[np.uint8], profile: bytes) -> npt.NDArray[np.uint8]:
    """[H, W, 3] in the profile's space to sRGB."""
    return np.asarray(_to_srgb(Image.fromarray(pixels), profile))


def orient(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Turn stored pixels [H, W, 3] the way EXIF's 1 to 8 says they are to be seen."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _with_plain_mode(picture: Image.Image) -> Image.Image:
    """RGBA where anything is transparent, else one of the modes that profiles know."""
    if picture.mode == "RGBA":  # `convert` would copy it
        return picture
    if picture.mode in ("LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        if picture.mode in ("RGBa", "La"):
            return picture.convert("RGBA" if picture.mode == "RGBa" else "LA").convert("RGBA")
        return picture.convert("RGBA")
    return picture if picture.mode in _PROFILED_MODES else picture.convert("RGB")


def _from_wide(picture: Image.Image) -> npt.NDArray[np.uint8]:
    samples = np.asarray(picture)
    if picture.mode == "F" or samples.min(initial=0) < 0 or samples.max(initial=0) > 65_535:
        raise UnsupportedMedia(
            f"a picture of {picture.mode!r} samples has no defined range; send 8 or 16 bits a sample"
        )
    found = np.empty((*samples.shape, 3), np.uint8)
    for rows in _bands(*samples.shape):
        found[rows] = ((samples[rows].astype(np.uint32) * 255 + 32_767) // 65_535)[:, :, None]
    return found


def _over(picture: Image.Image, background_rgb: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    background = np.array(background_rgb, np.uint16)

    def blended(band: Image.Image) -> npt.NDArray[np.uint16]:
        rgba = np.asarray(band)
        alpha = rgba[:, :, 3:].astype(np.uint16)
        mixed: npt.NDArray[np.uint16] = (rgba[:, :, :3] * alpha + background * (255 - alpha) + 127) // 255
        return mixed

    return _filled(picture, blended)


def _filled(picture: Image.Image, pixels_of: Callable[[Image.Image], npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """[H, W, 3], band by band: no second picture is held beside the result, and a band stays in the cache."""
    found = np.empty((picture.height, picture.width, 3), np.uint8)
    for rows in _bands(picture.height, picture.width):
        found[rows] = pixels_of(picture.crop((0, rows.start, picture.width, rows.stop)))
    return found


def _bands(height_px: int, width_px: int) -> Iterator[slice]:
    step = max(1, BAND_PIXELS // max(1, width_px))
    return (slice(top, min(top + step, height_px)) for top in range(0, height_px, step))


def _to_srgb(picture: Image.Image, profile: bytes) -> Image.Image:
    output_mode = "RGBA" if picture.mode == "RGBA" else "RGB"
    transform = _transform(profile, picture.mode, output_mode) if len(profile) <= MAX_PROFILE_BYTES else None
    if transform is None:
        return picture
    converted: Image.Image = transform.apply(picture)
    if output_mode == "RGBA":
        converted.putalpha(picture.getchannel("A"))
    return converted


@lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str, output_mode: str) -> Any:
    """None where the profile is sRGB already, is broken, or is for another kind of samples."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "sRGB" in ImageCms.getProfileDescription(source) and mode != "CMYK":
            return None
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, output_mode)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None

"""Pictures that come with an edit: opened by the media plane under its policy and budget, at the request's size."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from triptych.core.errors import InvalidMedia
from triptych.core.media import DecodedImage, DecodeSpec, MediaBlob, MediaRef, Modality
from triptych.generate.request import ModelTraits
from triptych.http.call import Call
from triptych.http.image_bodies import mask_from_alpha, parse_size

Pixels = npt.NDArray[np.uint8]


async def open_pictures(call: Call, sources: list[tuple[str, str | bytes]]) -> list[MediaBlob]:
    """`sources`: (field name, URL or bytes). Raises what the media plane raises."""
    refs = [MediaRef(Modality.IMAGE, source, param=param) for param, source in sources]
    return await call.media.open(refs, tier=call.tier, tenant=call.tenant.name)


def edit_size(size: str | None, blob: MediaBlob, traits: ModelTraits) -> tuple[int, int]:
    """The size asked for; else the picture's own, rounded down to what the model takes."""
    if size not in (None, "", "auto"):
        return parse_size(size, traits)
    multiple = traits.size_multiple_px
    width_px, height_px = blob.header.width_px, blob.header.height_px
    return max(multiple, width_px // multiple * multiple), max(multiple, height_px // multiple * multiple)


async def init_pixels(call: Call, blob: MediaBlob, size_px: tuple[int, int]) -> Pixels:
    """[H, W, 3] uint8 of `size_px`."""
    decoded = await call.media.decode(blob, DecodeSpec(), tier=call.tier)
    assert isinstance(decoded, DecodedImage)
    return await asyncio.to_thread(_resized, decoded.pixels, size_px, Image.Resampling.LANCZOS)


async def mask_pixels(blob: MediaBlob, image: MediaBlob, size_px: tuple[int, int]) -> Pixels:
    """[H, W] uint8, 255 where the picture is drawn anew: transparent where the mask has an alpha channel, else white.

    Raises InvalidMedia when it is not of the picture's size."""
    theirs, ours = (blob.header.width_px, blob.header.height_px), (image.header.width_px, image.header.height_px)
    if theirs != ours:
        raise InvalidMedia(f"mask is {theirs[0]}x{theirs[1]}, the picture is {ours[0]}x{ours[1]}", param="mask")
    mask = await asyncio.to_thread(_mask_plane, blob.data)
    return await asyncio.to_thread(_resized, mask, size_px, Image.Resampling.NEAREST)


def _mask_plane(data: bytes) -> Pixels:
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "WEBP", "JPEG")) as picture:
            if picture.has_transparency_data:
                return mask_from_alpha(np.asarray(picture.convert("RGBA"))[..., 3])
            return np.asarray(picture.convert("L"))
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise InvalidMedia("the mask cannot be decoded; PNG, WebP and JPEG are taken", param="mask") from error


def _resized(pixels: Pixels, size_px: tuple[int, int], how: Image.Resampling) -> Pixels:
    if pixels.shape[1::-1] == size_px:
        return np.ascontiguousarray(pixels)
    return np.asarray(Image.fromarray(pixels).resize(size_px, how))

"""Pictures that come with an edit: opened by the media plane under its policy and budget, at the request's size."""

from __future__ import annotations

import asyncio

from triptych.core.media import DecodedImage, DecodeSpec, MediaBlob, MediaRef, Modality
from triptych.generate.init_pictures import Pixels, check_mask_size, fit_mask, fit_picture, nearest_size, read_mask
from triptych.generate.request import ModelTraits
from triptych.http.call import Call
from triptych.http.image_bodies import parse_size


async def open_pictures(call: Call, sources: list[tuple[str, str | bytes]]) -> list[MediaBlob]:
    """`sources`: (field name, URL or bytes). Raises what the media plane raises."""
    refs = [MediaRef(Modality.IMAGE, source, param=param) for param, source in sources]
    return await call.media.open(refs, tier=call.tier, tenant=call.tenant.name)


def edit_size(size: str | None, blob: MediaBlob, traits: ModelTraits) -> tuple[int, int]:
    """The size asked for; else the picture's own, rounded down to what the model takes."""
    if size not in (None, "", "auto"):
        return parse_size(size, traits)
    return nearest_size(*_size_px(blob), traits)


async def init_pixels(call: Call, blob: MediaBlob, size_px: tuple[int, int]) -> Pixels:
    """[H, W, 3] uint8 of `size_px`."""
    decoded = await call.media.decode(blob, DecodeSpec(), tier=call.tier)
    assert isinstance(decoded, DecodedImage)
    return await asyncio.to_thread(fit_picture, decoded.pixels, size_px)


async def mask_pixels(blob: MediaBlob, image: MediaBlob, size_px: tuple[int, int]) -> Pixels:
    """[H, W] uint8, 255 where the picture is drawn anew. Raises InvalidMedia when it is not of the picture's size."""
    check_mask_size(_size_px(blob), _size_px(image))
    mask = await asyncio.to_thread(read_mask, blob.data)
    return await asyncio.to_thread(fit_mask, mask, size_px)


def _size_px(blob: MediaBlob) -> tuple[int, int]:
    return blob.header.width_px, blob.header.height_px

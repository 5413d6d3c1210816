"""Pixels to normalised floats by table: the stock processors' arithmetic, done once for each of 256 values.

The stock path converts every pixel to float64, scales, subtracts and divides; a table of its results is exact and much
faster. Geometry (resize, crop, split) stays with the stock processor or Pillow, on uint8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class PixelTable:
    """Rescaling and normalisation of one image processor, [channels, 256] float32."""

    def __init__(self, image_processor: Any) -> None:
        values = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=0)  # [C, 256, 1]
        levels: npt.NDArray[Any] = values
        if image_processor.do_rescale:
            levels = image_processor.rescale(levels, image_processor.rescale_factor)
        if image_processor.do_normalize:
            levels = image_processor.normalize(levels, image_processor.image_mean, image_processor.image_std)
        self._levels = np.ascontiguousarray(levels[:, :, 0], dtype=np.float32)

    def planes(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """[..., H, W, C] uint8 -> [..., C, H, W] float32."""
        out = np.empty((*pixels.shape[:-3], 3, *pixels.shape[-3:-1]), dtype=np.float32)
        for channel, levels in enumerate(self._levels):
            np.take(levels, pixels[..., channel], out=out[..., channel, :, :], mode="clip")
        return out

    def channels_first(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """[N, C, H, W] uint8, as stock geometry gives it -> the same shape in float32."""
        out = np.empty(pixels.shape, dtype=np.float32)
        for channel, levels in enumerate(self._levels):
            np.take(levels, pixels[:, channel], out=out[:, channel], mode="clip")
        return out

    def stock_geometry(self, image_processor: Any, images: Any, **options: Any) -> Any:
        """The stock processor's output for `images`, its geometry on uint8 and its arithmetic by table."""
        out = image_processor.preprocess(images, do_rescale=False, do_normalize=False, return_tensors="np", **options)
        pixels = np.asarray(out["pixel_values"])
        flat = pixels.reshape(-1, *pixels.shape[-3:]).astype(np.uint8, copy=False)
        out["pixel_values"] = self.channels_first(flat).reshape(pixels.shape)
        return out

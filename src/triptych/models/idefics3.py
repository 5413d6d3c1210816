"""Idefics3 and SmolVLM: a picture becomes square tiles and a thumbnail, each a fixed run of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    MAX_IMAGE_SIZE,
    _resize_output_size_rescale_to_max_len,
    _resize_output_size_scale_below_upper_bound,
)

from triptych.core.errors import EmbeddingsRefused, InvalidRequest
from triptych.core.media import DecodedImage, Modality
from triptych.core.prepared import EncoderItem
from triptych.models.base import ItemSize
from triptych.models.folder import ModelFolder
from triptych.models.layouts import ImageLayout, Run, covering_px, option_int, processor_key, sent_tiles, tower_flops
from triptych.models.resample import resized
from triptych.models.served import StockModel

IMAGE, FAKE, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"


class Layout(ImageLayout):
    """`grid` of an item is (rows, columns) of tiles, (0, 0) for a picture that is one tile.

    The stock processor enlarges every picture to its longest edge first, also one that then becomes a single tile. The
    override `straight_to_tile` leaves that out for single tiles: 50 ms instead of 100 for a hardly different tile.
    Options: `image_splitting` (bool; `detail: low` is false), `longest_edge` (pixels before splitting).
    """

    option_names = frozenset({"image_splitting", "longest_edge"})
    adds_bos = True

    def __init__(self, folder: ModelFolder, overrides: dict[str, Any]) -> None:
        overrides = dict(overrides)
        self.straight_to_tile = bool(overrides.pop("straight_to_tile", False))
        super().__init__(folder, overrides)
        self.processor_key = processor_key(self.processor_key.hex(), {"straight_to_tile": self.straight_to_tile})
        vision = folder.config.vision_config
        self.patches_a_tile = (vision.image_size // vision.patch_size) ** 2
        self.embeds_a_tile = int(self.patches_a_tile / folder.config.scale_factor**2)
        self.tile_px = int(self.image_processor.max_image_size["longest_edge"])
        self.longest_edge_px = int(self.image_processor.size["longest_edge"])
        self.image_token_id = int(folder.config.image_token_id)
        self.placeholders = {Modality.IMAGE: self.tokenizer.convert_ids_to_tokens(self.image_token_id)}
        self._run_ids = lru_cache(maxsize=64)(self._tokenise_run)

    def image_size(self, height_px: int, width_px: int, options: dict[str, Any]) -> ItemSize:
        rows, columns = self._grid(height_px, width_px, options)
        tiles = rows * columns + 1 if rows else 1
        patches = tiles * self.patches_a_tile
        vision = self.config.vision_config
        cost = tower_flops(
            patches, self.patches_a_tile, vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers
        )
        return ItemSize(tiles * self.embeds_a_tile, patches, (rows, columns), cost)

    def _grid(self, height_px: int, width_px: int, options: dict[str, Any]) -> tuple[int, int]:
        """Rows and columns as the stock processor splits: scaled to the longest edge, then up to whole tiles."""
        if not self._splits(options):
            return 0, 0
        height, width = self._scaled(height_px, width_px, options)
        aspect = width / height
        tile = self.tile_px
        if width >= height:
            columns = ceil(width / tile)
            rows = ceil(int(columns * tile / aspect) / tile)
        else:
            rows = ceil(height / tile)
            columns = ceil(int(rows * tile * aspect) / tile)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)

    def _scaled(self, height_px: int, width_px: int, options: dict[str, Any]) -> tuple[int, int]:
        """Height and width after the stock processor's first resize."""
        longest = option_int(options, "longest_edge", self.longest_edge_px)
        height, width = _resize_output_size_rescale_to_max_len(height_px, width_px, max_len=longest)
        limit: Any = MAX_IMAGE_SIZE
        return _resize_output_size_scale_below_upper_bound(height, width, max_len=limit)

    def _splits(self, options: dict[str, Any]) -> bool:
        default = bool(self.image_processor.do_image_splitting) and options.get("detail") != "low"
        splits = options.get("image_splitting", default)
        if not isinstance(splits, bool):
            raise InvalidRequest(f"media option image_splitting must be true or false, got {splits!r}")
        return splits

    def _sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        """`grid` is (rows, columns); without one, a single tile."""
        rows, columns = grid if len(grid) == 2 else (0, 0)
        if max(rows, columns) * self.tile_px > MAX_IMAGE_SIZE or (rows == 0) != (columns == 0):
            raise EmbeddingsRefused(f"no picture is split into {rows} rows and {columns} columns of tiles here")
        tiles = sent_tiles(num_embeds, self.embeds_a_tile, rows * columns + 1)
        return ItemSize(num_embeds, tiles * self.patches_a_tile, (rows, columns))

    def fit_px(self, width_px: int, height_px: int, options: dict[str, Any]) -> tuple[int, int]:
        """What the tiles hold together; of a single tile, the tile: the stock enlargement before it adds nothing."""
        if max(self._grid(height_px, width_px, options)) > 0:
            height_px, width_px = self._scaled(height_px, width_px, options)
            return width_px, height_px
        return covering_px(width_px, height_px, (self.tile_px, self.tile_px))

    def process_image(self, image: DecodedImage, options: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        resample, tile = self.image_processor.resample, self.tile_px
        pixels, (width_px, height_px) = image.pixels, image.seen_px
        rows, columns = self._grid(height_px, width_px, options)
        if not self.straight_to_tile or rows:
            pixels = resized(pixels, *self._scaled(height_px, width_px, options), resample)
        tiles = []
        if rows:
            pixels = resized(pixels, rows * tile, columns * tile, resample)
            split = pixels.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2)
            tiles = list(split.reshape(-1, tile, tile, 3))
        tiles.append(resized(pixels, tile, tile, resample))
        return {"pixel_values": self.table.planes(np.stack(tiles))}

    def run(self, modality: Modality, size: ItemSize) -> Run:
        return self._run_ids(size.grid)

    def _tokenise_run(self, grid: tuple[int, int]) -> Run:
        rows, columns = grid
        image = IMAGE * self.embeds_a_tile
        lines = ["".join(f"{FAKE}<row_{r + 1}_col_{c + 1}>{image}" for c in range(columns)) + "\n" for r in range(rows)]
        text = "".join(lines) + ("\n" if rows else "") + f"{FAKE}{GLOBAL}{image}{FAKE}"
        return Run.of_marks(self.tokenizer.encode(text, add_special_tokens=False), self.image_token_id)


class Served(StockModel):
    """Tiles of all items in one batch: they have one shape, so nothing is padded."""

    tower_name = "vision_model"

    def encode_features(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        tiles = [self.feature(item, "pixel_values") for item in items]
        inner = self.model.model
        hidden = inner.vision_model(pixel_values=torch.cat(tiles)).last_hidden_state
        rows = inner.connector(hidden).split([len(own) for own in tiles])  # each [tiles, embeds a tile, D]
        return [own.flatten(0, 1) for own in rows]

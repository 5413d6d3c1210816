"""InternVL: tiles in the grid nearest to the picture's shape, and a thumbnail, each a fixed number of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from triptych.core.media import DecodedImage, Modality
from triptych.core.prepared import EncoderItem
from triptych.models.base import ItemSize
from triptych.models.folder import ModelFolder
from triptych.models.layouts import ImageLayout, Run, option_int, sent_tiles, tower_flops
from triptych.models.llava import output_px
from triptych.models.served import StockModel


class Layout(ImageLayout):
    """`grid` of an item is (rows, columns) of tiles. Option: `max_patches`, tiles at most (`detail: low` is 1)."""

    option_names = frozenset({"max_patches"})
    adds_bos = True

    def __init__(self, folder: ModelFolder, overrides: dict[str, Any]) -> None:
        super().__init__(folder, overrides)
        vision = folder.config.vision_config
        self.tile_px = output_px(self.image_processor)
        self.max_tiles = int(self.image_processor.max_patches)
        self.image_token_id = int(folder.config.image_token_id)
        self.placeholders = {Modality.IMAGE: self.tokenizer.convert_ids_to_tokens(self.image_token_id)}
        self.patches_a_tile = (self.tile_px[0] // vision.patch_size[0]) * (self.tile_px[1] // vision.patch_size[1])
        self.embeds_a_tile = int(self.patches_a_tile * folder.config.downsample_ratio**2)
        self.begin, self.end = (self._mark(name, text) for name, text in (("start", "<img>"), ("end", "</img>")))

    def _mark(self, name: str, text: str) -> int:
        token = getattr(self.tokenizer, f"{name}_image_token", None) or text
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def image_size(self, height_px: int, width_px: int, options: dict[str, Any]) -> ItemSize:
        rows, columns = self._grid(height_px, width_px, self._limit(options))
        tiles = rows * columns + (rows * columns > 1)
        tokens = self.patches_a_tile + 1  # a class token a tile
        vision = self.config.vision_config
        cost = tower_flops(
            tiles * tokens, tokens, vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers
        )
        return ItemSize(tiles * self.embeds_a_tile, tiles * tokens, (rows, columns), cost)

    def _grid(self, height_px: int, width_px: int, max_tiles: int) -> tuple[int, int]:
        if max_tiles <= 1:
            return 1, 1
        low = min(int(self.image_processor.min_patches), max_tiles)
        columns, rows = get_optimal_tiled_canvas((height_px, width_px), self.tile_px, low, max_tiles)
        return rows, columns

    def _limit(self, options: dict[str, Any]) -> int:
        return option_int(options, "max_patches", 1 if options.get("detail") == "low" else self.max_tiles)

    def _sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        tiles = sent_tiles(num_embeds, self.embeds_a_tile)
        return ItemSize(num_embeds, tiles * (self.patches_a_tile + 1), (1, tiles))

    def process_image(self, image: DecodedImage, options: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        limit = self._limit(options)
        low = min(int(self.image_processor.min_patches), limit)
        picture = Image.fromarray(image.pixels)
        out = self.table.stock_geometry(
            self.image_processor, [picture], crop_to_patches=True, min_patches=low, max_patches=limit
        )
        return {"pixel_values": out["pixel_values"]}

    def run(self, modality: Modality, size: ItemSize) -> Run:
        ids = [self.begin, *[self.image_token_id] * size.num_embeds, self.end]
        return Run(ids, ((1, size.num_embeds, 0),))


class Served(StockModel):
    """Tiles of all items in one batch."""

    tower_name = "vision_tower"

    def encode_features(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        tiles = [self.feature(item, "pixel_values") for item in items]
        rows = self.model.model.get_image_features(pixel_values=torch.cat(tiles)).pooler_output
        return [own.flatten(0, 1) for own in rows.split([len(own) for own in tiles])]

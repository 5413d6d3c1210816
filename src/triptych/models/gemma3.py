"""Gemma 3: a fixed number of embeddings a picture, inside which the language model attends both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from PIL import Image

from triptych.core.media import DecodedImage, Modality
from triptych.core.prepared import EncoderItem
from triptych.models.base import ItemSize
from triptych.models.folder import ModelFolder
from triptych.models.layouts import ImageLayout, Run, covering_px, sent_tiles, tower_flops
from triptych.models.llava import output_px
from triptych.models.served import StockModel


class Layout(ImageLayout):
    """The template writes the begin-of-image token; the run puts the embeddings after it."""

    whole_spans = True
    adds_bos = True

    def __init__(self, folder: ModelFolder, overrides: dict[str, Any]) -> None:
        super().__init__(folder, {"do_pan_and_scan": False} | overrides)
        config, vision = folder.config, folder.config.vision_config
        self.image_token_id = int(config.image_token_id)
        self.begin, self.end = self.tokenizer.convert_ids_to_tokens([config.boi_token_index, config.eoi_token_index])
        self.placeholders = {Modality.IMAGE: self.begin}
        height, width = output_px(self.image_processor)
        patches = (height // vision.patch_size) * (width // vision.patch_size)
        cost = tower_flops(patches, patches, vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers)
        self.item = ItemSize(int(config.mm_tokens_per_image), patches, (height, width), cost)
        # line ends join those of the text around them to one token, so they are laid before tokenising
        self.surroundings = {Modality.IMAGE: f"\n\n{self.begin}{self.end}\n\n"}

    def image_size(self, height_px: int, width_px: int, options: dict[str, Any]) -> ItemSize:
        return self.item

    def fit_px(self, width_px: int, height_px: int, options: dict[str, Any]) -> tuple[int, int]:
        return covering_px(width_px, height_px, self.item.grid[::-1])  # type: ignore[arg-type]

    def _sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        sent_tiles(num_embeds, self.item.num_embeds, 1)
        return self.item

    def process_image(self, image: DecodedImage, options: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        out = self.table.stock_geometry(
            self.image_processor, [Image.fromarray(image.pixels)], do_pan_and_scan=False, do_convert_rgb=True
        )
        return {"pixel_values": out["pixel_values"]}

    def run(self, modality: Modality, size: ItemSize) -> Run:
        ids = [int(self.config.boi_token_index), *[self.image_token_id] * size.num_embeds]
        return Run(ids, ((1, size.num_embeds, 0),))


class Served(StockModel):
    """All pictures of a call as one batch."""

    tower_name = "vision_tower"

    def encode_features(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        pixels = torch.cat([self.feature(item, "pixel_values") for item in items])
        return list(self.model.model.get_image_features(pixel_values=pixels).pooler_output)

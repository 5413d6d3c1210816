"""LLaVA: one square picture, one run of embeddings. Any tower that transformers' Llava takes: CLIP, SigLIP, DINOv2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from PIL import Image

from triptych.core.errors import InvalidRequest
from triptych.core.media import DecodedImage, Modality
from triptych.core.prepared import EncoderItem
from triptych.models.base import ItemSize
from triptych.models.folder import ModelFolder
from triptych.models.layouts import ImageLayout, Run, covering_px, sent_tiles, tower_flops
from triptych.models.served import StockModel

TOWERS_WITH_CLASS_TOKEN = frozenset({"clip_vision_model", "dinov2", "vit"})


class Layout(ImageLayout):
    """Every picture has the same size after the processor, so every item has the same number of embeddings."""

    adds_bos = True

    def __init__(self, folder: ModelFolder, overrides: dict[str, Any]) -> None:
        super().__init__(folder, overrides)
        self.image_token_id = int(folder.config.image_token_id)
        token = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        self.placeholders = {Modality.IMAGE: token}
        height, width = output_px(self.image_processor)
        vision = folder.config.vision_config
        patches = (height // vision.patch_size) * (width // vision.patch_size)
        tokens = patches + (vision.model_type in TOWERS_WITH_CLASS_TOKEN)
        kept = tokens - 1 if folder.config.vision_feature_select_strategy == "default" else tokens
        cost = tower_flops(tokens, tokens, vision.hidden_size, intermediate_size(vision), vision.num_hidden_layers)
        self.item = ItemSize(kept, tokens, (height, width), cost)

    def placeholder_text(self, modality: Modality) -> str:
        return self.placeholders[modality] + "\n"

    def image_size(self, height_px: int, width_px: int, options: dict[str, Any]) -> ItemSize:
        return self.item

    def fit_px(self, width_px: int, height_px: int, options: dict[str, Any]) -> tuple[int, int]:
        return covering_px(width_px, height_px, self.item.grid[::-1])  # type: ignore[arg-type]

    def _sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        sent_tiles(num_embeds, self.item.num_embeds, 1)
        return self.item

    def process_image(self, image: DecodedImage, options: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        out = self.table.stock_geometry(self.image_processor, [Image.fromarray(image.pixels)])
        return {"pixel_values": out["pixel_values"]}

    def run(self, modality: Modality, size: ItemSize) -> Run:
        return Run.of_token(self.image_token_id, size.num_embeds)


class Served(StockModel):
    """All pictures of a call as one batch."""

    tower_name = "vision_tower"

    def encode_features(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        pixels = torch.cat([self.feature(item, "pixel_values") for item in items])
        return list(self.model.model.get_image_features(pixel_values=pixels).pooler_output)


def output_px(image_processor: Any) -> tuple[int, int]:
    """(height, width) of every picture that leaves the processor. Raises InvalidRequest where they would differ."""
    size = image_processor.crop_size if getattr(image_processor, "do_center_crop", False) else image_processor.size
    if size and size.height and size.width:
        return int(size.height), int(size.width)
    raise InvalidRequest(f"processor size {dict(size or {})} does not give every picture one size")


def intermediate_size(vision: Any) -> int:
    return int(getattr(vision, "intermediate_size", None) or vision.hidden_size * vision.mlp_ratio)

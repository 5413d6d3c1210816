"""LLaVA-OneVision: one picture is tiled and unpadded, several are one tile each, a clip is pooled frame by frame."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers.image_processing_utils import select_best_resolution

from triptych.core.errors import InvalidRequest, UnsupportedMedia
from triptych.core.media import Decoded, DecodedImage, DecodedVideo, DecodeSpec, MediaHeader, Modality
from triptych.core.prepared import EncoderItem
from triptych.models import frames
from triptych.models.base import ItemSize, ProcessedItem
from triptych.models.folder import ModelFolder
from triptych.models.frames import FrameSampling, plan_frames
from triptych.models.layouts import ImageLayout, Run, covering_px, tower_flops
from triptych.models.llava import intermediate_size
from triptych.models.resample import resized
from triptych.models.served import StockModel

VIDEO_FRAMES = 32


class Layout(ImageLayout):
    """`grid` of a picture is (height, width) in pixels when tiled, () when it is one tile; of a clip (frames,).

    Options: `anyres` (bool), whether a picture is tiled: true for the only picture of a request; `fps`, `num_frames`.
    """

    modalities = frozenset({Modality.IMAGE, Modality.VIDEO})
    option_names = frozenset({"anyres"}) | frames.OPTION_NAMES
    adds_bos = True

    def __init__(self, folder: ModelFolder, overrides: dict[str, Any]) -> None:
        super().__init__(folder, overrides)
        config, vision = folder.config, folder.config.vision_config
        self.side = int(vision.image_size // vision.patch_size)
        self.embeds_a_tile = self.side**2
        self.pinpoints = [list(pair) for pair in self.image_processor.image_grid_pinpoints]
        self.max_tiles = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        if config.vision_feature_select_strategy != "full":
            raise InvalidRequest("LLaVA-OneVision is served with vision_feature_select_strategy 'full' only")
        self.tokens = {
            Modality.IMAGE: int(config.image_token_id),
            Modality.VIDEO: int(config.video_token_id),
        }
        self.placeholders = {
            kind: text
            for kind, token in self.tokens.items()
            if (text := self.tokenizer.convert_ids_to_tokens(token)) is not None
        }
        self.modalities = frozenset(self.placeholders)
        self.sampling = FrameSampling(min_frames=1, max_frames=768, num_frames=VIDEO_FRAMES)

    def placeholder_text(self, modality: Modality) -> str:
        return self.placeholders[modality] + "\n"

    def request_options(self, modalities: Sequence[Modality]) -> dict[str, Any]:
        """The stock processor tiles the only picture of a conversation, and none of several."""
        return {"anyres": list(modalities).count(Modality.IMAGE) <= 1}

    def decode_spec(self, header: MediaHeader, options: dict[str, Any]) -> DecodeSpec:
        if header.modality is not Modality.VIDEO:
            return super().decode_spec(header, options)
        plan = plan_frames(header, self.sampling.with_options(options))
        return DecodeSpec(times_s=plan.times_s, max_frames=len(plan.times_s))

    def size(self, header: MediaHeader, options: dict[str, Any]) -> ItemSize:
        self.check(header.modality, options)
        if header.modality is Modality.IMAGE:
            return self._image_size(header.height_px, header.width_px, options)
        return self._video_size(len(plan_frames(header, self.sampling.with_options(options)).indices))

    def image_size(self, height_px: int, width_px: int, options: dict[str, Any]) -> ItemSize:
        if not self._is_tiled(options):
            return self._item(self.embeds_a_tile + 1, 1)
        best = select_best_resolution((height_px, width_px), self.pinpoints)
        tile = self.config.vision_config.image_size
        rows, columns = best[0] // tile, best[1] // tile
        unpadded, newlines = self._unpadded(height_px, width_px, rows, columns)
        return self._item(self.embeds_a_tile + unpadded + newlines, rows * columns + 1, (height_px, width_px))

    def fit_px(self, width_px: int, height_px: int, options: dict[str, Any]) -> tuple[int, int] | None:
        """A single tile; a tiled picture's padding is counted by its own pixels."""
        tile = int(self.config.vision_config.image_size)
        return None if self._is_tiled(options) else covering_px(width_px, height_px, (tile, tile))

    def _unpadded(self, height_px: int, width_px: int, rows: int, columns: int) -> tuple[int, int]:
        """Embeddings left after the padding of the tiled picture is cut off, and its line ends."""
        high, wide = self.side * rows, self.side * columns
        if width_px / height_px > wide / high:
            high -= (high - int(round(height_px * (wide / width_px), 7))) // 2 * 2
        else:
            wide -= (wide - int(round(width_px * (high / height_px), 7))) // 2 * 2
        ratio = sqrt(high * wide / (self.max_tiles * self.side**2))
        if ratio > 1.1:
            high, wide = int(high // ratio), int(wide // ratio)
        return high * wide, high

    def _sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        return ItemSize(num_embeds, num_embeds)

    def _video_size(self, num_frames: int) -> ItemSize:
        pooled = ceil(self.side / 2)
        return self._item(num_frames * pooled**2 + 1, num_frames, (num_frames,))

    def _item(self, num_embeds: int, tiles: int, grid: tuple[int, ...] = ()) -> ItemSize:
        vision = self.config.vision_config
        tokens = tiles * self.embeds_a_tile
        cost = tower_flops(
            tokens, self.embeds_a_tile, vision.hidden_size, intermediate_size(vision), vision.num_hidden_layers
        )
        return ItemSize(num_embeds, tokens, grid, cost)

    def _is_tiled(self, options: dict[str, Any]) -> bool:
        tiled = options.get("anyres", True)
        if not isinstance(tiled, bool):
            raise InvalidRequest(f"media option anyres must be true or false, got {tiled!r}")
        return tiled and options.get("detail") != "low"

    def batch_key(self, size: ItemSize) -> str:
        return {0: "tile", 1: "video", 2: "anyres"}[len(size.grid)]

    def process_image(self, image: DecodedImage, options: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        # beside a second picture the stock processor tiles none; a pixel is the cheapest second picture
        picture = Image.fromarray(image.pixels)
        images: Any = [picture] if self._is_tiled(options) else [[picture, Image.new("RGB", (1, 1))]]
        out = self.table.stock_geometry(self.image_processor, images)
        size = np.array([[picture.height, picture.width]], dtype=np.int64)
        return {"pixel_values": out["pixel_values"][0], "image_size": size}

    def process(self, decoded: Decoded, options: dict[str, Any]) -> ProcessedItem:
        if isinstance(decoded, DecodedVideo) and Modality.VIDEO in self.modalities:
            return self._process_video(decoded)
        if not isinstance(decoded, DecodedImage):
            raise UnsupportedMedia(f"{self.folder.architecture} does not take this kind of media")
        return super().process(decoded, options)

    def _process_video(self, decoded: DecodedVideo) -> ProcessedItem:
        """Frames are squeezed to one tile each."""
        side = int(self.config.vision_config.image_size)
        resample = self.image_processor.resample
        tiles = [resized(frame, side, side, resample) for frame in decoded.frames]
        size = self._video_size(len(tiles))
        features = {"pixel_values": self.table.planes(np.stack(tiles))}
        return ProcessedItem(size, features, self.batch_key(size))

    def run(self, modality: Modality, size: ItemSize) -> Run:
        return Run.of_token(self.tokens[modality], size.num_embeds)


class Served(StockModel):
    """Tiles of pictures of one kind in one batch; clips one after another."""

    tower_name = "vision_tower"

    def encode_features(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        inner = self.model.model
        pixels = [self.feature(item, "pixel_values") for item in items]
        if items[0].modality is Modality.VIDEO:
            return [inner.get_video_features(own[None]).pooler_output[0] for own in pixels]
        if items[0].batch_key == "tile":
            return self._single_tiles(torch.cat(pixels))
        sizes = torch.cat([self.feature(item, "image_size") for item in items])
        ones = torch.ones(len(items), dtype=torch.int64)
        return list(inner.get_image_features(torch.cat(pixels), sizes, batch_num_images=ones).pooler_output)

    def _single_tiles(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """Pictures that are not tiled: the projected tower rows and one line end."""
        inner, layer = self.model.model, self.model.config.vision_feature_layer
        states = inner.vision_tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        chosen = states[layer] if isinstance(layer, int) else torch.cat([states[index] for index in layer], dim=-1)
        rows = inner.multi_modal_projector(chosen)
        newline = inner.image_newline.to(rows).expand(len(rows), 1, -1)
        return list(torch.cat([rows, newline], dim=1))

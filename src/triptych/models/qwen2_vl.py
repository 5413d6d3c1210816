"""Qwen2-VL and Qwen2.5-VL: native resolution, packed tower, video as temporal patches, three rotary axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from triptych.core.errors import EmbeddingsRefused, InvalidMedia, UnsupportedMedia
from triptych.core.media import Decoded, DecodedImage, DecodedVideo, DecodeSpec, MediaHeader, Modality
from triptych.core.prepared import EncoderItem
from triptych.models import frames
from triptych.models.base import ItemSize, ProcessedItem
from triptych.models.folder import ModelFolder
from triptych.models.frames import FramePlan, FrameSampling, plan_frames
from triptych.models.layouts import ImageLayout, Placed, Run, option_int, processor_key, tower_flops
from triptych.models.mrope import GridRun, rope_positions
from triptych.models.resample import resized
from triptych.models.served import StockModel

LOW_DETAIL_PIXELS = 512 * 512
VIDEO_DEFAULTS = {"fps": 2.0, "min_frames": 4, "max_frames": 768}


class Layout(ImageLayout):
    """Items are patch grids (t, h, w); one embedding for each `merge_size` squared patches."""

    modalities = frozenset({Modality.IMAGE, Modality.VIDEO})
    option_names = frozenset({"min_pixels", "max_pixels"}) | frames.OPTION_NAMES
    default_video_pixels = (128, 768)  # in merged patches a frame, of the stock video processor

    def __init__(self, folder: ModelFolder, overrides: dict[str, Any]) -> None:
        video_overrides = {name: overrides[name] for name in VIDEO_DEFAULTS if name in overrides}
        super().__init__(folder, {name: overrides[name] for name in overrides if name not in VIDEO_DEFAULTS})
        self.patch_px = int(self.image_processor.patch_size)
        self.merge = int(self.image_processor.merge_size)
        self.temporal = int(self.image_processor.temporal_patch_size)
        self.factor_px = self.patch_px * self.merge
        self.min_pixels = int(self.image_processor.size["shortest_edge"])
        self.max_pixels = int(self.image_processor.size["longest_edge"])
        video = VIDEO_DEFAULTS | self.folder.read_json("video_preprocessor_config.json") | video_overrides
        self.sampling = FrameSampling(
            float(video["fps"]), int(video["min_frames"]), int(video["max_frames"]), self.temporal
        )
        self.video_pixels = self._video_pixels(video)
        self.image_token_id = int(folder.config.image_token_id)
        self.video_token_id = int(folder.config.video_token_id)
        tokens = self.tokenizer.convert_ids_to_tokens([self.image_token_id, self.video_token_id])
        self.placeholders = {
            kind: text
            for kind, text in zip((Modality.IMAGE, Modality.VIDEO), tokens, strict=True)
            if text is not None  # a vocabulary without a video token serves pictures only
        }
        self.modalities = frozenset(self.placeholders)
        self.processor_key = processor_key(
            type(self).__name__, self.image_processor.to_dict(), {"sampling": self.sampling, "px": self.video_pixels}
        )

    def _video_pixels(self, video: dict[str, Any]) -> tuple[int, int]:
        size = video.get("size") or {}
        low, high = (merged * self.factor_px**2 for merged in self.default_video_pixels)
        return int(size.get("shortest_edge", low)), int(size.get("longest_edge", high))

    def placeholder_text(self, modality: Modality) -> str:
        start = self.tokenizer.convert_ids_to_tokens(self.config.vision_start_token_id)
        end = self.tokenizer.convert_ids_to_tokens(self.config.vision_end_token_id)
        return f"{start}{self.placeholders[modality]}{end}"

    # sizes

    def size(self, header: MediaHeader, options: dict[str, Any]) -> ItemSize:
        self.check(header.modality, options)
        if header.modality is Modality.IMAGE:
            return self._image_size(header.height_px, header.width_px, options)
        plan = plan_frames(header, self.sampling.with_options(options))
        return self.video_size(header.height_px, header.width_px, plan, options)

    def decode_spec(self, header: MediaHeader, options: dict[str, Any]) -> DecodeSpec:
        if header.modality is not Modality.VIDEO:
            return super().decode_spec(header, options)
        plan = plan_frames(header, self.sampling.with_options(options))
        return DecodeSpec(times_s=plan.times_s, max_frames=len(plan.times_s))

    def image_size(self, height_px: int, width_px: int, options: dict[str, Any]) -> ItemSize:
        height_px, width_px = self.resized(height_px, width_px, *self.pixel_limits(options))
        return self.grid_size(1, height_px, width_px)

    def video_size(self, height_px: int, width_px: int, plan: FramePlan, options: dict[str, Any]) -> ItemSize:
        height_px, width_px = self.resized_video(height_px, width_px, len(plan.indices), options)
        steps = -(-len(plan.indices) // self.temporal)
        return self.grid_size(steps, height_px, width_px, self.step_times_s(plan, steps))

    def step_times_s(self, plan: FramePlan, steps: int) -> tuple[float, ...]:
        """Seconds of each temporal step: equally spaced, as the stock processor counts them."""
        return tuple(step * plan.interval_s * self.temporal for step in range(steps))

    def _sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        """`grid` is (t, h, w) in patches, as positions need it."""
        if len(grid) != 3 or min(grid) < 1 or grid[1] % self.merge or grid[2] % self.merge:
            raise EmbeddingsRefused(
                f"the metadata must give grid 't,h,w' in patches, h and w multiples of {self.merge}, got {grid}"
            )
        if modality is Modality.IMAGE and grid[0] != 1:
            raise EmbeddingsRefused(f"the grid of a picture is 1,h,w, got {grid}")
        size = self.grid_size(grid[0], grid[1] * self.patch_px, grid[2] * self.patch_px)
        if size.num_embeds != num_embeds:
            raise EmbeddingsRefused(f"grid {grid} has {size.num_embeds} embeddings, got {num_embeds}")
        if modality is Modality.VIDEO:
            seconds = tuple(step * self.temporal / self.sampling.frames_per_s for step in range(grid[0]))
            return replace(size, times_s=seconds)
        return size

    def grid_size(self, steps: int, height_px: int, width_px: int, times_s: tuple[float, ...] = ()) -> ItemSize:
        h, w = height_px // self.patch_px, width_px // self.patch_px
        vision = self.config.vision_config
        hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
        intermediate = getattr(vision, "intermediate_size", None) or int(hidden * vision.mlp_ratio)
        patches = steps * h * w
        cost = tower_flops(patches, h * w, hidden, intermediate, vision.depth)
        return ItemSize(patches // self.merge**2, patches, (steps, h, w), cost, times_s)

    def pixel_limits(self, options: dict[str, Any]) -> tuple[int, int]:
        low = option_int(options, "min_pixels", self.min_pixels)
        high = option_int(options, "max_pixels", self.max_pixels, low)
        if options.get("detail") == "low":
            high = max(low, min(high, LOW_DETAIL_PIXELS))
        return low, high

    def resized(self, height_px: int, width_px: int, low: int, high: int) -> tuple[int, int]:
        height_px, width_px = smart_resize(height_px, width_px, self.factor_px, low, high)
        return height_px, width_px

    def resized_video(self, height_px: int, width_px: int, num_frames: int, options: dict[str, Any]) -> tuple[int, int]:
        low, high = self.video_pixels
        high = option_int(options, "max_pixels", high, low)
        try:
            return self.resized(height_px, width_px, low, high)
        except ValueError as error:
            raise InvalidMedia(f"a video of {width_px}x{height_px} pixels: {error}") from error

    # pixels

    def fit_px(self, width_px: int, height_px: int, options: dict[str, Any]) -> tuple[int, int]:
        height_px, width_px = self.resized(height_px, width_px, *self.pixel_limits(options))
        return width_px, height_px

    def process_image(self, image: DecodedImage, options: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        width_px, height_px = image.seen_px
        height_px, width_px = self.resized(height_px, width_px, *self.pixel_limits(options))
        patches = self.patches(image.pixels[None], height_px, width_px)
        grid = np.array([[1, height_px // self.patch_px, width_px // self.patch_px]], dtype=np.int64)
        return {"pixel_values": patches, "grid_thw": grid}

    def patches(self, frames: npt.NDArray[np.uint8], height_px: int, width_px: int) -> npt.NDArray[np.float32]:
        """[F, H, W, C] -> [steps * h * w, C * temporal * patch * patch]; the last frame fills its step."""
        resample = self.image_processor.resample
        frames = np.stack([resized(frame, height_px, width_px, resample) for frame in frames])
        missing = -len(frames) % self.temporal
        planes = self.table.planes(np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)]))
        return patchify(planes, self.patch_px, self.merge, self.temporal)

    def process(self, decoded: Decoded, options: dict[str, Any]) -> ProcessedItem:
        if isinstance(decoded, DecodedVideo) and Modality.VIDEO in self.modalities:
            return self._process_video(decoded, options)
        if not isinstance(decoded, DecodedImage):
            raise UnsupportedMedia(f"{self.folder.architecture} does not take this kind of media")
        return super().process(decoded, options)

    def _process_video(self, decoded: DecodedVideo, options: dict[str, Any]) -> ProcessedItem:
        """Each frame takes the picture path; frames then pair up into temporal patches."""
        num_frames, height_px, width_px = decoded.frames.shape[:3]
        step_s = float(np.diff(decoded.times_s).mean()) if num_frames > 1 else 1.0
        plan = FramePlan(tuple(range(num_frames)), tuple(decoded.times_s.tolist()), step_s)
        size = self.video_size(height_px, width_px, plan, options)
        patches = self.patches(decoded.frames, size.grid[1] * self.patch_px, size.grid[2] * self.patch_px)
        features: dict[str, npt.NDArray[Any]] = {
            "pixel_values": patches,
            "grid_thw": np.array([size.grid], dtype=np.int64),
        }
        return ProcessedItem(size, features, self.batch_key(size))

    # prompt

    def run(self, modality: Modality, size: ItemSize) -> Run:
        token = self.image_token_id if modality is Modality.IMAGE else self.video_token_id
        return Run.of_token(token, size.num_embeds)

    def positions(self, num_tokens: int, placed: Sequence[Placed]) -> tuple[npt.NDArray[np.int32], int]:
        return rope_positions(num_tokens, [run for item in placed for run in self.grid_runs(item)])

    def grid_runs(self, item: Placed) -> list[GridRun]:
        t, h, w = item.size.grid
        interval = 1.0
        if item.modality is Modality.VIDEO and len(item.size.times_s) > 1:
            per_second = getattr(self.config.vision_config, "tokens_per_second", None)
            interval = 1.0 if per_second is None else per_second * item.size.times_s[1]
        return [GridRun(item.start, (t, h // self.merge, w // self.merge), interval)]


class Served(StockModel):
    """All items of a call go through the tower as one packed sequence, no padding."""

    tower_name = "visual"

    def encode_features(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        pixels = torch.cat([self.feature(item, "pixel_values") for item in items])
        grids = torch.cat([self.feature(item, "grid_thw") for item in items])
        rows = self.tower_rows(self.model.model.visual(pixels, grid_thw=grids))
        return list(torch.split(rows, [item.num_embeds for item in items]))

    def tower_rows(self, output: Any) -> torch.Tensor:
        rows: torch.Tensor = output.pooler_output
        return rows

    def position_ids(self, positions: torch.Tensor) -> torch.Tensor:
        return positions.expand(3, -1)[:, None]


def patchify(planes: npt.NDArray[np.float32], patch: int, merge: int, temporal: int) -> npt.NDArray[np.float32]:
    """[F, C, H, W] -> [F / temporal * h * w, C * temporal * patch * patch], patches of one merged cell together."""
    frames, channels, height, width = planes.shape
    h, w = height // patch, width // patch
    split = planes.reshape(frames // temporal, temporal, channels, h // merge, merge, patch, w // merge, merge, patch)
    ordered = split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return np.ascontiguousarray(ordered).reshape(-1, channels * temporal * patch * patch)

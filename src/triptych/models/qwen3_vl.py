"""Qwen3-VL: as Qwen2.5-VL, with clips laid out frame by frame under time stamps, and deepstack levels.

A deepstack embedding is the tower's output and, beside it, what the tower's middle layers give to the first decoder
layers: one row is [hidden size, level 1, level 2, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_video

from triptych.core.errors import InvalidMedia
from triptych.core.media import Modality
from triptych.models import qwen2_vl
from triptych.models.base import ItemSize
from triptych.models.frames import FramePlan
from triptych.models.layouts import Placed, Run, option_int
from triptych.models.mrope import GridRun


class Layout(qwen2_vl.Layout):
    """`max_pixels` of a clip bounds all its frames together."""

    def resized_video(self, height_px: int, width_px: int, num_frames: int, options: dict[str, Any]) -> tuple[int, int]:
        low, high = self.video_pixels
        high = option_int(options, "max_pixels", high, low)
        frames = max(num_frames, self.temporal)
        try:
            height_px, width_px = smart_resize_video(
                frames, height_px, width_px, self.temporal, self.factor_px, low, high
            )
        except ValueError as error:
            raise InvalidMedia(f"a video of {width_px}x{height_px} pixels: {error}") from error
        return height_px, width_px

    def step_times_s(self, plan: FramePlan, steps: int) -> tuple[float, ...]:
        """Of each temporal step the middle between its first and last frame."""
        times = [*plan.times_s, *[plan.times_s[-1]] * (-len(plan.times_s) % self.temporal)]
        last = self.temporal - 1
        return tuple((times[i] + times[i + last]) / 2 for i in range(0, len(times), self.temporal))

    def run(self, modality: Modality, size: ItemSize) -> Run:
        if modality is not Modality.VIDEO:
            return super().run(modality, size)
        start, end = self.config.vision_start_token_id, self.config.vision_end_token_id
        step = [start, *[self.video_token_id] * (size.num_embeds // size.grid[0]), end]
        ids: list[int] = []
        for time_s in size.times_s:
            ids += self.tokenizer.encode(f"<{time_s:.1f} seconds>", add_special_tokens=False)
            ids += step
        return Run.of_marks(ids, self.video_token_id)

    def grid_runs(self, item: Placed) -> list[GridRun]:
        """Every temporal step is a grid of its own; time is told by the stamps, not by positions."""
        _, h, w = item.size.grid
        grid = (1, h // self.merge, w // self.merge)
        return [GridRun(item.start + offset, grid) for offset, _, _ in item.run.pieces]


class Served(qwen2_vl.Served):
    """Rows of the tower's levels side by side; the levels are added after the first decoder layers."""

    def tower_rows(self, output: Any) -> torch.Tensor:
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)

    def extra_inputs(
        self, embeds: torch.Tensor, media_rows: torch.Tensor | None, media_embeds: torch.Tensor | None
    ) -> dict[str, Any]:
        if media_rows is None or media_embeds is None:
            return {}
        order = torch.argsort(media_rows)
        is_media = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
        is_media[0, media_rows] = True
        levels = torch.split(media_embeds[order], self.info.hidden_size, dim=-1)[1:]
        return {"visual_pos_masks": is_media, "deepstack_visual_embeds": list(levels)}


def embed_multiple(config: PreTrainedConfig) -> int:
    """Columns of one embedding, in hidden sizes."""
    return 1 + len(config.vision_config.deepstack_visual_indexes)


__all__: Sequence[str] = ["Layout", "Served", "embed_multiple"]

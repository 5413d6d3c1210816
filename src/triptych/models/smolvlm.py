"""SmolVLM: pictures as Idefics3 takes them, and clips as frames of one tile each, every frame under its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.models.idefics3.image_processing_pil_idefics3 import _resize_output_size_rescale_to_max_len

from triptych.core.errors import EmbeddingsRefused, InvalidMedia
from triptych.core.media import Decoded, DecodedVideo, DecodeSpec, MediaHeader, Modality
from triptych.core.prepared import Span
from triptych.models import frames, idefics3
from triptych.models.base import Expanded, ItemSize, ProcessedItem
from triptych.models.folder import ModelFolder
from triptych.models.idefics3 import FAKE, GLOBAL, IMAGE, Served
from triptych.models.layouts import Placed, Run, processor_key, tower_flops
from triptych.models.resample import resized
from triptych.models.smolvlm_clips import clip_duration_s, clip_settings, clip_text, plan_clip


class Layout(idefics3.Layout):
    """`grid` of a clip is (frames,); its `times_s` are those of the frames and, last, the clip's length.

    The stock processor writes a clip's words into the text before it makes tokens, so the words may share a token with
    what stands beside them: see `expand`. The stock placeholder need not be a token of the vocabulary; the mark of a
    picture's thumbnail, which no template writes, stands for it here.
    """

    modalities = frozenset({Modality.IMAGE, Modality.VIDEO})
    option_names = idefics3.Layout.option_names | frames.OPTION_NAMES

    def __init__(self, folder: ModelFolder, overrides: dict[str, Any]) -> None:
        super().__init__(folder, overrides)
        self.clips = clip_settings(folder, self.tile_px)
        self.placeholders[Modality.VIDEO] = GLOBAL
        self.processor_key = processor_key(self.processor_key.hex(), {"clips": repr(self.clips)})
        self._special = frozenset(self.tokenizer.get_added_vocab().values())

    def decode_spec(self, header: MediaHeader, options: dict[str, Any]) -> DecodeSpec:
        if header.modality is not Modality.VIDEO:
            return super().decode_spec(header, options)
        plan = plan_clip(header, self.clips.sampling.with_options(options))
        return DecodeSpec(times_s=plan.times_s, max_frames=len(plan.times_s))

    def size(self, header: MediaHeader, options: dict[str, Any]) -> ItemSize:
        if header.modality is not Modality.VIDEO:
            return super().size(header, options)
        self.check(header.modality, options)
        plan = plan_clip(header, self.clips.sampling.with_options(options))
        size = self._clip_size(len(plan.times_s))
        return replace(size, times_s=(*plan.times_s, clip_duration_s(header)))

    def _clip_size(self, num_frames: int) -> ItemSize:
        vision = self.config.vision_config
        patches = num_frames * self.patches_a_tile
        cost = tower_flops(
            patches, self.patches_a_tile, vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers
        )
        return ItemSize(num_frames * self.embeds_a_tile, patches, (num_frames,), cost)

    def _sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        if modality is Modality.VIDEO:
            raise EmbeddingsRefused("embeddings of a clip are not taken here: its prompt holds the frames' times")
        return super()._sent_size(modality, num_embeds, grid)

    def process(self, decoded: Decoded, options: dict[str, Any]) -> ProcessedItem:
        if not isinstance(decoded, DecodedVideo):
            return super().process(decoded, options)
        if not len(decoded.frames):
            raise InvalidMedia("a video without frames")
        tiles = np.stack([self._frame(frame) for frame in decoded.frames])
        times_s = tuple(float(time_s) for time_s in decoded.times_s)
        size = replace(self._clip_size(len(tiles)), times_s=(*times_s, times_s[-1]))
        return ProcessedItem(size, {"pixel_values": self.table.planes(tiles)}, self.batch_key(size))

    def _frame(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """[H, W, 3] to one tile, by way of the longest edge as the stock processor does it."""
        height_px, width_px = _resize_output_size_rescale_to_max_len(
            pixels.shape[0], pixels.shape[1], max_len=self.clips.longest_edge_px
        )
        resample = self.image_processor.resample
        return resized(resized(pixels, height_px, width_px, resample), self.tile_px, self.tile_px, resample)

    def run(self, modality: Modality, size: ItemSize) -> Run:
        if modality is not Modality.VIDEO:
            return super().run(modality, size)
        *times_s, duration_s = size.times_s
        text = clip_text(times_s, duration_s, f"{FAKE}{GLOBAL}{IMAGE * self.embeds_a_tile}{FAKE}")
        return Run.of_marks(self.tokenizer.encode(text, add_special_tokens=False), self.image_token_id)

    def expand(self, token_ids: list[int], sizes: Sequence[tuple[Modality, ItemSize]]) -> Expanded:
        """Where a clip's words meet other text, both are made tokens together; embeddings keep their places."""
        laid, placed = self._lay(token_ids, sizes)
        edges = [
            edge
            for item in placed
            if item.modality is Modality.VIDEO
            for edge in (item.start, item.start + len(item.run.token_ids))
        ]
        for edge in sorted(edges, reverse=True):
            self._join(laid, edge)
        return Expanded(laid, self._spans(laid, placed))

    def _join(self, token_ids: list[int], edge: int) -> None:
        """Make the plain text around `edge` tokens anew, in place. Text that would become a special token stays as it
        was: a caller wrote it."""
        start, end = edge, edge
        while start > 0 and token_ids[start - 1] not in self._special:
            start -= 1
        while end < len(token_ids) and token_ids[end] not in self._special:
            end += 1
        text = self.tokenizer.decode(token_ids[start:end], clean_up_tokenization_spaces=False)
        joined = self.tokenizer.encode(text, add_special_tokens=False)
        if self._special.isdisjoint(joined):
            token_ids[start:end] = joined

    def _spans(self, token_ids: list[int], placed: Sequence[Placed]) -> tuple[Span, ...]:
        """Every run of picture tokens belongs to the next piece of the items in their order."""
        pieces = [(item.item_idx, length, taken) for item in placed for _, length, taken in item.run.pieces]
        found = Run.of_marks(token_ids, self.image_token_id).pieces
        assert [length for _, length, _ in pieces] == [length for _, length, _ in found], "pieces moved"
        return tuple(
            Span(start, length, item_idx, taken)
            for (start, _, _), (item_idx, length, taken) in zip(found, pieces, strict=True)
        )


__all__ = ["Layout", "Served"]

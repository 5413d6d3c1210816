"""Qwen2-Audio: a stretch of sound up to the extractor's window, as log mel frames through a Whisper-like tower."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.masking_utils import create_bidirectional_mask

from triptych.core.errors import BudgetExceeded, EmbeddingsRefused, InvalidMedia, InvalidRequest, UnsupportedMedia
from triptych.core.media import Decoded, DecodedAudio, DecodeSpec, MediaHeader, Modality
from triptych.core.prepared import EncoderItem
from triptych.models.base import ItemSize, ProcessedItem
from triptych.models.folder import ModelFolder
from triptych.models.layouts import IGNORED_OPTIONS, Run, TextLayout, processor_key, tower_flops
from triptych.models.served import StockModel


class Layout(TextLayout):
    """The tower always sees its whole window; embeddings are kept for the frames that hold sound."""

    modalities = frozenset({Modality.AUDIO})
    adds_bos = True

    def __init__(self, folder: ModelFolder, overrides: dict[str, Any]) -> None:
        super().__init__(folder, overrides)
        self.extractor = folder.feature_extractor(overrides)
        self.rate_hz = int(self.extractor.sampling_rate)
        self.hop = int(self.extractor.hop_length)
        self.max_samples = int(self.extractor.n_samples)
        self.audio_token_id = int(folder.config.audio_token_id)
        self.placeholders = {Modality.AUDIO: self.tokenizer.convert_ids_to_tokens(self.audio_token_id)}
        self.processor_key = processor_key(type(self).__name__, self.extractor.to_dict())

    def placeholder_text(self, modality: Modality) -> str:
        return f"<|audio_bos|>{self.placeholders[modality]}<|audio_eos|>"

    def decode_spec(self, header: MediaHeader, options: dict[str, Any]) -> DecodeSpec:
        return DecodeSpec(sample_rate_hz=self.rate_hz)

    def size(self, header: MediaHeader, options: dict[str, Any]) -> ItemSize:
        if header.modality is not Modality.AUDIO:
            raise UnsupportedMedia(f"{self.folder.architecture} takes audio, not {header.modality.value}")
        unknown = sorted(set(options) - IGNORED_OPTIONS)
        if unknown:
            raise InvalidRequest(f"{self.folder.architecture} has no media option {unknown[0]!r}; it takes none")
        return self._size(round(header.duration_s * self.rate_hz))

    def _size(self, num_samples: int) -> ItemSize:
        if num_samples > self.max_samples:
            raise BudgetExceeded(
                "max_audio_duration_s",
                allowed=self.max_samples / self.rate_hz,
                requested=num_samples / self.rate_hz,
            )
        frames = ceil(num_samples / self.hop)
        convolved = (frames - 1) // 2 + 1
        num_embeds = (convolved - 2) // 2 + 1
        if num_embeds < 1:
            raise InvalidMedia(f"a sound of {num_samples} samples is too short to be heard by this model")
        audio = self.config.audio_config
        window = int(audio.max_source_positions)
        cost = tower_flops(window, window, audio.d_model, audio.encoder_ffn_dim, audio.encoder_layers)
        return ItemSize(num_embeds, window, (frames,), cost)

    def _sent_size(self, modality: Modality, num_embeds: int, grid: tuple[int, ...]) -> ItemSize:
        most = int(self.config.audio_config.max_source_positions) // 2
        if num_embeds > most:
            raise EmbeddingsRefused(f"a sound has at most {most} embeddings here, got {num_embeds}")
        return ItemSize(num_embeds, num_embeds * 2)

    def process(self, decoded: Decoded, options: dict[str, Any]) -> ProcessedItem:
        if not isinstance(decoded, DecodedAudio):
            raise UnsupportedMedia(f"{self.folder.architecture} takes audio only")
        if decoded.sample_rate_hz != self.rate_hz:
            raise InvalidMedia(f"sound at {decoded.sample_rate_hz} Hz reached an extractor of {self.rate_hz} Hz")
        size = self._size(len(decoded.samples))
        out = self.extractor(
            decoded.samples,
            sampling_rate=self.rate_hz,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="np",
        )
        frames = int(out["attention_mask"].sum())
        features: dict[str, npt.NDArray[Any]] = {
            "input_features": np.ascontiguousarray(out["input_features"], dtype=np.float32),
            "num_frames": np.array([frames], dtype=np.int64),
        }
        return ProcessedItem(size, features, Modality.AUDIO.value)

    def run(self, modality: Modality, size: ItemSize) -> Run:
        return Run.of_token(self.audio_token_id, size.num_embeds)


class Served(StockModel):
    """Every item fills the same window, so a call is one batch with a mask."""

    tower_name = "audio_tower"

    def encode_features(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        mel = torch.cat([self.feature(item, "input_features") for item in items])
        frames = torch.cat([self.feature(item, "num_frames") for item in items])
        inner, tower = self.model.model, self.model.model.audio_tower
        lengths = (frames - 1) // 2 + 1
        window = (mel.shape[-1] - 2) // 2 + 1
        is_sound = torch.arange(window, device=mel.device)[None] < lengths[:, None]
        mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=mel.new_zeros(len(items), window, 1), attention_mask=is_sound.long()
        )
        hidden = tower(mel, attention_mask=mask).last_hidden_state
        rows = inner.multi_modal_projector(hidden)
        return [own[: item.num_embeds] for own, item in zip(rows, items, strict=True)]

"""The named stages of a generated picture, in order. They are contiguous: their times add up to the request's."""

from __future__ import annotations

from enum import StrEnum


class GenerateStage(StrEnum):
    ENCODE_QUEUE = "generate_encode_queue_ms"
    TEXT_ENCODE = "text_encode_ms"
    DENOISE_QUEUE = "denoise_queue_ms"
    DENOISE = "denoise_ms"
    DECODE_QUEUE = "generate_decode_queue_ms"
    VAE_DECODE = "vae_decode_ms"

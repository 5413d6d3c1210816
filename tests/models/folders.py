"""Write a tiny random model as a folder, as the hub would hold it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

# A decoder of the smallest size at which heads, groups and layers still differ.
TINY_TEXT = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)


def write_folder(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    preprocessor: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
    video: dict[str, Any] | None = None,
) -> Path:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if preprocessor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    if processor is not None:
        (path / "processor_config.json").write_text(json.dumps(processor))
    if video is not None:
        (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    return path


def spread_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Larger random weights than the default, so that greedy choices differ from token to token and media matter."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5, generator=generator)
    return model.eval()


def stock_greedy(model: PreTrainedModel, num_new: int, **inputs: Any) -> list[int]:
    """The tokens of `generate`, alone in its batch, with eager attention."""
    model.set_attn_implementation("eager")
    length = inputs["input_ids"].shape[1]
    model.generation_config.eos_token_id = None  # an end token is a token like any other here
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=num_new, do_sample=False)
    return out[0, length:].tolist()

"""The one comparison every family with media is put to: stock `generate` against the packed, paged, chunked path."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import PreTrainedModel

from triptych.core.media import Decoded, DecodedImage, MediaHeader, Modality
from triptych.core.prepared import EncoderItem
from triptych.models.base import ItemSize, Layout
from triptych.models.registry import load_layout, load_served_model

from .folders import stock_greedy
from .packed import Prompt, run_greedy

NUM_NEW = 10


@dataclass
class Case:
    """A rendered conversation, its media in order, and what the stock model is given for the same."""

    token_ids: list[int]
    media: list[tuple[Modality, Decoded, ItemSize | None]]
    options: dict[str, Any] = field(default_factory=dict)


def drawing(width_px: int, height_px: int, seed: int = 0) -> DecodedImage:
    """Circles and noise, the same for the same seed."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (width_px, height_px), tuple(int(v) for v in rng.integers(0, 255, 3)))
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = rng.integers(0, width_px), rng.integers(0, height_px)
        r = int(rng.integers(3, max(4, min(width_px, height_px) // 2)))
        pen.ellipse([x - r, y - r, x + r, y + r], fill=tuple(int(v) for v in rng.integers(0, 255, 3)))
    return DecodedImage(np.asarray(image))


def header_of(decoded: DecodedImage) -> MediaHeader:
    height_px, width_px = decoded.pixels.shape[:2]
    return MediaHeader(Modality.IMAGE, "image/png", 1, width_px, height_px)


def prepare(layout: Layout, case: Case) -> Prompt:
    """As `prompt/` does it: process each item, then lay the placeholders."""
    items, sizes = [], []
    for index, (modality, decoded, planned) in enumerate(case.media):
        done = layout.process(decoded, case.options)
        size = planned or done.size
        assert size.num_embeds == done.size.num_embeds
        sizes.append((modality, size))
        items.append(
            EncoderItem(
                key=bytes([index]) * 32,
                modality=modality,
                num_embeds=size.num_embeds,
                features=done.features,
                batch_key=done.batch_key,
                num_tokens_encoder=size.num_tokens_encoder,
            )
        )
    return Prompt(layout.expand(case.token_ids, sizes), items)


def assert_parity(
    folder: Path, model: PreTrainedModel, cases: list[Case], stock_inputs: Any, num_axes: int = 1
) -> list[list[int]]:
    """Greedy tokens equal, alone and packed, whole and chunked. `stock_inputs(prompt)`: generate's arguments."""
    layout, served = load_layout(folder), load_served_model(folder, "float32", "cpu")
    prompts = [prepare(layout, case) for case in cases]
    expected = [
        stock_greedy(model, NUM_NEW, input_ids=torch.tensor([p.expanded.token_ids]), **stock_inputs(p)) for p in prompts
    ]

    assert expected == run_greedy(served, prompts, NUM_NEW, num_axes=num_axes)
    assert expected == run_greedy(served, prompts, NUM_NEW, chunk=7, num_axes=num_axes)
    assert expected[:1] == run_greedy(served, prompts[:1], NUM_NEW, num_axes=num_axes)
    return expected

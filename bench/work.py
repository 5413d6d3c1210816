"""What the load is made of: chat requests of four kinds, from a seed. The bodies are bytes before the clock starts.

`unique` pictures differ in every request, `same` is one picture with another question each time, `text` has no
picture. All servers get the same bytes.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

KINDS = ("unique", "same", "text")


@dataclass(frozen=True, slots=True)
class WorkSpec:
    """One kind of request. `size_px` is the side of its square picture."""

    kind: str
    num_output_tokens: int = 64
    size_px: int = 512
    seed: int = 0
    stages: bool = False  # ask for the stage table too; only triptych knows it

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind may be one of {', '.join(KINDS)}; got {self.kind!r}")


def picture_jpeg(seed: int, size_px: int) -> bytes:
    """A smooth random picture: as heavy for a decoder as a photograph's sky, and different for every seed."""
    cells = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(cells).resize((size_px, size_px), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def question(spec: WorkSpec, number: int) -> str:
    return f"Describe this image in detail please, request {spec.seed + number}."


def picture(spec: WorkSpec, number: int) -> bytes:
    return picture_jpeg(spec.seed + (number if spec.kind == "unique" else 0), spec.size_px)


def chat_body(model: str, spec: WorkSpec, number: int) -> bytes:
    """Request `number` of a run; the number is part of the question, so that no whole answer can be cached."""
    content: list[dict[str, Any]] = [{"type": "text", "text": question(spec, number)}]
    if spec.kind != "text":
        url = "data:image/jpeg;base64," + base64.b64encode(picture(spec, number)).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    options = {"include_usage": True} | ({"include_stages": True} if spec.stages else {})
    return json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": spec.num_output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": options,
        }
    ).encode()


def bodies(model: str, spec: WorkSpec, count: int) -> Sequence[bytes]:
    return [chat_body(model, spec, number) for number in range(count)]


def poisson_offsets_s(rate_per_s: float, count: int, seed: int) -> list[float]:
    """When each request of an open loop is due, from the start of the run."""
    if rate_per_s <= 0:
        raise ValueError(f"the rate must be above 0 requests/s, got {rate_per_s}")
    gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    gaps[0] = 0.0
    return [float(offset) for offset in np.cumsum(gaps)]

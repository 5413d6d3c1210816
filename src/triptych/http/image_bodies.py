"""The bodies of the image and video endpoints, and the one way from a body to requests for an engine.

Names follow the OpenAI API; seed, num_inference_steps, guidance_scale, negative_prompt, strength and step_cache are
ours, under the names that diffusers uses.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Literal

import msgspec

from triptych.core.config import Tier
from triptych.core.errors import BudgetExceeded, InvalidRequest
from triptych.generate.request import GenerateRequest, ModelTraits, check_request, chosen_step_cache, task_of
from triptych.http.call import Call


class GenerateFields(msgspec.Struct, kw_only=True):
    """What pictures and clips have in common."""

    prompt: str
    model: str | None = None
    size: str | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    step_cache: str | None = None
    timeout_s: float | None = None
    user: str | None = None


class ImagesRequest(GenerateFields, kw_only=True):
    """`quality`, `style` and `moderation` are taken and have no effect."""

    n: int | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = None
    stream: bool | None = None
    partial_images: int | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    quality: str | None = None
    style: str | None = None
    moderation: str | None = None


class EditRequest(ImagesRequest, kw_only=True):
    """`image` and `mask`: a URL or data URL in JSON; files in a form. `strength` is the share of the steps run."""

    image: str | list[str] | None = None
    mask: str | None = None
    strength: float | None = None
    input_fidelity: str | None = None


class VideoRequest(GenerateFields, kw_only=True):
    """Length by `num_frames`, or by `seconds` times `fps`."""

    seconds: str | float | None = None
    num_frames: int | None = None
    fps: float | None = None
    input_reference: Any = None


def parse_size(size: str | None, traits: ModelTraits) -> tuple[int, int]:
    """Width and height. `auto` and None are the model's own. Raises InvalidRequest."""
    if size in (None, "", "auto"):
        return traits.default_width_px, traits.default_height_px
    found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size or "")
    if found is None:
        raise InvalidRequest(f"size must be WIDTHxHEIGHT or auto, got {(size or '')[:40]!r}", param="size")
    return int(found[1]), int(found[2])


def num_pictures(body: ImagesRequest, tier: Tier) -> int:
    """Raises InvalidRequest, BudgetExceeded."""
    number = 1 if body.n is None else body.n
    if number < 1:
        raise InvalidRequest(f"n must be 1 or more, got {number}", param="n")
    if number > tier.max_images_per_request:
        raise BudgetExceeded("max_images_per_request", allowed=tier.max_images_per_request, requested=number, param="n")
    return number


def check_picture_fields(body: ImagesRequest) -> None:
    """The rules on output. Raises InvalidRequest."""
    if body.background == "transparent":
        raise InvalidRequest("a transparent background is not supported", param="background")
    if body.output_compression is not None and not 0 <= body.output_compression <= 100:
        raise InvalidRequest(
            f"output_compression must be between 0 and 100, got {body.output_compression}", param="output_compression"
        )
    if body.partial_images and not body.stream:
        raise InvalidRequest("partial_images needs stream: true", param="partial_images")


def build_requests(
    call: Call,
    body: GenerateFields,
    traits: ModelTraits,
    *,
    number: int,
    size_px: tuple[int, int],
    **more: Any,
) -> list[GenerateRequest]:
    """One request a picture, checked against the model and the tier. Picture i gets seed + i; a missing seed is drawn.

    Raises what `check_request` raises."""
    seed = secrets.randbits(32) if body.seed is None else body.seed
    task = task_of(more.get("init_image"), more.get("mask"), more.get("num_frames", 1))
    num_steps = traits.default_num_steps if body.num_inference_steps is None else body.num_inference_steps
    requests = [
        GenerateRequest(
            request_id=f"{call.request_id}-{index}",
            prompt=body.prompt,
            negative_prompt=body.negative_prompt,
            width_px=size_px[0],
            height_px=size_px[1],
            num_steps=num_steps,
            guidance_scale=traits.default_guidance_scale if body.guidance_scale is None else body.guidance_scale,
            seed=seed + index,
            step_cache=chosen_step_cache(body.step_cache, traits, task, num_steps),
            tenant=call.tenant.name,
            arrival_s=call.clock.started_s,
            **more,
        )
        for index in range(number)
    ]
    for request in requests:
        check_request(request, traits, call.tier)
    return requests

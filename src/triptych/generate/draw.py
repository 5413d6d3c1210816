"""`draw`: one prompt to one file, in process. The command line calls it, and shows what `on_event` brings."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.core.config import GenerateConfig, Tier
from triptych.core.errors import InternalError, InvalidRequest
from triptych.core.events import FinishReason
from triptych.core.ids import new_id
from triptych.generate.build import build_engine
from triptych.generate.engine import GenerateEngine
from triptych.generate.events import GenerateEvent, GenerateFinal
from triptych.generate.init_pictures import Pixels, check_mask_size, fit_mask, fit_picture, nearest_size
from triptych.generate.picture_files import encode_picture, encode_video, write_whole
from triptych.generate.request import GenerateRequest, ModelTraits, Task, check_request, chosen_step_cache, task_of
from triptych.generate.run import error_of

FORMAT_BY_SUFFIX = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """None is the model's own default; a missing seed is drawn.

    `init_image`: [H, W, 3], and `mask`: [H, W], 255 where it is drawn anew, make it an edit; they are brought to the
    size asked for, or to that of the picture itself, rounded down to what the model takes."""

    width_px: int | None = None
    height_px: int | None = None
    num_steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    num_frames: int | None = None
    num_previews: int = 0
    step_cache: str | None = None
    init_image: Pixels | None = field(default=None, repr=False)
    mask: Pixels | None = field(default=None, repr=False)
    strength: float | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """`load_s` is the time to load the model, apart from the picture's own stages."""

    path: Path
    request: GenerateRequest
    stage_ms: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    load_s: float = 0.0


async def draw(
    prompt: str,
    output: Path,
    *,
    folder: Path,
    options: DrawOptions | None = None,
    config: GenerateConfig | None = None,
    tier: Tier | None = None,
    on_event: Callable[[GenerateEvent], None] = lambda event: None,
) -> Drawn:
    """Draw `prompt` with the diffusers model in `folder` and write `output` (.png, .jpg, .webp, .mp4), whole or not at
    all. `on_event` gets every StepEvent and PreviewEvent as it comes. Raises leaves of the error tree."""
    _check_suffix(output)
    started_s = time.monotonic()
    engine = build_engine(folder, name=folder.name, config=config or GenerateConfig(warm_up=False))
    request = request_for(prompt, engine.traits, options or DrawOptions())
    check_request(request, engine.traits, tier or Tier())
    _check_kind(output, request, engine.traits)
    await engine.start()
    try:
        load_s = time.monotonic() - started_s
        final = await _final(engine, request, on_event)
    finally:
        await engine.close()
    write_whole(output, _file_of(final, request, output))
    return Drawn(output, request, final.stage_ms, final.counters, load_s)


def request_for(prompt: str, traits: ModelTraits, options: DrawOptions) -> GenerateRequest:
    """Fill in the model's defaults."""
    num_steps = traits.default_num_steps if options.num_steps is None else options.num_steps
    num_frames = options.num_frames or traits.default_num_frames
    size_px, edit = _size_and_edit(traits, options)
    return GenerateRequest(
        request_id=new_id("draw"),
        prompt=prompt,
        negative_prompt=options.negative_prompt,
        width_px=size_px[0],
        height_px=size_px[1],
        num_steps=num_steps,
        guidance_scale=traits.default_guidance_scale if options.guidance_scale is None else options.guidance_scale,
        seed=secrets.randbits(32) if options.seed is None else options.seed,
        num_frames=num_frames,
        frames_per_s=traits.default_frames_per_s,
        num_previews=options.num_previews,
        step_cache=chosen_step_cache(
            options.step_cache, traits, task_of(options.init_image, options.mask, num_frames), num_steps
        ),
        **edit,
    )


def _size_and_edit(traits: ModelTraits, options: DrawOptions) -> tuple[tuple[int, int], dict[str, Any]]:
    """Width and height, and what an edit has beyond a request for text."""
    image, mask = options.init_image, options.mask
    if image is None:
        given = {"mask": mask, "strength": options.strength}
        for name in (name for name, value in given.items() if value is not None):
            raise InvalidRequest(f"{name} needs an image to start from", param=name)
        default_px = (traits.default_width_px, traits.default_height_px)
    else:
        default_px = nearest_size(image.shape[1], image.shape[0], traits)
    size_px = (options.width_px or default_px[0], options.height_px or default_px[1])
    if image is None:
        return size_px, {}
    edit: dict[str, Any] = {"init_image": fit_picture(image, size_px)}
    if mask is not None:
        check_mask_size(mask.shape[1::-1], image.shape[1::-1])
        edit["mask"] = fit_mask(mask, size_px)
    if options.strength is not None:
        edit["strength"] = options.strength
    return size_px, edit


async def _final(
    engine: GenerateEngine, request: GenerateRequest, on_event: Callable[[GenerateEvent], None]
) -> GenerateFinal:
    async for event in engine.submit(request):
        on_event(event)
        if isinstance(event, GenerateFinal):
            if event.reason is not FinishReason.STOP:
                raise error_of(event) or InternalError("the picture failed")
            return event
    raise InternalError("the engine ended without a final event")


def _file_of(final: GenerateFinal, request: GenerateRequest, output: Path) -> bytes:
    assert final.frames is not None
    if output.suffix.lower() == ".mp4":
        return encode_video(final.frames, request.frames_per_s)
    return encode_picture(final.frames[0], FORMAT_BY_SUFFIX[output.suffix.lower()])


def _check_suffix(output: Path) -> None:
    known = [*FORMAT_BY_SUFFIX, ".mp4"]
    if output.suffix.lower() not in known:
        raise InvalidRequest(f"the output must end in {', '.join(known)}, got {output.name!r}", param="output")
    if not output.parent.is_dir():
        raise InvalidRequest(f"no folder {str(output.parent)!r} to write {output.name} to", param="output")


def _check_kind(output: Path, request: GenerateRequest, traits: ModelTraits) -> None:
    if output.suffix.lower() == ".mp4" and Task.TEXT_TO_VIDEO not in traits.tasks:
        raise InvalidRequest(f"{traits.name} draws pictures, not clips: use .png", param="output")
    if output.suffix.lower() != ".mp4" and request.num_frames > 1:
        raise InvalidRequest(f"a clip of {request.num_frames} frames needs an .mp4 file", param="output")

"""What a kind of diffusion model must say, over the components of a stock diffusers pipeline.

A kind encodes one text, lays out one row, runs the denoiser on a batch of branches and decodes one latent. It owns the
pipeline and keeps no state of a request: encode, denoise and decode may run in three threads at once.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor

from triptych.generate.cache_setting import STEP_CACHES, CacheSetting
from triptych.generate.kinds.row import Conditioning, Inpaint, Row
from triptych.generate.request import EDIT_TASKS, GenerateRequest, ModelTraits, Task


class Kind(ABC):
    """One loaded pipeline. Subclasses follow their stock pipeline's `__call__` step by step."""

    tasks: ClassVar[frozenset[Task]] = frozenset({Task.TEXT_TO_IMAGE})
    default_num_steps: int = 28
    default_guidance_scale: float = 5.0
    frames_per_s: ClassVar[float] = 16.0
    has_frame_axis: ClassVar[bool] = False  # the VAE takes [1, C, F, H, W]
    has_batched_rope: ClassVar[bool] = False  # rotary positions come with a row for each of the batch
    blocks: ClassVar[tuple[str, ...]] = ()  # module lists of the denoiser that a step cache may skip, in order

    def __init__(self, pipeline: Any, name: str) -> None:
        self.pipeline = pipeline
        self.name = name
        self.step_caches: dict[str, CacheSetting] = {}  # that passed their quality gate, by name
        self.step_cache_min_steps: dict[str, int] = {}  # the fewest steps they were calibrated at, by name
        self.step_cache_reasons: dict[str, str] = {}  # why others are off, by name
        self.step_cache_edits: dict[str, dict[Task, str]] = {}  # what keeps it from edits, by name and task; "" nothing
        self.default_step_cache: str | None = None
        self.installed_cache: Any = None  # a `step_cache.StepCache` once one is used
        self.device: torch.device = pipeline.device
        self.vae = pipeline.vae
        accepted = inspect.signature(pipeline.scheduler.step).parameters
        self._step_takes_generator = "generator" in accepted

    def set_defaults(self, num_steps: int | None, guidance_scale: float | None) -> None:
        """Of a request that names none, in place of the pipeline class's. None leaves what there is."""
        if num_steps is not None:
            self.default_num_steps = num_steps
        if guidance_scale is not None:
            self.default_guidance_scale = guidance_scale

    # what it is

    @property
    @abstractmethod
    def denoiser(self) -> Any: ...

    @property
    def dtype(self) -> torch.dtype:
        return next(self.denoiser.parameters()).dtype

    @property
    @abstractmethod
    def latent_px(self) -> int:
        """Pixels along one side of one latent position that the denoiser attends over."""
        ...

    @property
    def vae_px(self) -> int:
        """Pixels along one side of one position of the VAE's latent."""
        return int(self.pipeline.vae_scale_factor)

    @property
    def frames_multiple(self) -> int:
        return 1

    @property
    def is_distilled(self) -> bool:
        return False

    def default_size_px(self) -> tuple[int, int]:
        size = self.denoiser.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return width * self.vae_px, height * self.vae_px

    def traits(self) -> ModelTraits:
        width_px, height_px = self.default_size_px()
        return ModelTraits(
            name=self.name,
            architecture=type(self.pipeline).__name__,
            tasks=self.tasks,
            size_multiple_px=self.latent_px,
            default_width_px=width_px,
            default_height_px=height_px,
            default_num_steps=self.default_num_steps,
            default_guidance_scale=self.default_guidance_scale,
            is_distilled=self.is_distilled,
            frames_multiple=self.frames_multiple,
            default_frames_per_s=self.frames_per_s,
            step_caches=tuple(self.step_caches),
            step_cache_min_steps=dict(self.step_cache_min_steps),
            step_cache_reasons={name: self._cache_reason(name) for name in STEP_CACHES if name not in self.step_caches},
            step_cache_edit_reasons=self._edit_reasons(),
            default_step_cache=self.default_step_cache,
        )

    def _edit_reasons(self) -> dict[tuple[str, Task], str]:
        """Why a calibrated cache is off for an edit, where it is."""
        reasons = {}
        for name in self.step_caches:
            for task in self.tasks & set(EDIT_TASKS):
                failures = self.step_cache_edits.get(name, {}).get(task)
                if failures is None:
                    reasons[name, task] = f"it was not calibrated for {task}: `triptych calibrate MODEL`"
                elif failures:
                    reasons[name, task] = f"it fails the quality gate for {task}: {failures}"
        return reasons

    def _cache_reason(self, name: str) -> str:
        if not self.blocks:
            return f"{type(self.pipeline).__name__} has no list of blocks to skip"
        return self.step_cache_reasons.get(name, "it was not calibrated: `triptych calibrate MODEL`")

    def modulated_input(self, block: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """What the first block's attention sees, [B, ...]: its normalised input, scaled and shifted by the timestep.
        `inputs` are the block's, by name. Kinds with `blocks` have it."""
        raise NotImplementedError(f"{type(self).__name__} has no modulated input")

    def branch_tokens(self, request: GenerateRequest) -> int:
        """Latent positions of one branch: the unit of cost."""
        latent_frames = (request.num_frames - 1) // self.frames_multiple + 1
        return (request.width_px // self.latent_px) * (request.height_px // self.latent_px) * latent_frames

    def variant(self, request: GenerateRequest) -> str:
        """What else rows of one forward must agree on, beyond their size."""
        return ""

    def uses_guidance(self, request: GenerateRequest) -> bool:
        """Whether two branches run."""
        return request.guidance_scale > 1.0 and not self.is_distilled

    # encode

    @abstractmethod
    def encode_text(self, text: str | None, *, is_negative: bool) -> Conditioning: ...

    def count_text_tokens(self, text: str) -> int:
        """By the first tokenizer, before it cuts off what is too long."""
        return len(self.pipeline.tokenizer(text, verbose=False).input_ids)

    def branch_extras(self, request: GenerateRequest) -> Conditioning:
        """Conditioning that depends on size or guidance, not on text; the same for both branches."""
        return {}

    # prepare

    def prepare(self, request: GenerateRequest, branches: tuple[Conditioning, ...]) -> Row:
        """Latent, scheduler and generator of one row; order of random draws as in the stock pipeline."""
        generator = torch.Generator("cpu").manual_seed(request.seed)
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        timesteps = self.set_timesteps(scheduler, request)
        extras = self.branch_extras(request)
        branches = tuple({**branch, **extras} for branch in branches)
        if request.init_image is None:
            latents = self.noise(request, generator)
            latents = latents * getattr(scheduler, "init_noise_sigma", 1.0)
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(0)
            return Row(request, branches, self.pack(latents), scheduler, timesteps, generator)
        return self._prepare_from_image(request, branches, scheduler, timesteps, generator)

    def set_timesteps(self, scheduler: Any, request: GenerateRequest) -> torch.Tensor:
        scheduler.set_timesteps(request.num_steps, device=self.device)
        return scheduler.timesteps

    def latent_shape(self, request: GenerateRequest) -> tuple[int, ...]:
        channels = self.vae.config.latent_channels
        return (1, channels, request.height_px // self.vae_px, request.width_px // self.vae_px)

    def noise(self, request: GenerateRequest, generator: torch.Generator) -> torch.Tensor:
        return randn_tensor(self.latent_shape(request), generator=generator, device=self.device, dtype=self.dtype)

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        """From the VAE's form to the denoiser's."""
        return latents

    def unpack(self, latents: torch.Tensor, request: GenerateRequest) -> torch.Tensor:
        return latents

    def _prepare_from_image(
        self,
        request: GenerateRequest,
        branches: tuple[Conditioning, ...],
        scheduler: Any,
        timesteps: torch.Tensor,
        generator: torch.Generator,
    ) -> Row:
        assert request.init_image is not None
        start = self.start_step(request) * getattr(scheduler, "order", 1)
        timesteps = timesteps[start:]
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(start)
        image_latents = self.encode_image(request.init_image, generator)
        noise = randn_tensor(image_latents.shape, generator=generator, device=self.device, dtype=self.dtype)
        if request.mask is not None and request.strength == 1.0:
            latents = noise * getattr(scheduler, "init_noise_sigma", 1.0)
        else:
            latents = self.add_noise(scheduler, image_latents, noise, timesteps[:1])
        row = Row(request, branches, self.pack(latents), scheduler, timesteps, generator)
        if request.mask is not None:
            row.inpaint = Inpaint(self._latent_mask(request.mask, image_latents), image_latents, noise)
        return row

    def start_step(self, request: GenerateRequest) -> int:
        return request.num_steps - min(int(request.num_steps * request.strength), request.num_steps)

    def add_noise(
        self, scheduler: Any, clean: torch.Tensor, noise: torch.Tensor, timestep: torch.Tensor
    ) -> torch.Tensor:
        return scheduler.add_noise(clean, noise, timestep)

    def encode_image(self, pixels: npt.NDArray[np.uint8], generator: torch.Generator) -> torch.Tensor:
        """[H, W, 3] uint8 to the VAE's latent [1, C, h, w], sampled from its distribution, scaled."""
        tensor = torch.from_numpy(pixels.astype(np.float32) / 255.0).permute(2, 0, 1)[None]
        tensor = (2.0 * tensor - 1.0).to(self.device, self.vae.dtype)
        latents = self.vae.encode(tensor).latent_dist.sample(generator)
        return ((latents - (self.vae.config.shift_factor or 0.0)) * self.vae.config.scaling_factor).to(self.dtype)

    def encode_mean(self, picture: torch.Tensor) -> torch.Tensor:
        """The VAE's own mean latent of [1, 3, H, W] in -1..1, as its decoder takes it."""
        frames = picture[:, :, None] if self.has_frame_axis else picture
        return self.vae.encode(frames).latent_dist.mode()

    def _latent_mask(self, mask: npt.NDArray[np.uint8], like: torch.Tensor) -> torch.Tensor:
        binary = torch.from_numpy((mask >= 128).astype(np.float32))[None, None]
        return torch.nn.functional.interpolate(binary, size=like.shape[-2:]).to(like)

    # denoise

    @abstractmethod
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, cond: Conditioning, request: GenerateRequest
    ) -> torch.Tensor:
        """The denoiser on a batch of branches: latents [B, ...], timestep [B], each of `cond` [B, ...].

        `request` is any of the batch's: only what the batch key holds may be read from it."""
        ...

    def guide(self, cond: torch.Tensor, uncond: torch.Tensor, request: GenerateRequest) -> torch.Tensor:
        return uncond + request.guidance_scale * (cond - uncond)

    def after_guidance(self, noise_pred: torch.Tensor) -> torch.Tensor:
        return noise_pred

    def advance(self, row: Row, noise_pred: torch.Tensor, *, keep_estimate: bool = False) -> None:
        """One scheduler step of one row; counts it."""
        timestep = row.timesteps[row.step]
        extra = {"generator": row.generator} if self._step_takes_generator else {}
        before, sigma = row.latents, _sigma(row)
        out = row.scheduler.step(noise_pred, timestep, row.latents, **extra)
        row.latents = out.prev_sample
        if keep_estimate:
            row.clean_estimate = _clean_estimate(out, before, noise_pred, sigma)
        if row.inpaint is not None:
            row.latents = self._put_back(row)
        row.step += 1

    def _put_back(self, row: Row) -> torch.Tensor:
        assert row.inpaint is not None
        kept = row.inpaint.image_latents
        if row.step + 1 < row.num_steps:
            kept = self.add_noise(row.scheduler, kept, row.inpaint.noise, row.timesteps[row.step + 1][None])
        return (1 - row.inpaint.mask) * kept + row.inpaint.mask * row.latents

    # decode

    def decode(self, row: Row) -> tuple[npt.NDArray[np.uint8], bool]:
        """The row's latent to [F, H, W, 3] uint8, and whether a safety checker blackened it."""
        latents = self.unpack(row.latents, row.request)
        return to_uint8(self.vae_decode(self.to_vae(latents).to(self.vae.dtype))), False

    def vae_decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(latents, return_dict=False)[0]

    def to_vae(self, latents: torch.Tensor) -> torch.Tensor:
        return latents / self.vae.config.scaling_factor + (self.vae.config.shift_factor or 0.0)


def to_uint8(image: torch.Tensor) -> npt.NDArray[np.uint8]:
    """[N, 3, H, W] or [1, 3, F, H, W] in -1..1 to [F, H, W, 3]; rounded as the stock post-processor does."""
    if image.dim() == 5:
        image = image[0].transpose(0, 1)
    pixels = (image * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().cpu().numpy()
    return (pixels * 255).round().astype(np.uint8)


def _sigma(row: Row) -> torch.Tensor | None:
    """The noise level of a flow-matching row before its next step; None for other schedulers."""
    config = row.scheduler.config
    is_flow = isinstance(row.scheduler, FlowMatchEulerDiscreteScheduler) or config.get("use_flow_sigmas", False)
    if not is_flow:
        return None
    return row.scheduler.sigmas[len(row.scheduler.sigmas) - 1 - row.num_steps + row.step]


def _clean_estimate(
    out: Any, before: torch.Tensor, noise_pred: torch.Tensor, sigma: torch.Tensor | None
) -> torch.Tensor:
    """What the latent is heading for: the scheduler's own estimate, else along the predicted direction."""
    estimate = getattr(out, "pred_original_sample", None)
    if estimate is not None:
        return estimate
    return out.prev_sample if sigma is None else before - sigma.to(before) * noise_pred

"""Stable Diffusion 1.x, 2.x and XL: a UNet with cross-attention, text from CLIP."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Conditioning, Row
from triptych.generate.request import GenerateRequest, Task


class StableDiffusion(Kind):
    """Follows `StableDiffusionPipeline`, its img2img and its (four-channel) inpaint sibling."""

    tasks = frozenset({Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT})
    default_num_steps = 50
    default_guidance_scale = 7.5

    @property
    def denoiser(self) -> Any:
        return self.pipeline.unet

    @property
    def latent_px(self) -> int:
        return self.vae_px * 2 ** (len(self.denoiser.config.block_out_channels) - 1)

    @property
    def is_distilled(self) -> bool:
        return self.denoiser.config.time_cond_proj_dim is not None

    def encode_text(self, text: str | None, *, is_negative: bool) -> Conditioning:
        embeds, _ = self.pipeline.encode_prompt(text or "", self.device, 1, False)
        return {"encoder_hidden_states": embeds}

    def branch_extras(self, request: GenerateRequest) -> Conditioning:
        if not self.is_distilled:
            return {}
        scale = torch.tensor([request.guidance_scale - 1])
        width = self.denoiser.config.time_cond_proj_dim
        return {"timestep_cond": self.pipeline.get_guidance_scale_embedding(scale, width).to(self.device, self.dtype)}

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, cond: Conditioning, request: GenerateRequest
    ) -> torch.Tensor:
        return self.denoiser(latents, timestep, **cond, return_dict=False)[0]

    def decode(self, row: Row) -> tuple[npt.NDArray[np.uint8], bool]:
        frames, _ = super().decode(row)
        checker = getattr(self.pipeline, "safety_checker", None)
        if checker is None:
            return frames, False
        picture = torch.from_numpy(frames.astype(np.float32) / 127.5 - 1.0).permute(0, 3, 1, 2).to(self.device)
        _, flags = self.pipeline.run_safety_checker(picture, self.device, self.dtype)
        flagged = bool(flags and flags[0])
        return (np.zeros_like(frames) if flagged else frames), flagged


class StableDiffusionXL(StableDiffusion):
    """Follows `StableDiffusionXLPipeline`: two text encoders, pooled text and sizes as added conditions."""

    default_guidance_scale = 5.0

    def encode_text(self, text: str | None, *, is_negative: bool) -> Conditioning:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            text or "", device=self.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        if is_negative and text is None and self.pipeline.config.force_zeros_for_empty_prompt:
            embeds, pooled = torch.zeros_like(embeds), torch.zeros_like(pooled)
        return {"encoder_hidden_states": embeds, "text_embeds": pooled}

    def branch_extras(self, request: GenerateRequest) -> Conditioning:
        size = (request.height_px, request.width_px)
        encoder = self.pipeline.text_encoder_2
        time_ids = self.pipeline._get_add_time_ids(
            size, (0, 0), size, dtype=self.dtype, text_encoder_projection_dim=encoder.config.projection_dim
        )
        return {**super().branch_extras(request), "time_ids": time_ids.to(self.device)}

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, cond: Conditioning, request: GenerateRequest
    ) -> torch.Tensor:
        added = {"text_embeds": cond["text_embeds"], "time_ids": cond["time_ids"]}
        rest: dict[str, Any] = {name: cond[name] for name in cond if name not in added}
        return self.denoiser(latents, timestep, **rest, added_cond_kwargs=added, return_dict=False)[0]

    def to_vae(self, latents: torch.Tensor) -> torch.Tensor:
        mean, std = getattr(self.vae.config, "latents_mean", None), getattr(self.vae.config, "latents_std", None)
        if mean is None or std is None:
            return latents / self.vae.config.scaling_factor
        by_channel = [torch.tensor(values).view(1, -1, 1, 1).to(latents) for values in (mean, std)]
        return latents * by_channel[1] / self.vae.config.scaling_factor + by_channel[0]

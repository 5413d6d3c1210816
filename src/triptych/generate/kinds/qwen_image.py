"""Qwen-Image: packed 2x2 latents, a two-stream transformer, text of any length from a language model."""

from __future__ import annotations

from typing import Any

import torch

from triptych.generate.kinds.flow import FlowKind
from triptych.generate.kinds.row import Conditioning
from triptych.generate.request import GenerateRequest


class QwenImage(FlowKind):
    """Follows `QwenImagePipeline` with true guidance; the prompt's own norm is kept after guidance."""

    default_num_steps = 50
    default_guidance_scale = 4.0
    has_frame_axis = True
    blocks = ("transformer_blocks",)

    @property
    def latent_px(self) -> int:
        return self.vae_px * 2

    @property
    def is_distilled(self) -> bool:
        return bool(self.denoiser.config.guidance_embeds)

    def default_size_px(self) -> tuple[int, int]:
        size_px = self.pipeline.default_sample_size * self.vae_px
        return size_px, size_px

    def encode_text(self, text: str | None, *, is_negative: bool) -> Conditioning:
        embeds, mask = self.pipeline.encode_prompt(prompt=text or " ", device=self.device)
        if mask is None:
            mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=self.device)
        return {"encoder_hidden_states": embeds, "encoder_hidden_states_mask": mask}

    def branch_extras(self, request: GenerateRequest) -> Conditioning:
        if not self.is_distilled:
            return {}
        return {"guidance": torch.tensor([request.guidance_scale], device=self.device, dtype=torch.float32)}

    def set_timesteps(self, scheduler: Any, request: GenerateRequest) -> torch.Tensor:
        return self.set_linear_sigmas(scheduler, request)

    def latent_shape(self, request: GenerateRequest) -> tuple[int, ...]:
        channels = self.denoiser.config.in_channels // 4
        return (1, 1, channels, request.height_px // self.vae_px, request.width_px // self.vae_px)

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        _, _, channels, height, width = latents.shape
        return self.pipeline._pack_latents(latents, 1, channels, height, width)

    def unpack(self, latents: torch.Tensor, request: GenerateRequest) -> torch.Tensor:
        return self.pipeline._unpack_latents(latents, request.height_px, request.width_px, self.vae_px)

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, cond: Conditioning, request: GenerateRequest
    ) -> torch.Tensor:
        shape = (1, request.height_px // self.latent_px, request.width_px // self.latent_px)
        mask = cond["encoder_hidden_states_mask"]
        return self.denoiser(
            hidden_states=latents,
            timestep=timestep.to(latents.dtype) / 1000,
            guidance=cond.get("guidance"),
            encoder_hidden_states=cond["encoder_hidden_states"],
            encoder_hidden_states_mask=None if bool(mask.all()) else mask,
            img_shapes=[[shape]] * latents.shape[0],
            return_dict=False,
        )[0]

    def modulated_input(self, block: Any, inputs: dict[str, Any]) -> torch.Tensor:
        shift, scale, _ = block.img_mod(inputs["temb"])[:, None].chunk(2, dim=-1)[0].chunk(3, dim=-1)
        return block.img_norm1(inputs["hidden_states"]) * (1 + scale) + shift

    def guide(self, cond: torch.Tensor, uncond: torch.Tensor, request: GenerateRequest) -> torch.Tensor:
        combined = uncond + request.guidance_scale * (cond - uncond)
        return combined * (cond.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def to_vae(self, latents: torch.Tensor) -> torch.Tensor:
        return denormalize(self.vae, latents)


def denormalize(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Undo the per-channel normalisation of a video VAE: [1, C, F, h, w]."""
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents)
    return latents / inverse_std + mean

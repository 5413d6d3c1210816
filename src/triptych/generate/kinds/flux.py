"""Flux: packed 2x2 latents, a transformer with guidance distilled into its weights."""

from __future__ import annotations

from typing import Any

import torch

from triptych.generate.kinds.flow import FlowKind
from triptych.generate.kinds.row import Conditioning
from triptych.generate.request import GenerateRequest, Task


class Flux(FlowKind):
    """Follows `FluxPipeline` and its img2img sibling. One branch: the guidance scale is an input of the model."""

    tasks = frozenset({Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE})
    default_guidance_scale = 3.5
    blocks = ("transformer_blocks", "single_transformer_blocks")

    @property
    def latent_px(self) -> int:
        return self.vae_px * 2

    @property
    def is_distilled(self) -> bool:
        return True

    def default_size_px(self) -> tuple[int, int]:
        size_px = self.pipeline.default_sample_size * self.vae_px
        return size_px, size_px

    def encode_text(self, text: str | None, *, is_negative: bool) -> Conditioning:
        embeds, pooled, _ = self.pipeline.encode_prompt(prompt=text or "", prompt_2=None, device=self.device)
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def branch_extras(self, request: GenerateRequest) -> Conditioning:
        if not self.denoiser.config.guidance_embeds:
            return {}
        return {"guidance": torch.tensor([request.guidance_scale], device=self.device, dtype=torch.float32)}

    def set_timesteps(self, scheduler: Any, request: GenerateRequest) -> torch.Tensor:
        if scheduler.config.get("use_flow_sigmas"):
            scheduler.set_timesteps(request.num_steps, device=self.device, mu=self.shift(scheduler, request))
            return scheduler.timesteps
        return self.set_linear_sigmas(scheduler, request)

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        return self.pipeline._pack_latents(latents, *latents.shape)

    def unpack(self, latents: torch.Tensor, request: GenerateRequest) -> torch.Tensor:
        return self.pipeline._unpack_latents(latents, request.height_px, request.width_px, self.vae_px)

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, cond: Conditioning, request: GenerateRequest
    ) -> torch.Tensor:
        rows, columns = request.height_px // self.latent_px, request.width_px // self.latent_px
        img_ids = self.pipeline._prepare_latent_image_ids(1, rows, columns, self.device, latents.dtype)
        txt_ids = torch.zeros(cond["encoder_hidden_states"].shape[1], 3, device=self.device, dtype=latents.dtype)
        return self.denoiser(
            hidden_states=latents,
            timestep=timestep.to(latents.dtype) / 1000,
            guidance=cond.get("guidance"),
            pooled_projections=cond["pooled_projections"],
            encoder_hidden_states=cond["encoder_hidden_states"],
            txt_ids=txt_ids,
            img_ids=img_ids,
            return_dict=False,
        )[0]

    def modulated_input(self, block: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return block.norm1(inputs["hidden_states"], emb=inputs["temb"])[0]

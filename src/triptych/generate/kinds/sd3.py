"""Stable Diffusion 3 and 3.5: a two-stream transformer, text from two CLIPs and a T5 (any may be missing)."""

from __future__ import annotations

from typing import Any

import torch

from triptych.generate.kinds.flow import FlowKind
from triptych.generate.kinds.row import Conditioning
from triptych.generate.request import GenerateRequest, Task


class StableDiffusion3(FlowKind):
    """Follows `StableDiffusion3Pipeline`, its img2img and its inpaint sibling."""

    tasks = frozenset({Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT})
    default_guidance_scale = 7.0
    max_shift = 1.16
    blocks = ("transformer_blocks",)

    @property
    def latent_px(self) -> int:
        return self.vae_px * self.denoiser.config.patch_size

    def encode_text(self, text: str | None, *, is_negative: bool) -> Conditioning:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            text or "", None, None, device=self.device, do_classifier_free_guidance=False
        )
        return {"encoder_hidden_states": embeds, "pooled_projections": pooled}

    def set_timesteps(self, scheduler: Any, request: GenerateRequest) -> torch.Tensor:
        dynamic = {"mu": self.shift(scheduler, request)} if scheduler.config.get("use_dynamic_shifting") else {}
        scheduler.set_timesteps(request.num_steps, device=self.device, **dynamic)
        return scheduler.timesteps

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, cond: Conditioning, request: GenerateRequest
    ) -> torch.Tensor:
        return self.denoiser(hidden_states=latents, timestep=timestep, **cond, return_dict=False)[0]

    def modulated_input(self, block: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return block.norm1(inputs["hidden_states"], emb=inputs["temb"])[0]

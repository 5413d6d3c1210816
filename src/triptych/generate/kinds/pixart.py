"""PixArt alpha and sigma: a transformer with cross-attention to masked T5 text."""

from __future__ import annotations

from typing import Any

import torch

from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Conditioning, without_padding
from triptych.generate.request import GenerateRequest, Task


class PixArt(Kind):
    """Follows `PixArtAlphaPipeline` and `PixArtSigmaPipeline`, without their binning of sizes. diffusers has no edits
    of this kind: a picture enters as it does in `StableDiffusionImg2ImgPipeline` and its inpaint sibling."""

    tasks = frozenset({Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT})
    default_num_steps = 20
    default_guidance_scale = 4.5
    blocks = ("transformer_blocks",)

    @property
    def denoiser(self) -> Any:
        return self.pipeline.transformer

    @property
    def latent_px(self) -> int:
        return self.vae_px * self.denoiser.config.patch_size

    def encode_text(self, text: str | None, *, is_negative: bool) -> Conditioning:
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            text or "", do_classifier_free_guidance=False, device=self.device, clean_caption=False
        )
        embeds, mask = without_padding(embeds, mask)
        return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}

    def branch_extras(self, request: GenerateRequest) -> Conditioning:
        if not self.denoiser.use_additional_conditions:
            return {}
        height, width = request.height_px, request.width_px
        return {
            "resolution": torch.tensor([[height, width]], device=self.device, dtype=self.dtype),
            "aspect_ratio": torch.tensor([[height / width]], device=self.device, dtype=self.dtype),
        }

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, cond: Conditioning, request: GenerateRequest
    ) -> torch.Tensor:
        predicted = self.denoiser(
            latents,
            encoder_hidden_states=cond["encoder_hidden_states"],
            encoder_attention_mask=cond["encoder_attention_mask"],
            timestep=timestep,
            added_cond_kwargs={name: cond.get(name) for name in ("resolution", "aspect_ratio")},
            return_dict=False,
        )[0]
        return predicted

    def modulated_input(self, block: Any, inputs: dict[str, Any]) -> torch.Tensor:
        hidden, timestep = inputs["hidden_states"], inputs["timestep"]
        table = block.scale_shift_table[None] + timestep.reshape(len(hidden), 6, -1)
        shift, scale = table[:, 0:1], table[:, 1:2]
        return block.norm1(hidden) * (1 + scale) + shift

    def after_guidance(self, noise_pred: torch.Tensor) -> torch.Tensor:
        """The second half of the channels is the learned variance, which no sampler here uses."""
        learned_variance = self.denoiser.config.out_channels // 2 == self.denoiser.config.in_channels
        return noise_pred.chunk(2, dim=1)[0] if learned_variance else noise_pred

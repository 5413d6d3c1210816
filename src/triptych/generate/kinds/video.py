"""Video: Wan 2.1 and LTX-Video, text to clip."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor

from triptych.core.errors import UnsupportedMedia
from triptych.generate.kinds.flow import FlowKind
from triptych.generate.kinds.qwen_image import denormalize
from triptych.generate.kinds.row import Conditioning, without_padding
from triptych.generate.request import GenerateRequest, Task


class Wan(FlowKind):
    """Follows `WanPipeline` of Wan 2.1: one transformer, float32 latents. Wan 2.2's two experts are not supported."""

    tasks = frozenset({Task.TEXT_TO_VIDEO})
    has_frame_axis = True
    default_num_steps = 50
    blocks = ("blocks",)

    def __init__(self, pipeline: Any, name: str) -> None:
        if pipeline.transformer_2 is not None or pipeline.config.expand_timesteps:
            raise UnsupportedMedia("Wan 2.2 folders (two transformers, or a timestep a token) are not supported")
        super().__init__(pipeline, name)

    @property
    def vae_px(self) -> int:
        return int(self.pipeline.vae_scale_factor_spatial)

    @property
    def latent_px(self) -> int:
        return self.vae_px * self.denoiser.config.patch_size[1]

    @property
    def frames_multiple(self) -> int:
        return int(self.pipeline.vae_scale_factor_temporal)

    def default_size_px(self) -> tuple[int, int]:
        return 832, 480

    def encode_text(self, text: str | None, *, is_negative: bool) -> Conditioning:
        embeds, _ = self.pipeline.encode_prompt(
            text or "", do_classifier_free_guidance=False, device=self.device, max_sequence_length=512
        )
        return {"encoder_hidden_states": embeds.to(self.dtype)}

    def latent_shape(self, request: GenerateRequest) -> tuple[int, ...]:
        frames = (request.num_frames - 1) // self.frames_multiple + 1
        channels = self.denoiser.config.in_channels
        return (1, channels, frames, request.height_px // self.vae_px, request.width_px // self.vae_px)

    def noise(self, request: GenerateRequest, generator: torch.Generator) -> torch.Tensor:
        return randn_tensor(self.latent_shape(request), generator=generator, device=self.device, dtype=torch.float32)

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, cond: Conditioning, request: GenerateRequest
    ) -> torch.Tensor:
        return self.denoiser(hidden_states=latents.to(self.dtype), timestep=timestep, **cond, return_dict=False)[0]

    def modulated_input(self, block: Any, inputs: dict[str, Any]) -> torch.Tensor:
        hidden = inputs["hidden_states"].float()
        table = block.scale_shift_table + inputs["temb"].float()  # [B, 6, D]
        return block.norm1(hidden) * (1 + table[:, 1:2]) + table[:, 0:1]

    def to_vae(self, latents: torch.Tensor) -> torch.Tensor:
        return denormalize(self.vae, latents)


class Ltx(FlowKind):
    """Follows `LTXPipeline`: packed latents, masked T5 text, rotary positions scaled by the frame rate."""

    tasks = frozenset({Task.TEXT_TO_VIDEO})
    has_frame_axis = True
    default_num_steps = 50
    default_guidance_scale = 3.0
    has_batched_rope = True
    frames_per_s = 25.0
    blocks = ("transformer_blocks",)

    @property
    def vae_px(self) -> int:
        return int(self.pipeline.vae_spatial_compression_ratio)

    @property
    def latent_px(self) -> int:
        return self.vae_px * self.pipeline.transformer_spatial_patch_size

    @property
    def frames_multiple(self) -> int:
        return int(self.pipeline.vae_temporal_compression_ratio)

    def default_size_px(self) -> tuple[int, int]:
        return 704, 512

    def encode_text(self, text: str | None, *, is_negative: bool) -> Conditioning:
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            text or "", do_classifier_free_guidance=False, device=self.device, max_sequence_length=128
        )
        embeds, mask = without_padding(embeds, mask)
        return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}

    def set_timesteps(self, scheduler: Any, request: GenerateRequest) -> torch.Tensor:
        return self.set_linear_sigmas(scheduler, request)

    def _latent_size(self, request: GenerateRequest) -> tuple[int, int, int]:
        frames = (request.num_frames - 1) // self.frames_multiple + 1
        return frames, request.height_px // self.vae_px, request.width_px // self.vae_px

    def latent_shape(self, request: GenerateRequest) -> tuple[int, ...]:
        return (1, self.denoiser.config.in_channels, *self._latent_size(request))

    def noise(self, request: GenerateRequest, generator: torch.Generator) -> torch.Tensor:
        return randn_tensor(self.latent_shape(request), generator=generator, device=self.device, dtype=torch.float32)

    def pack(self, latents: torch.Tensor) -> torch.Tensor:
        pipe = self.pipeline
        return pipe._pack_latents(latents, pipe.transformer_spatial_patch_size, pipe.transformer_temporal_patch_size)

    def unpack(self, latents: torch.Tensor, request: GenerateRequest) -> torch.Tensor:
        pipe = self.pipeline
        patches = (pipe.transformer_spatial_patch_size, pipe.transformer_temporal_patch_size)
        return pipe._unpack_latents(latents, *self._latent_size(request), *patches)

    def variant(self, request: GenerateRequest) -> str:
        return f"{request.frames_per_s:g}fps"

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, cond: Conditioning, request: GenerateRequest
    ) -> torch.Tensor:
        frames, height, width = self._latent_size(request)
        scale = (self.frames_multiple / request.frames_per_s, self.vae_px, self.vae_px)
        predicted = self.denoiser(
            hidden_states=latents.to(self.dtype),
            timestep=timestep,
            **cond,
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=scale,
            return_dict=False,
        )[0]
        return predicted.float()

    def modulated_input(self, block: Any, inputs: dict[str, Any]) -> torch.Tensor:
        temb, num_params = inputs["temb"], len(block.scale_shift_table)
        table = block.scale_shift_table[None, None] + temb.reshape(*temb.shape[:2], num_params, -1)
        return block.norm1(inputs["hidden_states"]) * (1 + table[:, :, 1]) + table[:, :, 0]

    def to_vae(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.vae
        return self.pipeline._denormalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)

    def vae_decode(self, latents: torch.Tensor) -> torch.Tensor:
        timestep = torch.zeros(1).to(latents) if self.vae.config.timestep_conditioning else None
        return self.vae.decode(latents, timestep, return_dict=False)[0]

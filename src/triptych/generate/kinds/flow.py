"""What transformer denoisers with flow matching share: sigmas, the resolution-dependent shift, and noising by scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from triptych.generate.kinds.base import Kind
from triptych.generate.request import GenerateRequest


class FlowKind(Kind):
    """A transformer with a flow-matching scheduler."""

    max_shift = 1.15

    @property
    def denoiser(self) -> Any:
        return self.pipeline.transformer

    def start_step(self, request: GenerateRequest) -> int:
        return int(max(request.num_steps - request.num_steps * request.strength, 0))

    def add_noise(
        self, scheduler: Any, clean: torch.Tensor, noise: torch.Tensor, timestep: torch.Tensor
    ) -> torch.Tensor:
        return scheduler.scale_noise(clean, timestep, noise)

    def set_linear_sigmas(self, scheduler: Any, request: GenerateRequest) -> torch.Tensor:
        """Timesteps from sigmas 1 to 1/steps, shifted by the number of latent positions."""
        sigmas = np.linspace(1.0, 1 / request.num_steps, request.num_steps)
        scheduler.set_timesteps(sigmas=sigmas, device=self.device, mu=self.shift(scheduler, request))
        return scheduler.timesteps

    def shift(self, scheduler: Any, request: GenerateRequest) -> float:
        config = scheduler.config
        low_tokens, high_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", self.max_shift)
        slope = (high - low) / (high_tokens - low_tokens)
        return self.branch_tokens(request) * slope + low - slope * low_tokens

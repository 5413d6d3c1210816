"""A served model small enough for any test: a random Llama and a tower of a few linear layers. Weights from a seed.

Its encoder can be told to be slow, to fail or to give NaN for one item, so that faults are tested on the real engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from triptych.core.media import Modality
from triptych.core.prepared import EncoderItem
from triptych.models.base import KvSpec, ModelInfo
from triptych.models.paged_attention import register
from triptych.models.served import StockModel

PATCH_WIDTH = 6
VOCAB_SIZE = 160


class ToyTower(nn.Module):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.project = nn.Linear(PATCH_WIDTH, width)
        self.layer_delay_s = 0.0
        self.num_calls = 0

    def forward(self, patches: torch.Tensor) -> torch.Tensor:  # [N, PATCH_WIDTH] -> [N, width]
        self.num_calls += 1
        hidden = self.project(patches)
        for layer in self.layers:
            if self.layer_delay_s:
                time.sleep(self.layer_delay_s)
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


class ToyModel(StockModel):
    """`features["patches"]` is [num_embeds, PATCH_WIDTH] float32; a first value of +inf raises, NaN passes through."""

    def __init__(self, *, seed: int = 0, max_tokens: int = 512, num_tower_layers: int = 4) -> None:
        register()
        generator_state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=max_tokens,
            initializer_range=0.3,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
        model = LlamaForCausalLM(config).eval()
        self.toy_tower = ToyTower(32, num_tower_layers).eval()
        torch.random.set_rng_state(generator_state)
        info = ModelInfo(
            architecture="ToyModel",
            revision=b"toy",
            hidden_size=32,
            embed_width=32,
            vocab_size=VOCAB_SIZE,
            max_tokens=max_tokens,
            kv=(KvSpec(2, 8),) * 2,
        )
        super().__init__(model, info)

    def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        patches = [self.feature(item, "patches") for item in items]
        if any(bool(torch.isinf(p).any()) for p in patches):
            raise RuntimeError("toy tower asked to fail")
        return list(self.toy_tower(torch.cat(patches)).split([len(p) for p in patches]))

    def encoder_layers(self) -> list[nn.Module]:
        return list(self.toy_tower.layers)


def toy_item(key: bytes, num_embeds: int, *, fill: float | None = None) -> EncoderItem:
    """An item whose patches follow from its key; `fill` (nan, inf) makes it a faulty one."""
    seed = int.from_bytes(key[:8].ljust(8, b"\0"), "little")
    patches = np.random.default_rng(seed).standard_normal((num_embeds, PATCH_WIDTH)).astype(np.float32)
    if fill is not None:
        patches[0, 0] = fill
    return EncoderItem(
        key=key,
        modality=Modality.IMAGE,
        num_embeds=num_embeds,
        features={"patches": patches},
        batch_key="toy",
        num_tokens_encoder=num_embeds,
        cost_flops=1e6 * num_embeds,
    )

"""Tiny random decoders of every kind the kernels serve, as served models, and packed steps to drive them."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from triptych.models.base import ModelInfo
from triptych.models.paged_attention import PagedKv, SequenceStep, build_batch, register
from triptych.models.served import StockModel, kv_specs

COMMON = dict(
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=157,
    max_position_embeddings=2048,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON))


def llama_with_biases() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON, attention_bias=True))


def mistral() -> PreTrainedModel:
    """A sliding window in every layer."""
    return MistralForCausalLM(MistralConfig(**COMMON, sliding_window=9))


def qwen2() -> PreTrainedModel:
    """Biases on q, k and v; a window in the last layer only."""
    config = Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=7, max_window_layers=2)
    return Qwen2ForCausalLM(config)


def qwen3() -> PreTrainedModel:
    """Norms on the heads of q and k."""
    return Qwen3ForCausalLM(Qwen3Config(**COMMON))


def smollm3() -> PreTrainedModel:
    """A layer without rotary positions."""
    return SmolLM3ForCausalLM(SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 1], use_cache=False))


def one_head_a_group() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON | dict(num_key_value_heads=6)))


def many_heads_a_group() -> PreTrainedModel:
    """More query heads for one key head than a tile has columns."""
    return LlamaForCausalLM(LlamaConfig(**COMMON | dict(num_attention_heads=24, num_key_value_heads=1, hidden_size=96)))


def wide_heads() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON | dict(head_dim=128)))


KINDS = [
    *(llama, llama_with_biases, mistral, qwen2, qwen3, smollm3),
    *(one_head_a_group, many_heads_a_group, wide_heads),
]


def serve(model: PreTrainedModel) -> StockModel:
    register()
    config = model.config
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)  # as drawn they are ones and zeros
    info = ModelInfo(
        architecture=type(model).__name__,
        revision=b"",
        hidden_size=config.hidden_size,
        embed_width=config.hidden_size,
        vocab_size=config.vocab_size,
        max_tokens=config.max_position_embeddings,
        kv=kv_specs(config),
    )
    return StockModel(model.eval(), info)


def pools(served: StockModel, num_blocks: int, block_size_tokens: int = 16) -> PagedKv:
    """Filled with noise: what a sequence did not write must not reach its result."""
    kv = PagedKv(
        served.info.kv,
        num_blocks=num_blocks,
        block_size_tokens=block_size_tokens,
        dtype=served.dtype,
        device=served.device,
    )
    for pool in (*kv.keys, *kv.values):
        pool.normal_(std=50.0)
    return kv


def run(served, kv: PagedKv, steps: list[SequenceStep], embeds: torch.Tensor) -> torch.Tensor:
    """Last hidden states [T, D] of one packed step."""
    positions = torch.cat([torch.arange(step.past, step.past + step.num_new) for step in steps])[None]
    return served.forward(embeds, positions, build_batch(kv, steps))


def noise(served, steps: list[SequenceStep]) -> torch.Tensor:
    rows = sum(step.num_new for step in steps)
    return torch.randn(rows, served.info.hidden_size).to(served.dtype)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, over all rows."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())

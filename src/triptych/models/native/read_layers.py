"""Read a stock decoder module: its sizes and weights if the kernels compute exactly this kind, else a refusal.

A kind of layer is served when its class is listed here and its parts look as expected: a new class, an odd activation
or an extra norm is refused, and the stock modules serve it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from triptych.models.native.build import NativeUnavailable
from triptych.models.native.pack import interleave_rows
from triptych.models.native.structs import KINDS

LAYER_CLASSES = frozenset(
    {
        "LlamaDecoderLayer",
        "MistralDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "SmolLM3DecoderLayer",
        "Qwen2VLDecoderLayer",
        "Qwen2_5_VLDecoderLayer",
        "Qwen3VLTextDecoderLayer",
    }
)
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer's weights as the stock module has them, joined where the kernel wants one product."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    has_rotary: bool
    window_tokens: int | None

    def products(self) -> tuple[torch.Tensor, ...]:
        """The matrices [N, K], in the order of a layer."""
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    activation: int
    eps: float
    scale: float
    dtype: torch.dtype


def read_sizes(language: Any) -> DecoderSizes:
    """Raises NativeUnavailable with the reason."""
    layers = list(language.layers)
    first = layers[0]
    attention, mlp = first.self_attn, first.mlp
    head_dim = int(attention.head_dim)
    sizes = DecoderSizes(
        hidden=attention.q_proj.in_features,
        heads=attention.q_proj.out_features // head_dim,
        kv_heads=attention.k_proj.out_features // head_dim,
        head_dim=head_dim,
        inner=mlp.gate_proj.out_features,
        activation=_activation(language.config),
        eps=_eps(first.input_layernorm),
        scale=float(attention.scaling),
        dtype=attention.q_proj.weight.dtype,
    )
    _check_sizes(sizes)
    return sizes


def check_kind(language: Any) -> None:
    """Refuse what is not exactly the kind the kernels compute. Raises NativeUnavailable."""
    parts = {name for name, _ in language.named_children()}
    _require({"layers", "norm", "rotary_emb"} <= parts, "the decoder has no layers, norm and rotary_emb")
    for layer in language.layers:
        name = type(layer).__name__
        _require(name in LAYER_CLASSES, f"layers of class {name} are not among the kernels' kinds")
        _require({n for n, _ in layer.named_children()} == LAYER_PARTS, f"a {name} has unexpected parts")
        _require({n for n, _ in layer.self_attn.named_children()} <= ATTENTION_PARTS, f"{name}'s attention is unusual")
        _require({n for n, _ in layer.mlp.named_children()} == MLP_PARTS, f"{name}'s MLP is unusual")
        for linear in _linears(layer):
            _require(
                type(linear) is nn.Linear, f"{name} has a {type(linear).__name__} where a plain Linear is expected"
            )
        _require(layer.mlp.gate_proj.bias is None, f"{name}'s MLP has biases")
    devices = {p.device.type for p in language.parameters()}
    _require(devices == {"cpu"}, f"the weights are on {', '.join(sorted(devices))}, the kernels are for the CPU")
    dtypes = {p.dtype for p in language.layers.parameters()}
    _require(len(dtypes) == 1 and dtypes <= KINDS.keys(), f"dtype {', '.join(map(str, dtypes))} is not served natively")


def read_layer(layer: Any) -> LayerParts:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [projection.bias for projection in projections]
    _require(len({bias is None for bias in biases}) == 1, "only some of q, k and v have a bias")
    q_norm = getattr(attention, "q_norm", None)
    k_norm = getattr(attention, "k_norm", None)
    return LayerParts(
        qkv=torch.cat([projection.weight for projection in projections]),
        qkv_bias=None if biases[0] is None else torch.cat(biases),
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        gate_up=interleave_rows(mlp.gate_proj.weight, mlp.up_proj.weight),
        down=mlp.down_proj.weight,
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        has_rotary=bool(getattr(attention, "use_rope", True)),
        window_tokens=_window(attention),
    )


def _window(attention: Any) -> int | None:
    """What the stock attention passes on as `sliding_window`: the module's own, or the config's (Mistral)."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    if type(attention).__name__ == "MistralAttention":
        return attention.config.sliding_window
    return None


def _linears(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def _activation(config: Any) -> int:
    name = str(getattr(config, "hidden_act", None))
    _require(name in ACTIVATIONS, f"activation {name!r} is not among the kernels'")
    return ACTIVATIONS[name]


def _eps(norm: Any) -> float:
    eps: Any = getattr(norm, "variance_epsilon", None)
    _require(eps is not None, f"norm {type(norm).__name__} has no variance_epsilon")
    return float(eps)


def _check_sizes(sizes: DecoderSizes) -> None:
    step = 16 if sizes.dtype == torch.float32 else 32
    for name in ("hidden", "inner", "head_dim"):
        value = getattr(sizes, name)
        _require(value % step == 0, f"{name} is {value}, not a multiple of {step} as {sizes.dtype} needs")
    _require(sizes.head_dim <= MAX_HEAD_DIM, f"head_dim is {sizes.head_dim}, above {MAX_HEAD_DIM}")
    _require(sizes.heads % sizes.kv_heads == 0, f"{sizes.heads} heads do not divide into {sizes.kv_heads}")


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise NativeUnavailable(reason)

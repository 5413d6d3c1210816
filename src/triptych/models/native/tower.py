"""The layers of a stock vision tower through the native kernels, one C call a layer.

Each layer module keeps its place and its hooks, so the tower pauses at layer edges as before; only its `forward` is
replaced. A call that the kernel does not serve (a mask, another dtype) goes to the stock forward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from triptych.models.native.build import NativeUnavailable, load_library
from triptych.models.native.pack import GROUP, PANEL, pack_pairs, pack_panels, pack_vector, pack_weight
from triptych.models.native.structs import (
    FLOATS,
    KINDS,
    PAIRS,
    PRODUCT_NAMES,
    TILES,
    EncoderShape,
    EncoderWeights,
    declare,
    raise_message,
)

LAYER_CLASSES = frozenset({"Idefics3EncoderLayer", "SmolVLMEncoderLayer", "SiglipEncoderLayer", "CLIPEncoderLayer"})
LAYER_PARTS = {"self_attn", "layer_norm1", "mlp", "layer_norm2"}
ACTIVATIONS = {"gelu_pytorch_tanh": 1, "quick_gelu": 2}
MAX_HEAD_DIM = 256
PACKS = {FLOATS: pack_panels, PAIRS: pack_pairs, TILES: pack_weight}
# Relative distance of the check's result from the stock layer's.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
CHECK_TOKENS = 45


class NativeTower:
    """Owner of the kernels' workspace and of the packed weights of all layers. One call at a time.

    With AMX a bfloat16 tower runs on tiles, with AVX512-BF16 on pairs. Any other runs in float32 inside, from weights
    kept in float32. `products` says less than the best that the CPU has.
    Heads and inner layers of other sizes (72 and 4304 in SigLIP So400m) are filled up with zeros.
    """

    def __init__(self, layers: Sequence[Any], *, products: int = TILES) -> None:
        """Raises NativeUnavailable. The layers are untouched until `install`."""
        self._library = declare(load_library())
        if not layers:
            raise NativeUnavailable("the model has no tower")
        self.dtype = next(layers[0].parameters()).dtype
        best = self._library.triptych_products() if self.dtype == torch.bfloat16 else FLOATS
        self.products = min(products, best)
        multiple = GROUP if self.products == TILES else PANEL
        for layer in layers:
            _check_layer(layer, self.dtype, multiple)
        self._layers = list(layers)
        self._alive: list[torch.Tensor] = []
        first = layers[0]
        attention, config = first.self_attn, first.self_attn.config
        self.hidden = first.mlp.fc1.in_features
        self._head_dim = _round_up(attention.head_dim, multiple)
        self._inner = _round_up(first.mlp.fc1.out_features, multiple)
        shape = EncoderShape(
            *(self.hidden, attention.num_heads, self._head_dim, self._inner),
            *(ACTIVATIONS[config.hidden_act], first.layer_norm1.eps, attention.scale),
        )
        with torch.inference_mode():
            self._weights = [self._pack(layer) for layer in layers]
        self._handle = self._library.triptych_encoder_new(ctypes.byref(shape), KINDS[self.dtype], self.products)
        if not self._handle:
            raise NativeUnavailable("no memory for the native tower")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.triptych_encoder_free(self._handle)

    @property
    def reason(self) -> str:
        """What computes, in one phrase."""
        inside = "float32" if self.products == FLOATS else "bfloat16"
        return f"{PRODUCT_NAMES[self.products]} kernels in {inside}"

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> the same; attention within each of the B pictures."""
        assert x.shape == (*x.shape[:2], self.hidden), x.shape
        assert x.dtype == self.dtype, x.dtype
        x = x.contiguous()
        out = torch.empty_like(x)
        message = self._library.triptych_encoder_layer(
            *(self._handle, ctypes.byref(self._weights[index]), x.data_ptr(), out.data_ptr()),
            *(x.shape[0], x.shape[1], torch.get_num_threads()),
        )
        raise_message(message)
        return out

    def install(self) -> None:
        """Check the first layer against the stock one, then take over all forwards. Raises NativeUnavailable."""
        first = self._layers[0]
        with torch.inference_mode():
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(2, CHECK_TOKENS, self.hidden, generator=generator).to(self.dtype)
            expected = first.forward(x, attention_mask=None)
            distance = float((self.layer(0, x) - expected).float().norm() / expected.float().norm())
        if not distance <= TOLERANCE[self.dtype]:
            raise NativeUnavailable(f"the tower's kernels differ from the stock layer by {distance:.3g}")
        for index, layer in enumerate(self._layers):
            layer.forward = self._forward(index, layer.forward)

    def _forward(self, index: int, stock: Any) -> Any:
        def forward(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **rest: Any) -> Any:
            is_served = attention_mask is None and hidden_states.dtype == self.dtype and hidden_states.dim() == 3
            if not is_served:
                return stock(hidden_states, attention_mask=attention_mask, **rest)
            return self.layer(index, hidden_states)

        return forward

    def _pack(self, layer: Any) -> EncoderWeights:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        norms = (layer.layer_norm1, layer.layer_norm2)
        keep, pack = self._keep, PACKS[self.products]
        return EncoderWeights(
            *(keep(pack_vector(vector)) for norm in norms for vector in (norm.weight, norm.bias)),
            keep(pack(torch.cat([self._fill_heads(p.weight, attention) for p in projections]))),
            keep(pack(self._fill_heads(attention.out_proj.weight.T, attention).T.contiguous())),
            keep(pack(_fill(mlp.fc1.weight, self._inner))),
            keep(pack(_fill(mlp.fc2.weight.T, self._inner).T.contiguous())),
            keep(pack_vector(torch.cat([self._fill_heads(p.bias, attention) for p in projections]))),
            keep(pack_vector(attention.out_proj.bias)),
            keep(pack_vector(_fill(mlp.fc1.bias, self._inner))),
            keep(pack_vector(mlp.fc2.bias)),
        )

    def _fill_heads(self, rows: torch.Tensor, attention: Any) -> torch.Tensor:
        """[heads * head_dim, ...] with zero rows after each head's own."""
        heads = rows.reshape(attention.num_heads, attention.head_dim, *rows.shape[1:])
        return torch.stack([_fill(head, self._head_dim) for head in heads]).flatten(0, 1)

    def _keep(self, tensor: torch.Tensor | None) -> int:
        assert tensor is not None
        self._alive.append(tensor)
        return tensor.data_ptr()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _fill(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """With zero rows at the end."""
    return torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])


def _check_layer(layer: Any, dtype: torch.dtype, multiple: int) -> None:
    name = type(layer).__name__
    _require(name in LAYER_CLASSES, f"tower layers of class {name} are not among the kernels' kinds")
    _require({n for n, _ in layer.named_children()} == LAYER_PARTS, f"a {name} has unexpected parts")
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, mlp.fc1, mlp.fc2]
    for linear in linears:
        _require(type(linear) is nn.Linear and linear.bias is not None, f"{name} has an unexpected projection")
    for norm in (layer.layer_norm1, layer.layer_norm2):
        _require(type(norm) is nn.LayerNorm and norm.elementwise_affine, f"{name} has an unexpected norm")
    parameters = list(layer.parameters())
    _require(all(p.device.type == "cpu" for p in parameters), "the tower is not on the CPU")
    _require(dtype in KINDS, f"the tower's kernels do not compute in {str(dtype).removeprefix('torch.')}")
    _require(all(p.dtype == dtype for p in parameters), "the tower's weights are of several types")
    _require(attention.config.hidden_act in ACTIVATIONS, f"tower activation {attention.config.hidden_act!r}")
    hidden = mlp.fc1.in_features
    _require(hidden % multiple == 0, f"the tower's width is {hidden}, not a multiple of {multiple}")
    _require(
        _round_up(attention.head_dim, multiple) <= MAX_HEAD_DIM,
        f"the tower's head_dim is {attention.head_dim}, above {MAX_HEAD_DIM}",
    )


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise NativeUnavailable(reason)

"""The language part of a served model through the native kernels: one C call a step, on the engine's own pools.

Holds a packed copy of the weights; the stock module keeps its own, for what the kernels do not serve. A float32 model
whose weights came from bfloat16 has them packed in that: a step reads half the bytes and computes the same.
"""

from __future__ import annotations

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from triptych.models.native.build import NativeUnavailable, load_library
from triptych.models.native.pack import GROUP, is_narrow, pack_vector, pack_weight
from triptych.models.native.read_layers import DecoderSizes, LayerParts, check_kind, read_layer, read_sizes
from triptych.models.native.structs import (
    FLOATS,
    KINDS,
    NARROW,
    TILES,
    DecoderShape,
    LayerWeights,
    Part,
    StepInput,
    declare,
    raise_message,
)
from triptych.models.paged_attention import PagedBatch, PagedKv, PrefillPart


class NativeDecoder:
    """Called from one thread at a time, under inference mode. `products` says less than the best that the CPU has."""

    def __init__(self, language: Any, *, products: int = TILES) -> None:
        """Raises NativeUnavailable: no compiler, or a kind of layer, size or dtype the kernels do not compute."""
        check_kind(language)
        self.sizes = read_sizes(language)
        self._library = declare(load_library())
        self._alive: list[torch.Tensor] = []  # what the kernels point into
        self._pools: WeakKeyDictionary[PagedKv, tuple[ctypes.Array, ctypes.Array]] = WeakKeyDictionary()
        with torch.inference_mode():
            parts = [read_layer(layer) for layer in language.layers]
            windows = {part.window_tokens for part in parts if part.window_tokens}
            if len(windows) > 1:
                raise NativeUnavailable(f"the layers have windows of {len(windows)} different sizes")
            self.window_tokens = windows.pop() if windows else None
            self.is_narrow = all(is_narrow(w) for part in parts for w in part.products())
            layers = (LayerWeights * len(parts))(*(self._pack_layer(part) for part in parts))
            shape = self._shape(len(parts), layers, self._keep(pack_vector(language.norm.weight)))
        kind = NARROW if self.is_narrow else KINDS[self.sizes.dtype]
        best = FLOATS if kind != KINDS[torch.bfloat16] else self._library.triptych_products()
        self.products = min(products, best)
        self._handle = self._library.triptych_decoder_new(ctypes.byref(shape), kind, self.products)
        if not self._handle:
            raise NativeUnavailable("no memory for the native decoder")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.triptych_decoder_free(self._handle)

    def forward(
        self,
        embeds: torch.Tensor,  # [T, D]
        cos: torch.Tensor,  # [T, head_dim] float32
        sin: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Last hidden state [T, D], after the final norm; keys and values go to the batch's pools."""
        sizes = self.sizes
        assert embeds.shape == (len(batch.write_slots), sizes.hidden), embeds.shape
        assert embeds.dtype == sizes.dtype, embeds.dtype
        assert cos.shape == sin.shape == (len(embeds), sizes.head_dim), cos.shape
        embeds, cos, sin = embeds.contiguous(), cos.contiguous(), sin.contiguous()
        out = torch.empty_like(embeds)
        keys, values = self._pools_of(batch.kv)
        reaches = [self._reach(part) for part in batch.prefill]
        parts = (Part * len(reaches))(
            *(
                Part(part.row, part.num_new, len(part.slots), 0, part.slots.data_ptr(), lo.data_ptr(), hi.data_ptr())
                for part, (lo, hi) in zip(batch.prefill, reaches, strict=True)
            )
        )
        step = StepInput(
            *(len(embeds), batch.num_decode, len(reaches), torch.get_num_threads()),
            *(batch.decode_slots.shape[1], batch.kv.block_size_tokens),
            *(batch.write_slots.data_ptr(), batch.decode_slots.data_ptr(), batch.decode_lengths.data_ptr()),
            parts,
            *(embeds.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()),
            *(keys, values),
        )
        raise_message(self._library.triptych_decoder_step(self._handle, ctypes.byref(step)))
        return out

    def _reach(self, part: PrefillPart) -> tuple[torch.Tensor, torch.Tensor]:
        """First [2, n] and last [n] key each new token sees; the second row of the first is under the window."""
        query = torch.arange(part.past, part.past + part.num_new, dtype=torch.int32)
        lo = torch.zeros(2, part.num_new, dtype=torch.int32)
        hi = query.clone()
        if self.window_tokens:
            lo[1] = (query - self.window_tokens + 1).clamp(min=0)
        for start, end in part.whole:
            inside = (query >= start) & (query < end)
            hi[inside] = end - 1
            lo[1, inside] = lo[1, inside].clamp(max=start)
        return lo, hi

    def _pools_of(self, kv: PagedKv) -> tuple[ctypes.Array, ctypes.Array]:
        if kv not in self._pools:
            sizes = self.sizes
            for pool in (*kv.keys, *kv.values):
                assert pool.is_contiguous()
                assert pool.dtype == sizes.dtype, pool.dtype
                assert pool.shape[1:] == (sizes.kv_heads, sizes.head_dim), pool.shape
            kind = ctypes.c_void_p * len(kv.keys)
            self._pools[kv] = (kind(*(k.data_ptr() for k in kv.keys)), kind(*(v.data_ptr() for v in kv.values)))
        return self._pools[kv]

    def _keep(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._alive.append(tensor)
        return tensor.data_ptr()

    def _pack_layer(self, part: LayerParts) -> LayerWeights:
        keep = self._keep
        return LayerWeights(
            *(keep(pack_vector(v)) for v in (part.input_norm, part.post_norm, part.q_norm, part.k_norm)),
            *(keep(pack_weight(w.bfloat16() if self.is_narrow else w)) for w in part.products()),
            *(keep(pack_vector(v)) for v in (part.qkv_bias, part.out_bias)),
            part.has_rotary,
            part.window_tokens or 0,
        )

    def _shape(self, num_layers: int, layers: ctypes.Array, final_norm: int | None) -> DecoderShape:
        s: DecoderSizes = self.sizes
        self._layers = layers
        return DecoderShape(
            *(num_layers, s.hidden, s.heads, s.kv_heads, s.head_dim, s.inner, s.activation),
            *(s.eps, s.scale, 0.0, final_norm, layers),
        )


class NativeLinear:
    """A linear layer with float32 output: the output head."""

    def __init__(self, linear: nn.Module, *, products: int = TILES) -> None:
        """Raises NativeUnavailable."""
        if type(linear) is not nn.Linear or linear.weight.device.type != "cpu" or linear.weight.dtype not in KINDS:
            raise NativeUnavailable(f"the head is a {type(linear).__name__} the kernels do not compute")
        self._library = declare(load_library())
        self.columns, self.width = linear.weight.shape
        if self.width % 32:
            raise NativeUnavailable(f"the head's width is {self.width}, not a multiple of 32")
        with torch.inference_mode():
            narrow = is_narrow(linear.weight)
            self._weight = pack_weight(linear.weight.bfloat16() if narrow else linear.weight)
            self._bias = pack_vector(linear.bias)
        self._dtype = linear.weight.dtype
        self._kind = NARROW if narrow else KINDS[self._dtype]
        self._products = min(products, self._library.triptych_products())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, K] -> [N, columns] float32."""
        assert x.shape == (len(x), self.width), x.shape
        assert x.dtype == self._dtype, x.dtype
        out = torch.empty(len(x), self.columns)
        bias = None if self._bias is None else self._bias.data_ptr()
        if len(x):
            message = self._library.triptych_linear(
                *(x.contiguous().data_ptr(), len(x), self.width, self._weight.data_ptr(), bias, self.columns),
                *(-(-self.columns // GROUP) * GROUP, out.data_ptr(), self._kind, self._products),
                torch.get_num_threads(),
            )
            raise_message(message)
        return out

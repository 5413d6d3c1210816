"""The C structures and functions of `src/`, for ctypes. Field for field as declared there."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p

import torch

KINDS = {torch.float32: 0, torch.bfloat16: 1}
FLOATS, PAIRS, TILES = range(3)  # how bfloat16 is multiplied: widened, by AVX512-BF16, by AMX
PRODUCT_NAMES = ("portable", "AVX512-BF16", "AMX")
NARROW = 2  # float32 throughout, from weights kept in bfloat16


class LayerWeights(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("qkv_bias", "out_bias")),
        ("has_rotary", c_int32),
        ("window", c_int32),
    ]


class DecoderShape(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "activation")),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
        ("final_norm", c_void_p),
        ("layers", POINTER(LayerWeights)),
    ]


class Part(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("row", "num_new", "num_keys", "padding")),
        *((name, c_void_p) for name in ("slots", "lo", "hi")),
    ]


class StepInput(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("rows", "num_decode", "num_parts", "threads")),
        *((name, c_int64) for name in ("decode_width", "block_size")),
        *((name, c_void_p) for name in ("write_slots", "decode_slots", "decode_lengths")),
        ("parts", POINTER(Part)),
        *((name, c_void_p) for name in ("embeds", "cos", "sin", "out")),
        *((name, POINTER(c_void_p)) for name in ("keys", "values")),
    ]


class EncoderWeights(Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            *("norm1", "norm1_bias", "norm2", "norm2_bias", "qkv", "out", "fc1", "fc2"),
            *("qkv_bias", "out_bias", "fc1_bias", "fc2_bias"),
        )
    ]


class EncoderShape(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("hidden", "heads", "head_dim", "inner", "activation")),
        *((name, c_float) for name in ("eps", "scale")),
    ]


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give the library's functions their types."""
    library.triptych_products.restype = c_int32
    library.triptych_products.argtypes = []
    library.triptych_decoder_new.restype = c_void_p
    library.triptych_decoder_new.argtypes = [POINTER(DecoderShape), c_int32, c_int32]
    library.triptych_decoder_free.restype = None
    library.triptych_decoder_free.argtypes = [c_void_p]
    library.triptych_decoder_step.restype = c_char_p
    library.triptych_decoder_step.argtypes = [c_void_p, POINTER(StepInput)]
    library.triptych_linear.restype = c_char_p
    library.triptych_linear.argtypes = [
        *(c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p),
        *(c_int32, c_int32, c_int32),
    ]
    library.triptych_encoder_new.restype = c_void_p
    library.triptych_encoder_new.argtypes = [POINTER(EncoderShape), c_int32, c_int32]
    library.triptych_encoder_free.restype = None
    library.triptych_encoder_free.argtypes = [c_void_p]
    library.triptych_encoder_layer.restype = c_char_p
    library.triptych_encoder_layer.argtypes = [
        *(c_void_p, POINTER(EncoderWeights), c_void_p, c_void_p, c_int32, c_int32, c_int32)
    ]
    return library


def raise_message(message: bytes | None) -> None:
    """The kernels' word on what went wrong, as an exception."""
    if message:
        raise RuntimeError(f"native kernel: {message.decode(errors='replace')}")

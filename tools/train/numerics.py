"""The number format of a training pass: bfloat16 where the CPU multiplies it in hardware, else float32.

A CPU with AVX2 alone does bfloat16 products at a fiftieth of its float32 rate; one with AMX, at five times that rate.
"""

from __future__ import annotations

import torch

FAST_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
PASS_DTYPE = torch.bfloat16 if FAST_BF16 else torch.float32


def autocast():
    return torch.autocast("cpu", torch.bfloat16, enabled=FAST_BF16)

"""One 512x512 tile through the SmolVLM-256M vision tower: native layers against the stock ones, in one run.

    .venv/bin/python bench/encoder.py [--pictures 1] [--rounds 6] [--dtype float32]

Random weights. Both towers take turns, so that other load meets both alike; the best round of each counts.
"""

from __future__ import annotations

import argparse
import copy
import json
import time

import torch
from transformers import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

from triptych.models.native.tower import NativeTower

CONFIG = dict(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    image_size=512,
    patch_size=16,
)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    stock = Idefics3VisionTransformer(Idefics3VisionConfig(**CONFIG)).to(dtype).eval()
    native = copy.deepcopy(stock)
    NativeTower(list(native.encoder.layers)).install()
    towers = {"stock": stock, "native": native}
    pixels = torch.randn(args.pictures, 3, 512, 512).to(dtype)
    with torch.inference_mode():
        outputs = {name: tower(pixel_values=pixels).last_hidden_state.float() for name, tower in towers.items()}
        best = dict.fromkeys(towers, float("inf"))
        for _ in range(args.rounds):
            for name, tower in towers.items():
                start = time.perf_counter()
                tower(pixel_values=pixels)
                best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    difference = float((outputs["native"] - outputs["stock"]).norm() / outputs["stock"].norm())
    result = {"pictures": args.pictures, "threads": args.threads, "difference": difference}
    print(json.dumps(result | {f"{name}_ms": round(value, 1) for name, value in best.items()}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    main()

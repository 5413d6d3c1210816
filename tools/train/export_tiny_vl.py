"""Writes the weights of training runs into the tiny-vl folder: bfloat16 safetensors, loadable by stock transformers.

    python tools/train/export_tiny_vl.py src/triptych/zoo/tiny-vl [DIR/s21393.pt ...] DIR/last.pt

Of several checkpoints the mean is written (`--shares` weighs them): each the end of a run whose rate fell, of one line
of training. The training-only heads of the last go beside this file, so that a later run can go on from the committed
weights alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_vl_folder import write_folder
from tiny_vl_model import make_model
from transformers import GenerationConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--shares", type=float, nargs="+", help="one for each checkpoint  [the same]")
    args = parser.parse_args()
    folder, shares = args.folder, args.shares or [1.0] * len(args.checkpoints)
    if len(shares) != len(args.checkpoints):
        parser.error(f"{len(shares)} shares for {len(args.checkpoints)} checkpoints")
    states = [torch.load(path, weights_only=True, mmap=True) for path in args.checkpoints]
    if not (folder / "tokenizer.json").exists():
        write_folder(folder)
    model = make_model()
    model.load_state_dict(mean([state["mean"] for state in states], [share / sum(shares) for share in shares]))
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    heads = {name: weight.to(torch.bfloat16).contiguous() for name, weight in states[-1]["heads"].items()}
    save_file(heads, Path(__file__).parent / "tiny_vl_heads.safetensors", metadata={"step": str(states[-1]["step"])})
    size_bytes = (folder / "model.safetensors").stat().st_size
    print(f"step {', '.join(str(state['step']) for state in states)}: {size_bytes / 1e6:.1f} MB")


def mean(weights: list[dict[str, torch.Tensor]], shares: list[float]) -> dict[str, torch.Tensor]:
    """Weights are averaged: https://arxiv.org/abs/2203.05482."""
    return {name: sum(share * own[name] for share, own in zip(shares, weights, strict=True)) for name in weights[0]}


if __name__ == "__main__":
    main()

"""Writes the weights of a training run into the tiny-vl folder: bfloat16 safetensors, loadable by stock transformers.

    python tools/train/export_tiny_vl.py DIR/last.pt src/triptych/zoo/tiny-vl

The training-only heads go beside this file, so that a later run can go on from the committed weights alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_vl_folder import write_folder
from tiny_vl_model import make_model
from transformers import GenerationConfig


def main() -> None:
    checkpoint, folder = Path(sys.argv[1]), Path(sys.argv[2])
    state = torch.load(checkpoint, weights_only=True)
    if not (folder / "tokenizer.json").exists():
        write_folder(folder)
    model = make_model()
    model.load_state_dict(state.get("mean", state["model"]))
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    heads = {name: weight.to(torch.bfloat16).contiguous() for name, weight in state["heads"].items()}
    save_file(heads, Path(__file__).parent / "tiny_vl_heads.safetensors", metadata={"step": str(state["step"])})
    size_bytes = (folder / "model.safetensors").stat().st_size
    print(f"step {state['step']}: {size_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

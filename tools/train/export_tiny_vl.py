"""Writes the weights of a training run into the tiny-vl folder: bfloat16 safetensors, loadable by stock transformers.

python tools/train/export_tiny_vl.py DIR/last.pt src/triptych/zoo/tiny-vl
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_vl_folder import write_folder
from tiny_vl_model import make_model


def main() -> None:
    checkpoint, folder = Path(sys.argv[1]), Path(sys.argv[2])
    state = torch.load(checkpoint, weights_only=True)
    if not (folder / "tokenizer.json").exists():
        write_folder(folder)
    model = make_model()
    model.load_state_dict(state.get("mean", state["model"]))
    model.generation_config = None
    model.to(torch.bfloat16).save_pretrained(folder)
    size_bytes = (folder / "model.safetensors").stat().st_size
    print(f"step {state['step']}: {size_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

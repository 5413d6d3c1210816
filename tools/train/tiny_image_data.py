"""tiny-image's training set: prompts of the drawn world with the latents of pictures that show them.

    python tools/train/tiny_image_data.py --out DIR --seed 0 64x64=12000 96x64=2000

Each size becomes `DIR/latents/SEED-WxH.npz` (plain arrays). A prompt is kept as its seed and worded anew each time.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from numerics import autocast
from tiny_image_places import TOKEN_PX, draw_fields, lay_out_by, noise_with

from triptych.testing.prompts import Prompt, invent_prompt, say
from triptych.testing.scene_paint import COLOURS, SHAPES
from triptych.testing.scenes import Scene

DROPPED = 0.1  # of the prompts, so that guidance has its other branch
_COLOURS, _SHAPES = list(COLOURS), list(SHAPES)


@dataclass(frozen=True, slots=True)
class Batch:
    texts: list[str]
    prompts: list[Prompt | None]  # what the texts say; None where the text was dropped
    latents: torch.Tensor  # [B, C, h, w] float32
    noise: torch.Tensor  # [B, C, h, w] float32, that the latents are to come of
    colours: torch.Tensor  # [B, h * w] int64, 0 is the background
    shapes: torch.Tensor  # [B, h * w] int64


class Bucket:
    """All pictures of one size."""

    def __init__(self, paths: list[Path], max_objects: int) -> None:
        loaded = [np.load(path, allow_pickle=False) for path in paths]
        self.latents, self.fields, self.colours, self.shapes, seeds = (
            np.concatenate([arrays[name] for arrays in loaded])
            for name in ("latents", "fields", "colours", "shapes", "seeds")
        )
        self.prompts = [prompt_of(int(seed)) for seed in seeds]
        self.usable = [index for index, prompt in enumerate(self.prompts) if prompt.num_objects <= max_objects]

    def __len__(self) -> int:
        return len(self.usable)

    def draw(self, rng: random.Random, num: int) -> Batch:
        chosen = [rng.choice(self.usable) for _ in range(num)]
        prompts = [None if rng.random() < DROPPED else self.prompts[index] for index in chosen]
        texts = [say(prompt, rng) if prompt else "" for prompt in prompts]
        latents, fields, colours, shapes = (
            torch.from_numpy(array[chosen]) for array in (self.latents, self.fields, self.colours, self.shapes)
        )
        noise = noise_with(fields.float(), latents.shape[1])
        return Batch(texts, prompts, latents.float(), noise, colours.long(), shapes.long())


def load_buckets(folder: Path, max_objects: int, max_px: int) -> dict[tuple[int, int], Bucket]:
    """By size in pixels; no side is above `max_px`."""
    paths: dict[tuple[int, int], list[Path]] = {}
    for path in sorted(folder.glob("*.npz")):
        width, height = map(int, path.stem.split("-")[1].split("x"))
        if max(width, height) <= max_px:
            paths.setdefault((width, height), []).append(path)
    return {size_px: Bucket(files, max_objects) for size_px, files in paths.items()}


def prompt_of(seed: int) -> Prompt:
    return invent_prompt(random.Random(seed), held_out=False)


def label_maps(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """What lies under each token, [h * w] uint8 each: 1 + index of colour, of shape; 0 for the ground."""
    columns = (np.arange(scene.width_px // TOKEN_PX) + 0.5) * TOKEN_PX
    rows = (np.arange(scene.height_px // TOKEN_PX) + 0.5) * TOKEN_PX
    colours, shapes = np.zeros((2, len(rows), len(columns)), np.uint8)
    for thing in scene.objects:
        covered = np.hypot(columns - thing.x_px, rows[:, None] - thing.y_px) < thing.radius_px + 0.25 * TOKEN_PX
        colours[covered] = 1 + _COLOURS.index(thing.colour)
        shapes[covered] = 1 + _SHAPES.index(thing.shape)
    return colours.ravel(), shapes.ravel()


def draw_scenes(first_seed: int, size_px: tuple[int, int], num: int):
    """(seed, scene, fields of the noise that is to become it) of training prompts."""
    for seed in range(first_seed, first_seed + num):
        fields = draw_fields(seed, size_px)
        yield seed, lay_out_by(fields, prompt_of(seed)), fields.astype(np.float16)


@torch.inference_mode()
def make(vae: AutoencoderKL, first_seed: int, size_px: tuple[int, int], num: int) -> dict[str, np.ndarray]:
    latents, maps, seeds, noises, pictures = [], [], [], [], []
    for seed, scene, fields in draw_scenes(first_seed, size_px, num):
        seeds.append(seed)
        noises.append(fields)
        maps.append(label_maps(scene))
        pictures.append(np.asarray(scene.image))
        if len(pictures) == 32 or len(seeds) == num:
            pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
            with autocast():
                latents.append(vae.encode(pixels).latent_dist.mean.half().numpy())
            pictures.clear()
    colours, shapes = (np.stack(arrays) for arrays in zip(*maps, strict=True))
    arrays = dict(colours=colours, shapes=shapes, fields=np.stack(noises), seeds=np.array(seeds))
    return arrays | dict(latents=np.concatenate(latents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="another number, other pictures")
    parser.add_argument("sizes", nargs="+", help="WxH=NUMBER")
    args = parser.parse_args()
    torch.set_num_threads(1)
    vae = AutoencoderKL.from_pretrained(args.out / "vae").eval()
    (args.out / "latents").mkdir(exist_ok=True)
    for number, item in enumerate(args.sizes):
        size, num = item.split("=")
        width, height = map(int, size.split("x"))
        start = time.time()
        arrays = make(vae, 10_000_000 * args.seed + 1_000_000 * number, (width, height), int(num))
        np.savez(args.out / "latents" / f"{args.seed}-{size}.npz", **arrays)
        deviation = arrays["latents"].astype(np.float32).std()
        print(f"{size}: {num} in {time.time() - start:.0f} s, deviation {deviation:.2f}", flush=True)


if __name__ == "__main__":
    main()

"""Stage one of tiny-vl: the vision tower alone learns what has its centre where (dense targets, no language).

python tools/train/tiny_vl_tower.py --out DIR --minutes 12
"""

from __future__ import annotations

import argparse
import math
import multiprocessing as mp
import random
import time
from pathlib import Path

import numpy as np
import torch
from numerics import autocast
from tiny_vl_heads import DenseHeads
from tiny_vl_model import encode, make_model
from tiny_vl_optim import choose_threads, make_optimizers
from tiny_vl_targets import NUM_CHARS, NUM_COLOURS, NUM_SHAPES, stack_targets

from triptych.testing.scene_text import FACES
from triptych.testing.scenes import draw_scene

BATCH_TOKENS = 512  # merged visual tokens in a batch, whatever the picture size
LR = 3e-3


def tower_batch(rng: random.Random, faces: tuple[str, ...] | None) -> tuple[np.ndarray, ...]:
    """Pictures of one size; half of the batches are as full of words as they will go."""
    longest = rng.choice((4, 5, 6, 8, 10, 12, 12, 18))
    gh, gw = rng.randint(3, longest), rng.randint(3, longest)
    is_written = rng.random() < 0.5
    num_words = (gh, gh, 2 * gh) if is_written else (0, 1, 2, 3, 4, 6)
    num_objects = (0, 1, 2) if is_written else (None, None, 5, 8)
    scenes = [
        draw_scene(rng, (gw * 28, gh * 28), rng.choice(num_objects), rng.choice(num_words), faces=faces)
        for _ in range(max(2, BATCH_TOKENS // (gh * gw)))
    ]
    return (np.stack([np.asarray(scene.image) for scene in scenes])[:, None], *stack_targets(scenes))


def feed(queue, seed: int, faces) -> None:
    rng = random.Random(seed)
    while True:
        queue.put(tower_batch(rng, faces))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faces", nargs="*", default=())
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(2)
    model = make_model()
    heads = DenseHeads(192, NUM_SHAPES, NUM_COLOURS, NUM_CHARS)
    step = 0
    if (args.out / "tower.pt").exists():
        state = torch.load(args.out / "tower.pt", weights_only=True)
        model.load_state_dict(state["model"])
        heads.load_state_dict(state["heads"])
        step = state["tower_steps"]
    queue = mp.Queue(maxsize=4)
    worker = mp.Process(target=feed, args=(queue, args.seed + 100 + step, FACES * 2 + tuple(args.faces)), daemon=True)
    worker.start()
    params = [*model.model.visual.parameters(), *heads.parameters()]
    optimizers = make_optimizers(model, heads, LR)
    start, first, seen = time.time(), step, []
    while (done := (time.time() - start) / 60 / args.minutes) < 1:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = LR * min(1, (step - first + 1) / 20) * (0.65 + 0.35 * math.cos(math.pi * done))
        if step % 5 == 0:
            torch.set_num_threads(choose_threads())
        frames, *targets = (torch.from_numpy(part) for part in queue.get())
        with autocast():
            losses = heads.vision_loss(encode(model.model.visual, frames), *targets)
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        seen.append([loss.item() for loss in losses])
        if step % 25 == 0:
            means = " ".join(f"{mean:.4f}" for mean in np.nanmean(seen[-25:], 0))
            rate = (time.time() - start) / (step - first)
            print(f"{step} {rate:.2f} s/step, colour shape char shapes chars {means}", flush=True)
        if step % 50 == 0:
            save(args.out, model, heads, step)
    save(args.out, model, heads, step)


def save(out: Path, model, heads, step: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"model": model.state_dict(), "heads": heads.state_dict(), "step": 0, "tower_steps": step}, out / "tower.tmp"
    )
    (out / "tower.tmp").rename(out / "tower.pt")


if __name__ == "__main__":
    main()

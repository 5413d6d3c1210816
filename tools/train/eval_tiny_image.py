"""How often tiny-image draws a held-out prompt rightly, by kind of prompt, through the stock diffusers pipeline.

    python tools/train/eval_tiny_image.py [--num 100] [--size 64x64] [--steps 20] [--guidance 2] [--ask 3]

Judged by measured pixels (`triptych.testing.judge`): right means count, colours, shapes, background and relation. With
`--ask`, tiny-vl is asked about the drawings too, and the same of painted pictures of the same prompts: what it answers
there says how far it can be trusted here.
"""

from __future__ import annotations

import argparse
import logging
import random
from pathlib import Path

import numpy as np
import torch
from diffusers import PixArtAlphaPipeline
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from tiny_image_model import GUIDANCE

from triptych.testing.judge import Verdict, look, verdict
from triptych.testing.prompts import Prompt, invent_prompt, lay_out
from triptych.testing.scene_questions import questions
from triptych.zoo.reference import Ask, Reference

FOLDER = Path(__file__).parents[2] / "src/triptych/zoo/tiny-image"
TINY_VL = FOLDER.with_name("tiny-vl")
ASKED = ("count", "total", "color", "shape", "exists", "background")
SIZES = {"small", "large", "big", "little", "tiny", "huge"}
ASPECTS = ("counts", "colours", "shapes", "background", "relation")
BATCH = 16


def load(folder: Path = FOLDER) -> PixArtAlphaPipeline:
    diffusers_logging.disable_progress_bar()
    pipeline = PixArtAlphaPipeline.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(
    pipeline: PixArtAlphaPipeline,
    texts: list[str],
    *,
    size_px: tuple[int, int] = (64, 64),
    num_steps: int = 20,
    guidance: float = GUIDANCE,
    first_seed: int = 0,
) -> list[Image.Image]:
    """One picture a text, the seeds counting up from the first."""
    pictures: list[Image.Image] = []
    for start in range(0, len(texts), BATCH):
        chosen = texts[start : start + BATCH]
        seeds = range(first_seed + start, first_seed + start + len(chosen))
        pictures += pipeline(
            chosen,
            width=size_px[0],
            height=size_px[1],
            num_inference_steps=num_steps,
            guidance_scale=guidance,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            use_resolution_binning=False,
            clean_caption=False,
        ).images
    return pictures


def held_out(num: int, seed: int = 2024) -> list[Prompt]:
    rng = random.Random(seed)
    return [invent_prompt(rng, held_out=True) for _ in range(num)]


def table(prompts: list[Prompt], verdicts: list[Verdict]) -> str:
    """A line for each kind of prompt: how many, and the shares that are right."""
    kinds: dict[str, list[Verdict]] = {}
    for prompt, found in zip(prompts, verdicts, strict=True):
        kinds.setdefault(prompt.kind, []).append(found)
    lines = [f"{'kind':22}{'n':>5}{'right':>8}" + "".join(f"{aspect:>12}" for aspect in ASPECTS)]
    for kind, found in [*sorted(kinds.items()), ("all", verdicts)]:
        shares = "".join(f"{np.mean([getattr(one, aspect) for one in found]):12.2f}" for aspect in ASPECTS)
        lines.append(f"{kind:22}{len(found):5}{np.mean([one.is_right for one in found]):8.2f}{shares}")
    return "\n".join(lines)


def ask_tiny_vl(prompts: list[Prompt], pictures: list[Image.Image], num: int) -> str:
    """By kind of question: how many, the share that tiny-vl answers as the prompt has it, of painted pictures and of
    the drawn ones; `num` questions a prompt, none of which hangs on places or sizes."""
    asked: list[tuple[str, str, Ask, Ask]] = []  # kind, answer, of the painted picture, of the drawn one
    for index, (prompt, picture) in enumerate(zip(prompts, pictures, strict=True)):
        rng = random.Random(index)
        painted = lay_out(rng, prompt, picture.size)
        for question in questions(painted, rng, num, ASKED):
            if not SIZES.intersection(question.text.lower().split()):
                asks = (Ask(question.text, [one]) for one in (painted.image, picture))
                asked.append((question.kind, question.answer, *asks))
    model = Reference(TINY_VL)
    columns = []
    for which in (2, 3):
        answers = [
            answer
            for start in range(0, len(asked), BATCH)
            for answer in model.answers([one[which] for one in asked[start : start + BATCH]])
        ]
        columns.append([answer == one[1] for answer, one in zip(answers, asked, strict=True)])
    lines = [f"{'asked of tiny-vl':22}{'n':>5}{'painted':>9}{'drawn':>7}"]
    for kind in (*sorted({one[0] for one in asked}), None):
        chosen = [index for index, one in enumerate(asked) if kind in (None, one[0])]
        shares = [np.mean([rights[index] for index in chosen]) for rights in columns]
        lines.append(f"{kind or 'all':22}{len(chosen):5}{shares[0]:9.2f}{shares[1]:7.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--max-objects", type=int, default=5, help="leave out prompts that ask for more")
    parser.add_argument("--size", default="64x64", help="WxH in pixels")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--ask", type=int, default=0, help="so many questions to tiny-vl about each picture")
    args = parser.parse_args()
    logging.captureWarnings(True)
    width, height = map(int, args.size.split("x"))
    prompts = [prompt for prompt in held_out(20 * args.num) if prompt.num_objects <= args.max_objects][: args.num]
    texts = [str(prompt) for prompt in prompts]
    pictures = draw(load(args.folder), texts, size_px=(width, height), num_steps=args.steps, guidance=args.guidance)
    verdicts = [verdict(prompt, look(picture)) for prompt, picture in zip(prompts, pictures, strict=True)]
    print(f"tiny-image, {args.size} px, {args.steps} steps, guidance {args.guidance:g}, {args.num} held-out prompts")
    print(table(prompts, verdicts))
    if args.ask:
        print(ask_tiny_vl(prompts, pictures, args.ask))


if __name__ == "__main__":
    main()

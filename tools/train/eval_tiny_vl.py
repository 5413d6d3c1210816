"""Accuracy of tiny-vl on held-out scenes by kind of question, through stock transformers, answers decoded greedily.

    python tools/train/eval_tiny_vl.py [--folder src/triptych/zoo/tiny-vl] [--questions 1200] [--dtype float32]

An answer counts when it is the expected one to the letter. Pictures are of many sizes; a table by picture size follows.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from pathlib import Path

import torch

from triptych.testing.scene_clips import clip_questions, draw_clip
from triptych.testing.scene_pairs import draw_pair, pair_questions
from triptych.testing.scene_questions import questions
from triptych.testing.scenes import draw_scene, random_size_px
from triptych.zoo.reference import Ask, Reference

SEED = 77_000_000  # training seeds are far smaller
FOLDER = Path(__file__).parents[2] / "src/triptych/zoo/tiny-vl"
BATCH = 24


def held_out(num: int, seed: int = SEED):
    """(group, question, Ask) triples: five of eight about a picture, one about two, two about a clip."""
    rng = random.Random(seed)
    made = []
    while len(made) < num:
        draw = rng.random()
        if draw < 0.05:
            side_px = 28 * rng.randint(16, 32)
            scene = draw_scene(rng, (side_px, 28 * rng.randint(16, 32)), num_words=rng.choice((0, 0, 1, 2)))
            made += [("large picture", q, Ask(q.text, [scene.image])) for q in questions(scene, rng, 2)]
        elif draw < 0.65:
            scene = draw_scene(rng, random_size_px(rng), num_words=rng.choice((0, 0, 0, 1, 1, 2)))
            made += [("picture", q, Ask(q.text, [scene.image])) for q in questions(scene, rng, 2)]
        elif draw < 0.75:
            size_px = (28 * rng.randint(3, 5), 28 * rng.randint(3, 5))
            first, second, change = draw_pair(rng, size_px)
            asks = pair_questions(first, second, change, rng, 2)
            made += [("two pictures", q, Ask(q.text, [first.image, second.image])) for q in asks]
        else:
            size_px = (28 * rng.randint(3, 5), 28 * rng.randint(3, 5))
            clip = draw_clip(rng, size_px, rng.choice((4, 6, 8)))
            made += [("clip", q, Ask(q.text, clip=clip.frames)) for q in clip_questions(clip, rng, 2)]
    return made[:num]


def answer_all(model: Reference, made) -> list[str]:
    """Like with like, so that a batch is padded little."""
    answers: dict[int, str] = {}
    order = sorted(range(len(made)), key=lambda i: (made[i][0], weight(made[i][2]), made[i][1].kind))
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        parts = [[index] for index in some] if made[some[-1]][0] == "large picture" else [some]
        for part in parts:
            answers.update(zip(part, model.answers([made[index][2] for index in part]), strict=True))
    return [answers[index] for index in range(len(made))]


def weight(ask: Ask) -> int:
    return sum(picture.width * picture.height for picture in (*ask.pictures, *ask.clip))


def table(title: str, pairs) -> None:
    hits: dict[str, list[bool]] = defaultdict(list)
    for name, right in pairs:
        hits[name].append(right)
    print(f"\n{title}")
    for name, rights in sorted(hits.items()):
        print(f"  {name:<22} {sum(rights) / len(rights):6.1%}  of {len(rights)}")


def size_class(ask: Ask) -> str:
    tokens = sum(-(-picture.width // 28) * -(-picture.height // 28) for picture in ask.pictures)
    return next(f"up to {limit:>4} visual tokens" for limit in (16, 36, 81, 144, 1300) if tokens <= limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--questions", type=int, default=1200)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--wrong", type=int, default=0, help="print this many wrong answers")
    args = parser.parse_args()
    model = Reference(args.folder, getattr(torch, args.dtype))
    made = held_out(args.questions)
    start = time.time()
    rights = []
    for (group, question, _), answer in zip(made, answer_all(model, made), strict=True):
        rights.append(answer == question.answer)
        if not rights[-1] and args.wrong > 0:
            args.wrong -= 1
            print(f"wrong [{group}] {question.text!r}: {answer!r}, not {question.answer!r}")
    print(f"{len(made)} questions in {time.time() - start:.0f} s, {args.dtype}")
    table("by kind", ((question.kind, right) for (_, question, _), right in zip(made, rights, strict=True)))
    pictures = [(ask, right) for (group, _, ask), right in zip(made, rights, strict=True) if "picture" in group]
    table("by size", ((size_class(ask), right) for ask, right in pictures))
    table("by group", ((group, right) for (group, _, _), right in zip(made, rights, strict=True)))


if __name__ == "__main__":
    main()

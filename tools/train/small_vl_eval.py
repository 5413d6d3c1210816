"""Accuracy of a built small-vl on questions that it was not trained on, through stock transformers, greedily.

    python tools/train/small_vl_eval.py FOLDER --packages DIR [--easy 400] [--drawn 200]

Easy-vqa's own test pictures, and drawn scenes of seeds that training does not reach. An answer counts when it is the
expected one to the letter. Beside each kind: always giving its commonest answer in the same questions.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from small_vl_data import EASY_VQA, HELD_OUT_SEED, EasyVqa, painted, scene_asks, scene_of
from tqdm import tqdm

from triptych.zoo.llava_reference import LlavaReference
from triptych.zoo.wheels import fetch_wheel


def held_out(packages: Path, num_easy: int, num_drawn: int):
    """(group, picture, question): one question a picture."""
    rng = random.Random(7)
    easy = EasyVqa(fetch_wheel(EASY_VQA, packages), "test")
    for _ in range(num_easy):
        picture = rng.choice(easy.pictures)
        yield "easy-vqa", easy.image(picture.number), rng.choice(picture.asked)
    made = number = 0
    while made < num_drawn:
        number += 1
        scene, _ = scene_of(number, HELD_OUT_SEED)
        for question in scene_asks(scene, rng, 1):
            made += 1
            yield "drawn", painted(number, HELD_OUT_SEED), question


def table(rows) -> None:
    """Rows of (name, answer, expected): share right, and of the commonest expected answer."""
    groups = defaultdict(list)
    for name, given, wanted in rows:
        groups[name].append((given, wanted))
    print(f"{'':<34} {'right':>7} {'commonest':>10}")
    for name, pairs in sorted(groups.items()):
        right = sum(given == wanted for given, wanted in pairs) / len(pairs)
        common = Counter(wanted for _, wanted in pairs).most_common(1)[0][1] / len(pairs)
        print(f"{name:<34} {right:7.1%} {common:10.1%}  of {len(pairs)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--easy", type=int, default=400)
    parser.add_argument("--drawn", type=int, default=200)
    parser.add_argument("--wrong", type=int, default=0, help="print this many wrong answers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stock, start, kinds, groups = LlavaReference(args.folder), time.time(), [], []
    for group, image, question in tqdm(held_out(args.packages, args.easy, args.drawn), total=args.easy + args.drawn):
        given = stock.answer(image, question.text)
        kinds.append((question.kind, given, question.answer))
        groups.append((f"all {group}", given, question.answer))
        if given != question.answer and args.wrong > 0:
            args.wrong -= 1
            tqdm.write(f"wrong [{question.kind}] {question.text!r}: {given!r}, not {question.answer!r}")
    print(f"{len(kinds)} questions in {time.time() - start:.0f} s")
    table(kinds + groups)


if __name__ == "__main__":
    main()

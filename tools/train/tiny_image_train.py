"""Trains tiny-image's text encoder and denoiser on cached latents, or goes on from the last checkpoint.

    python tools/train/tiny_image_train.py --out DIR --minutes 120

Flow matching: the target is noise minus latent. A middle layer is also asked which colour and shape each place will
show, and the text encoder what each noun stands for, which brings prompt and picture together far sooner. Weights are
float32, passes run on a copy in the number format that this CPU multiplies fastest.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from numerics import PASS_DTYPE
from tiny_image_data import Batch, load_buckets
from tiny_image_model import GUIDANCE, Model, make_scheduler, make_tokenizer
from tiny_image_words import word_targets
from tiny_vl_optim import Muon, RunningMean

from triptych.testing.judge import look, verdict
from triptych.testing.prompts import invent_prompt, say

BATCH_TOKENS = 4096
AUX_WEIGHT, WORD_WEIGHT = 0.25, 0.1
WORD_STEPS, WORD_BATCH, WORD_LR = 600, 64, 6e-3  # of the text encoder alone, at the very beginning
MEAN_DECAY = 0.995
HIGH_NOISE = 0.4  # of the rows are drawn from the noisiest fifth; 0.9 and up were one in sixteen without
SEEN_BELOW, APART = 0.8, 0.3  # at lower levels so many rows have a noise that says nothing of the picture
NUM_JUDGED, NUM_STEPS = 32, 20


def make_optimizers(
    blocks: Iterable[torch.nn.Module], parameters: Iterable[torch.nn.Parameter], lr: float, weight_decay: float = 0.01
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices in `blocks`, AdamW for the rest of `parameters`."""
    matrices = [
        weight
        for block in blocks
        for name, weight in block.named_parameters()
        if weight.ndim == 2 and "table" not in name and "relative" not in name
    ]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in parameters if id(weight) not in chosen]
    return [Muon(matrices, lr), torch.optim.AdamW(rest, lr, betas=(0.9, 0.98), weight_decay=weight_decay)]


class Trainee:
    """The float32 weights, their running mean, the copy that is run, and what is needed to go on."""

    def __init__(self, vocabulary: int, lr: float) -> None:
        torch.manual_seed(0)
        self.model = Model(vocabulary)
        self.working = copy.deepcopy(self.model).to(PASS_DTYPE)
        blocks = (self.model.denoiser.transformer_blocks, self.model.text_encoder.encoder.block)
        self.optimizers = make_optimizers(blocks, self.model.parameters(), lr)
        self.mean = RunningMean(self.model, decay=MEAN_DECAY)
        self.step = 0

    def update(self, lr: float) -> None:
        pairs = list(zip(self.model.parameters(), self.working.parameters(), strict=True))
        for weight, run in pairs:
            weight.grad = None if run.grad is None else run.grad.float()
            run.grad = None
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self.mean.update(self.model)
        self.step += 1
        with torch.no_grad():
            for weight, run in pairs:
                run.copy_(weight)

    def save(self, path: Path) -> None:
        state = dict(
            model=self.model.state_dict(),
            mean=self.mean.weights,
            optimizers=[optimizer.state_dict() for optimizer in self.optimizers],
            step=self.step,
        )
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.working.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.mean.weights, self.step = state["mean"], state["step"]
        self.mean.steps = self.step


def noise_levels(num: int) -> torch.Tensor:
    """[B], 0 to 1. Half lie above 0.8: with few tokens that is where the prompt decides ground, colours and places."""
    middle, high = torch.sigmoid(0.2 + 1.2 * torch.randn(num)), 1 - 0.2 * torch.rand(num)
    return torch.where(torch.rand(num) < HIGH_NOISE, high, middle)


def some_apart(noise: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """Noise drawn anew for some rows in which the picture can be seen, as it is when a picture is to be changed: there
    the noise says nothing of where things are."""
    is_apart = (level < SEEN_BELOW) & (torch.rand(len(level)) < APART)
    return torch.where(is_apart[:, None, None, None], torch.randn_like(noise), noise)


def losses(model: Model, tokenizer, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Error of the velocity; that of the guess of what will be where, surer where there is less noise; of the words."""
    tokens = tokenizer(batch.texts, padding=True, return_tensors="pt")
    clean = batch.latents
    level = noise_levels(len(clean))
    noise = some_apart(batch.noise, level)
    noisy = torch.lerp(clean, noise, level[:, None, None, None]).to(PASS_DTYPE)
    hidden = model.read(tokens.input_ids, tokens.attention_mask)
    text, bias = model.project(hidden, tokens.attention_mask)
    velocity, inside = model(noisy, (1000 * level).to(PASS_DTYPE), text, bias)
    error = F.mse_loss(velocity.float(), noise - clean)
    guesses = ((model.colour_head, batch.colours), (model.shape_head, batch.shapes))
    aux = sum(F.cross_entropy(head(inside).float().flatten(0, 1), wanted.flatten()) for head, wanted in guesses)
    targets = word_targets(tokenizer, tokens.input_ids, tokens.attention_mask, batch.prompts)
    return error, aux, model.word_heads.loss(hidden, targets)


def word_loss(model: Model, tokenizer, rng: random.Random) -> torch.Tensor:
    """Of new prompts, no picture."""
    prompts = [invent_prompt(rng, held_out=False) for _ in range(WORD_BATCH)]
    tokens = tokenizer([say(prompt, rng) for prompt in prompts], padding=True, return_tensors="pt")
    targets = word_targets(tokenizer, tokens.input_ids, tokens.attention_mask, prompts)
    return model.word_heads.loss(model.read(tokens.input_ids, tokens.attention_mask), targets)


@torch.inference_mode()
def sample(
    model: Model,
    tokenizer,
    texts: list[str],
    noise: torch.Tensor,
    num_steps: int = NUM_STEPS,
    guidance: float = GUIDANCE,
) -> torch.Tensor:
    """Latents [B, C, h, w] as the stock pipeline draws them from that noise; guidance 1 asks no empty prompt."""
    guided = guidance != 1
    tokens = tokenizer(texts + [""] * len(texts) * guided, padding=True, return_tensors="pt")
    text, bias = model.encode(tokens.input_ids, tokens.attention_mask)
    scheduler = make_scheduler()
    scheduler.set_timesteps(num_steps)
    latents = noise
    for timestep in scheduler.timesteps:
        rows = (torch.cat([latents, latents]) if guided else latents).to(PASS_DTYPE)
        velocity = model(rows, timestep.expand(len(rows)).to(PASS_DTYPE), text, bias)[0].float()
        if guided:
            asked, empty = velocity.chunk(2)
            velocity = empty + guidance * (asked - empty)
        latents = scheduler.step(velocity, timestep, latents).prev_sample
    return latents


@torch.inference_mode()
def pixels_of(vae: AutoencoderKL, latents: torch.Tensor) -> np.ndarray:
    """[B, H, W, 3] uint8."""
    drawn = vae.decode(latents).sample
    return ((drawn.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def judge(model: Model, tokenizer, vae: AutoencoderKL, max_objects: int) -> str:
    """Shares of held-out prompts drawn rightly, over all and in each respect."""
    rng = random.Random(77)
    invented = (invent_prompt(rng, held_out=True) for _ in range(100 * NUM_JUDGED))
    prompts = [prompt for prompt in invented if prompt.num_objects <= max_objects][:NUM_JUDGED]
    noise = torch.randn((len(prompts), vae.config.latent_channels, 8, 8), generator=torch.Generator().manual_seed(7))
    pictures = pixels_of(vae, sample(model, tokenizer, [str(prompt) for prompt in prompts], noise))
    verdicts = [verdict(prompt, look(picture)) for prompt, picture in zip(prompts, pictures, strict=True)]
    aspects = ("is_right", "counts", "colours", "shapes", "background", "relation")
    return ", ".join(f"{name} {np.mean([getattr(v, name) for v in verdicts]):.2f}" for name in aspects)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="time to train for")
    parser.add_argument("--decay-minutes", type=float, default=15)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-objects", type=int, default=5, help="crowded pictures are left out, at first")
    parser.add_argument("--max-px", type=int, default=256, help="larger pictures are left out, at first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--judge-every", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = make_tokenizer()
    trainee = Trainee(len(tokenizer), args.lr)
    if (args.out / "last.pt").exists():
        trainee.load(args.out / "last.pt")
    else:
        learn_words(trainee, tokenizer, WORD_LR)
    loop(args, trainee, tokenizer)


def learn_words(trainee: Trainee, tokenizer, lr: float) -> None:
    """The text encoder alone, in a minute; the rest has no gradient yet and stays."""
    model, rng = trainee.model, random.Random(0)
    learning = [*model.text_encoder.parameters(), *model.word_heads.parameters()]
    optimizers = make_optimizers([model.text_encoder.encoder.block], learning, lr, weight_decay=0.0)
    for step in range(WORD_STEPS):
        loss = word_loss(model, tokenizer, rng)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * min((step + 1) / 30, 1.0, 3 * (1 - step / WORD_STEPS) + 0.02)
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 50 == 0 or step == WORD_STEPS - 1:
            print(f"words {step} {loss.item():.4f}", flush=True)
    trainee.working.load_state_dict(model.state_dict())
    trainee.mean = RunningMean(model, decay=MEAN_DECAY)


def loop(args, trainee: Trainee, tokenizer) -> None:
    vae = AutoencoderKL.from_pretrained(args.out / "vae").eval()
    buckets = load_buckets(args.out / "latents", args.max_objects, args.max_px)
    sizes, counts = list(buckets), [len(bucket) for bucket in buckets.values()]
    rng, seen, start, first = random.Random(trainee.step), [], time.time(), trainee.step
    torch.manual_seed(trainee.step + 1)
    while (left_s := start + 60 * args.minutes - time.time()) > 0:
        size_px = rng.choices(sizes, counts)[0]
        num = max(1, BATCH_TOKENS * 64 // (size_px[0] * size_px[1]))
        error, aux, words = losses(trainee.working, tokenizer, buckets[size_px].draw(rng, num))
        (error + AUX_WEIGHT * aux + WORD_WEIGHT * words).backward()
        trainee.update(args.lr * min(1.0, (trainee.step + 1) / 100, left_s / 60 / args.decay_minutes + 0.01))
        seen.append((error.item(), aux.item(), words.item()))
        if trainee.step % 50 == 0:
            means = " ".join(f"{value:.4f}" for value in np.mean(seen[-50:], 0))
            pace = (time.time() - start) / (trainee.step - first)
            print(f"{trainee.step} {pace:.2f} s/step, error, guess, words {means}", flush=True)
        if trainee.step % 200 == 0:
            trainee.save(args.out / "last.pt")
        if trainee.step % args.judge_every == 0:
            report(args, trainee, tokenizer, vae)
    trainee.save(args.out / "last.pt")
    report(args, trainee, tokenizer, vae)


def report(args, trainee: Trainee, tokenizer, vae: AutoencoderKL) -> None:
    judged = Model(len(tokenizer))
    judged.load_state_dict(trainee.mean.weights)
    line = f"{trainee.step} held out: {judge(judged.to(PASS_DTYPE), tokenizer, vae, args.max_objects)}"
    print(line, flush=True)
    with (args.out / "curve.txt").open("a") as curve:
        curve.write(line + "\n")


if __name__ == "__main__":
    main()

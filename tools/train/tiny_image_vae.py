"""Trains tiny-image's autoencoder on drawn scenes; the first of three steps, the denoiser being the second.

    python tools/train/tiny_image_vae.py --out DIR --steps 1200
    python tools/train/tiny_image_vae.py --out DIR --steps 3000 --polish

Writes `DIR/vae`, a diffusers folder whose latents have mean 0 and deviation 1 in every channel, and `DIR/vae.pt`, from
which a stopped run goes on. With `--polish` it goes on from `DIR/vae`, with latents a little off, as a denoiser's are:
the decoder learns to draw a clean outline from them.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from numerics import autocast
from tiny_image_places import draw_fields, lay_out_by
from tiny_vl_optim import orthogonal
from torch.nn.functional import binary_cross_entropy_with_logits

from triptych.testing.prompts import Prompt, invent_prompt, lay_out
from triptych.testing.scenes import Scene

LATENT_CHANNELS = 8
SIZES_PX = ((64, 64), (64, 48), (48, 64), (56, 56))
KL_WEIGHT, DRIFT_WEIGHT = 1e-4, 0.1
SPREAD = 0.4  # deviation of a picture from its ground that weighs 1
THING_DISTANCE, THING_SOFTNESS = 0.47, 0.15  # from the ground, in RGB of -1 to 1: where a pixel is half a thing
THING_WEIGHT = 0.1
HARD_SHAPES = ("star", "diamond")  # whose points are lost first


def make_vae() -> AutoencoderKL:
    """Begins as a nearly linear code: residual branches at zero, the path beside them at unit gain.

    With torch's own initial weights the colours were still missing after 600 steps.
    """
    vae = AutoencoderKL(
        block_out_channels=(16, 32, 48, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=1,
        latent_channels=LATENT_CHANNELS,
        mid_block_add_attention=False,
        sample_size=64,
        scaling_factor=1.0,
    )
    for name, weight in vae.named_parameters():
        if weight.ndim == 4 and ".conv2." in name:
            torch.nn.init.zeros_(weight)
        elif weight.ndim == 4 and ".conv1." not in name:
            weight.data *= 3**0.5
    torch.nn.init.constant_(vae.quant_conv.bias[LATENT_CHANNELS:], -6.0)
    return vae


class MuonConv(torch.optim.Optimizer):
    """Orthogonalised momentum for convolutions, each taken as a matrix of [out, in * 3 * 3]."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 0.1)
                update = orthogonal(weight.grad.lerp(momentum, 0.9).flatten(1)[None])[0]
                weight.add_(update.view_as(weight), alpha=-group["lr"] * 0.2 * max(update.shape) ** 0.5)


def make_optimizers(vae: AutoencoderKL, lr: float) -> list[torch.optim.Optimizer]:
    outer = ("conv_in", "conv_out", "quant_conv")
    inner = [
        weight
        for name, weight in vae.named_parameters()
        if weight.ndim == 4 and weight.requires_grad and not name.removesuffix(".weight").endswith(outer)
    ]
    chosen = {id(weight) for weight in inner}
    rest = [weight for weight in vae.parameters() if weight.requires_grad and id(weight) not in chosen]
    return [MuonConv(inner, lr), torch.optim.AdamW(rest, lr, betas=(0.9, 0.98), weight_decay=1e-4)]


def draw(rng: random.Random, size_px: tuple[int, int]) -> np.ndarray:
    """[H, W, 3] uint8: a scene of the prompts' world, one in four in colours of any kind."""
    pixels = np.asarray(_scene(rng, size_px).image)
    if rng.random() < 0.75:
        return pixels
    matrix = np.random.default_rng(rng.getrandbits(32)).normal(0, 0.35, (3, 3)) + np.eye(3)
    return np.clip((pixels - 128.0) @ matrix + 128, 0, 255).astype(np.uint8)


def _prompt(rng: random.Random) -> Prompt:
    """One in two has a shape that is hard to keep."""
    wants_hard = rng.random() < 0.5
    while True:
        prompt = invent_prompt(rng)
        if not wants_hard or any(group.shape in HARD_SHAPES for group in prompt.groups):
            return prompt


def _scene(rng: random.Random, size_px: tuple[int, int]) -> Scene:
    """As the denoiser's pictures, or of any sizes and places."""
    if rng.random() < 0.5:
        return lay_out_by(draw_fields(rng.getrandbits(32), size_px), _prompt(rng))
    while True:
        try:
            return lay_out(rng, _prompt(rng), size_px)
        except ValueError:  # a crowded prompt in a small picture
            continue


def batch_of(rng: random.Random, num: int) -> torch.Tensor:
    """[B, 3, H, W] in -1 to 1."""
    size_px = rng.choice(SIZES_PX)
    pixels = np.stack([draw(rng, size_px) for _ in range(num)])
    tensor = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    return tensor.contiguous()


def loss_of(vae: AutoencoderKL, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Absolute error, squared error with that of outlines, that of differences between neighbours, divergence."""
    with autocast():
        posterior = vae.encode(pixels).latent_dist
        drawn = vae.decode(posterior.sample()).sample
    divergence = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
    return (*_pixel_losses(drawn.float(), pixels), divergence)


def polish_loss(vae: AutoencoderKL, pixels: torch.Tensor, max_noise: float) -> tuple[torch.Tensor, ...]:
    """As `loss_of`, from latents off by up to `max_noise`, and with latents kept at mean 0 and deviation 1."""
    with autocast():
        latents = vae.encode(pixels).latent_dist.mean.float()
        noise = max_noise * torch.rand(len(latents), 1, 1, 1) * torch.randn_like(latents)
        drawn = vae.decode(latents + noise).sample
    channels = latents.transpose(0, 1).flatten(1)
    drift = (channels.mean(1) ** 2 + (channels.std(1) - 1) ** 2).mean() * DRIFT_WEIGHT / KL_WEIGHT
    return (*_pixel_losses(drawn.float(), pixels), drift)


def _pixel_losses(drawn: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of pictures by their contrast: the outline of a green star on blue counts as that of a black one on white."""
    ground = pixels.flatten(2).median(2).values[:, :, None, None]
    spread = (pixels - ground).flatten(1).std(1)
    weight = (SPREAD / spread.clamp(min=SPREAD / 4))[:, None, None, None]
    edges = sum((weight * (drawn.diff(dim=axis) - pixels.diff(dim=axis)).abs()).mean() for axis in (2, 3))
    wrong = drawn - pixels
    outlines = binary_cross_entropy_with_logits(_thingness(drawn, ground), _thingness(pixels, ground).sigmoid())
    return (weight * wrong.abs()).mean(), (weight * wrong**2).mean() + THING_WEIGHT * outlines, edges


def _thingness(pixels: torch.Tensor, ground: torch.Tensor) -> torch.Tensor:
    """[B, H, W] logit of a pixel's being something and not ground, by its distance in colour."""
    distance = (pixels - ground).square().sum(1).add(1e-6).sqrt()
    return (distance - THING_DISTANCE) / THING_SOFTNESS


@torch.no_grad()
def standardise(vae: AutoencoderKL, rng: random.Random, num: int = 512) -> None:
    """Fold mean and deviation of the latents into the 1x1 convolutions on both sides: none is needed outside."""
    vae.float()
    means = [vae.encode(batch_of(rng, 16)).latent_dist.mean.transpose(0, 1).flatten(1) for _ in range(num // 16)]
    latents = torch.cat(means, 1)
    mean, deviation = latents.mean(1), latents.std(1)
    into, out_of = vae.quant_conv, vae.post_quant_conv
    channels = len(mean)
    into.weight[:channels] /= deviation[:, None, None, None]
    into.bias[:channels] = (into.bias[:channels] - mean) / deviation
    into.bias[channels:] -= 2 * deviation.log()
    out_of.bias += out_of.weight[:, :, 0, 0] @ mean
    out_of.weight *= deviation[None, :, None, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--polish", action="store_true")
    parser.add_argument("--decoder-only", action="store_true", help="with --polish: latents stay what they are")
    parser.add_argument("--max-noise", type=float, default=0.2, help="with --polish: deviation the decoder is to bear")
    parser.add_argument("--seed", type=int, default=0, help="another number, other pictures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.polish:
        vae = AutoencoderKL.from_pretrained(args.out / "vae")
        if args.decoder_only:
            vae.encoder.requires_grad_(False)
            vae.quant_conv.requires_grad_(False)
        train(args, vae, make_optimizers(vae, args.lr), partial(polish_loss, max_noise=args.max_noise), 0, None)
    else:
        vae = first_training(args)
    if not args.decoder_only:
        standardise(vae, random.Random(1))
    vae.save_pretrained(args.out / "vae")


def first_training(args) -> AutoencoderKL:
    vae, step, last = make_vae(), 0, args.out / "vae.pt"
    optimizers = make_optimizers(vae, args.lr)
    if last.exists():
        state = torch.load(last, weights_only=True)
        vae.load_state_dict(state["vae"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step = state["step"]
    train(args, vae, optimizers, loss_of, step, last)
    return vae


def train(args, vae: AutoencoderKL, optimizers: list, losses, step: int, last: Path | None) -> None:
    rng, start, seen = random.Random(step + args.seed), time.process_time(), []
    while step < args.steps:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = args.lr * min((step + 1) / 50, 1.0, 2.5 * (1 - step / args.steps) + 0.01)
        error, squared, edges, divergence = losses(vae, batch_of(rng, args.batch))
        (error + squared + edges + KL_WEIGHT * divergence).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen.append((error.item(), edges.item(), divergence.item()))
        step += 1
        if step % 25 == 0:
            means = " ".join(f"{value:.4f}" for value in np.mean(seen[-25:], 0))
            seconds = (time.process_time() - start) / len(seen)
            print(f"{step}/{args.steps} error, edges, divergence {means}, {seconds:.2f} cpu s/step", flush=True)
        if last and (step % 200 == 0 or step == args.steps):
            states = [optimizer.state_dict() for optimizer in optimizers]
            torch.save(dict(vae=vae.state_dict(), optimizers=states, step=step), last)


if __name__ == "__main__":
    main()

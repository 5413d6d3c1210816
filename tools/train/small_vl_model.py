"""small-vl in training: the projector over standardised features, low-rank changes of the language model, packed rows.

A row is one picture and several questions about it: each question sees the picture and itself only, at the positions
that it would have alone, so that the picture is paid for once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_vl_data import EASY_COLOURS
from torch import nn

from triptych.testing.scene_paint import COLOURS
from triptych.testing.scene_paint import SHAPES as DRAWN_SHAPES

WORDS = tuple(dict.fromkeys((*DRAWN_SHAPES, "rectangle", *COLOURS, *EASY_COLOURS, "background")))
PATCHES = 8  # a side
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Projector(nn.Module):
    """Llava's own two layers, behind a standardisation that `folded` multiplies into the first of them."""

    def __init__(self, width: int, hidden: int, mean: torch.Tensor, std: torch.Tensor) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(width, hidden), nn.Linear(hidden, hidden)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, features: torch.Tensor) -> torch.Tensor:  # [..., width] -> [..., hidden]
        return self.linear_2(F.gelu(self.linear_1((features - self.mean) / self.std)))

    def folded(self) -> dict[str, torch.Tensor]:
        weight = self.linear_1.weight / self.std
        return {
            "linear_1.weight": weight,
            "linear_1.bias": self.linear_1.bias - weight @ self.mean,
            "linear_2.weight": self.linear_2.weight,
            "linear_2.bias": self.linear_2.bias,
        }


class LowRank(nn.Module):
    """A frozen linear layer plus `up @ down`, which begins at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.down.T) @ self.up.T


def add_low_rank(language_model, rank: int) -> dict[str, LowRank]:
    """Every linear layer of every block gets one; the name is the stock name of the layer."""
    added = {}
    for name, module in list(language_model.model.named_modules()):
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in LORA_TARGETS:
            parent = language_model.model.get_submodule(name.rsplit(".", 1)[0])
            added[name] = LowRank(module, rank)
            setattr(parent, name.rsplit(".", 1)[-1], added[name])
    return added


def word_table(tokenizer, embeddings: torch.Tensor) -> torch.Tensor:
    """[words, D]: the embedding of each word as it stands inside a sentence; the mean of its pieces."""
    ids = [tokenizer(" " + word, add_special_tokens=False)["input_ids"] for word in WORDS]
    return torch.stack([embeddings[piece].mean(0) for piece in ids])


def place_targets(scene) -> torch.Tensor:
    """[64, words]: 1 where the patch should look like the word.

    Where a thing has its centre: colour and shape. Elsewhere on it: colour. Beside all things: background and colour.
    """
    target = torch.zeros(PATCHES * PATCHES, len(WORDS))
    step = scene.width_px / PATCHES
    centres = (torch.arange(PATCHES) + 0.5) * step
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    owner = torch.full((PATCHES * PATCHES,), -1)
    for index, thing in enumerate(scene.objects):
        inside = ((x - thing.x_px) ** 2 + (y - thing.y_px) ** 2).flatten() < (0.8 * thing.radius_px) ** 2
        owner[inside] = index
    for index, thing in enumerate(scene.objects):
        target[owner == index, WORDS.index(thing.colour)] = 1
    ground = owner < 0
    target[ground, WORDS.index("background")] = 1
    target[ground, WORDS.index(scene.background)] = 1
    for thing in scene.objects:
        place = min(int(thing.y_px / step), PATCHES - 1) * PATCHES + min(int(thing.x_px / step), PATCHES - 1)
        if ground[place]:
            target[place] = 0
        target[place, WORDS.index(thing.colour)] = 1
        target[place, WORDS.index(thing.shape)] = 1
    return target


class Likeness(nn.Module):
    """How much a visual token looks like each word: a scaled cosine, read by the alignment losses only."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("centre", table.mean(0))
        self.register_buffer("table", F.normalize(table - table.mean(0), dim=-1))
        self.register_buffer("norm", table.norm(dim=-1).mean())
        self.scale = nn.Parameter(torch.tensor([8.0, -3.0]))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:  # [..., D] -> [..., words]
        return self.scale[0] * F.normalize(tokens - self.centre, dim=-1) @ self.table.T + self.scale[1]

    def size_loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens.norm(dim=-1) / self.norm - 1).square().mean()


def pack(prefix_tokens: int, segments: list[tuple[list[int], list[int]]]):
    """Ids, positions, segment numbers and labels behind a prefix; a segment is (question ids, answer ids).

    `labels` stand where the token before the labelled one is.
    """
    ids, positions, owners, labels = [], [], [], []
    for number, (question, answer) in enumerate(segments, 1):
        both = question + answer
        ids += both
        positions += range(prefix_tokens, prefix_tokens + len(both))
        owners += [number] * len(both)
        labels += [-100] * (len(question) - 1) + answer + [-100]
    return ids, positions, owners, labels


def segment_mask(owners: torch.Tensor) -> torch.Tensor:
    """[B, L] segment numbers, 0 the picture and -1 padding -> [B, 1, L, L] additive mask."""
    length = owners.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = (owners[:, :, None] == owners[:, None, :]) | (owners[:, None, :] == 0)
    return torch.zeros(len(owners), 1, length, length).masked_fill_(~(causal & same)[:, None], -1e9)

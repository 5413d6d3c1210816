"""Training-only heads of tiny-vl, and the losses of what they are asked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tiny_vl_changes import NUM_EVENTS
from tiny_vl_targets import MOST_CHARS, MOST_MENTIONED, MOST_RANKED, NUM_EXTREMES
from torch import nn

from triptych.testing.scenes import BIG_MIN, SMALL_MAX

BIG = 2 * (SMALL_MAX + BIG_MIN)  # radius over a quarter of the short side, between what is small and what is big


def mean_loss(logits, target):
    """Cross entropy over the slots that have a target; zero where none has."""
    return F.cross_entropy(logits, target, ignore_index=-100, reduction="sum") / (target >= 0).sum().clamp(min=1)


def distance(given, truth):
    """Huber with a small bound: a squared error would no longer press where places are right to a tenth."""
    return F.smooth_l1_loss(given, truth, beta=0.02)


class DenseHeads(nn.Module):
    """Training-only heads: what has its centre in each patch of a merged token, and where a token lies."""

    def __init__(self, dim: int, num_shapes: int, num_colours: int, num_chars: int, num_backgrounds: int = 7):
        super().__init__()
        self.sizes = (num_shapes, num_colours, num_chars)
        self.shape = nn.Linear(dim, 4 * num_shapes)
        self.colour = nn.Linear(dim, 4 * num_colours)
        self.char = nn.Linear(dim, 8 * num_chars)
        self.place = nn.Linear(dim, 4)
        self.tower_place = nn.Linear(dim, 4)
        self.background = nn.Linear(dim, num_backgrounds)
        self.mention_sizes = (MOST_MENTIONED + 1, num_colours, num_shapes - 1, 2)
        self.mention = nn.Linear(dim, sum(self.mention_sizes))
        self.mention_size = nn.Linear(dim, 1)
        self.box = nn.Linear(dim, 4 * 4)
        self.order = nn.Linear(dim, 8 * MOST_CHARS)
        self.event = nn.Linear(dim, NUM_EVENTS)
        self.shift = nn.Linear(dim, 2)
        self.two_mention = nn.Linear(dim, 2 * (MOST_MENTIONED + 1))
        self.likeness = nn.Parameter(torch.tensor([6.0, -3.0]))  # scale and bias of a visual token's cosine to a word
        self.thing = nn.Linear(dim, 3)
        self.rank = nn.Linear(dim, 4 * MOST_RANKED)
        self.extreme = nn.Linear(dim, 4 * NUM_EXTREMES)
        self.written = nn.Linear(dim, 8 * num_colours)
        self.big = nn.Linear(dim, 1)
        self.spelled = nn.Linear(dim, MOST_CHARS * num_chars)
        self.between = nn.Linear(dim, 3)
        nn.init.zeros_(self.between.weight)
        self.stood_sizes = (num_colours, num_shapes - 1)
        self.stood = nn.Linear(dim, sum(self.stood_sizes))
        self.kind = nn.Linear(dim, 4 * MOST_RANKED)

    def vision_loss(self, tokens, shape, colour, char, background, box, order, rank, extreme, written, spelled, kind):
        # as `dense_targets` describes them, with a batch axis in front; -100 is no target
        """Colour, shape and character where there is one, then where there are shapes and characters at all.

        The first three are means over the few slots that hold something: over all slots they would hardly count. So are
        the rest: a thing's exact place and radius, which of its word's characters one is, its colour, which character
        is the first, the second ... of its word, and how a thing and a kind stand among all.
        """
        logits = [head(tokens).float() for head in (self.shape, self.colour, self.char)]
        shape_logits, colour_logits, char_logits = (x.view(-1, n) for x, n in zip(logits, self.sizes, strict=True))
        shape, colour, char = (target.reshape(-1) for target in (shape, colour, char))
        return [
            mean_loss(colour_logits, colour),
            mean_loss(shape_logits[:, 1:], shape.masked_fill(shape == 0, -99) - 1),
            2 * mean_loss(char_logits[:, 1:], char.masked_fill(char == 0, -99) - 1),
            4 * F.cross_entropy(shape_logits, shape),
            4 * F.cross_entropy(char_logits, char),
            F.cross_entropy(self.background(tokens).float().flatten(0, 1), background.flatten()),
            self.box_loss(tokens, box),
            2 * mean_loss(self.order(tokens).float().view(-1, MOST_CHARS), order.flatten()),
            mean_loss(self.written(tokens).float().view(-1, self.sizes[1]), written.flatten()),
            2 * mean_loss(self.rank(tokens).float().view(-1, MOST_RANKED), rank.flatten()),
            8 * self.extreme_loss(tokens, extreme),
            3 * self.spelled_loss(tokens, spelled.flatten()),
            2 * mean_loss(self.kind(tokens).float().view(-1, MOST_RANKED), kind.flatten()),
        ]

    def spelled_loss(self, tokens, spelled):
        """A token may hold three characters: an answer that spells has to know which of them comes next."""
        logits = self.spelled(tokens).float().view(len(spelled), -1)
        spells = mean_loss(logits[:, 1:], spelled.masked_fill(spelled == 0, -99) - 1)
        return spells + 2 * F.cross_entropy(logits, spelled)

    def extreme_loss(self, tokens, extreme):
        known = extreme >= 0
        logits = self.extreme(tokens).float().view(extreme.shape)[known]
        loss = F.binary_cross_entropy_with_logits(logits, extreme[known], reduction="sum")
        return loss / known.sum().clamp(min=1)

    def box_loss(self, tokens, box):
        """Huber: a radius of a large picture must not drown the rest."""
        held = box[..., 0] > -5
        boxes = self.box(tokens).float().view(box.shape)[held]
        return F.smooth_l1_loss(boxes, box[held], beta=0.2, reduction="sum") / held.sum().clamp(min=1)

    def word_loss(self, tokens, table, words, shape, colour):
        """A visual token is to look like the words for what has its centre there, wherever in it.

        `words` [C, 4] are ids of shapes, then colours. The language model then finds a thing by its name at once.
        """
        held = (words >= 0).unsqueeze(-1)
        means = (table[words.clamp(min=0)] * held).sum(1) / held.sum(1)
        cosine = F.normalize(tokens.float(), dim=-1) @ F.normalize(means.float(), dim=-1).T
        shapes, colours = self.sizes[0] - 1, self.sizes[1]
        is_shape = F.one_hot(shape.clamp(min=0), shapes + 1).amax(2)[..., 1:]
        is_colour = F.one_hot(colour.masked_fill(colour < 0, colours), colours + 1).amax(2)[..., :colours]
        wanted = torch.cat((is_shape, is_colour), -1).float()
        loss = F.binary_cross_entropy_with_logits(
            self.likeness[0] * cosine + self.likeness[1], wanted, reduction="none"
        )
        return loss.sum(-1).mean()

    def mention_loss(self, hidden, count, colour, shape, place):
        """At a noun [M, D]: how many it means, and where it is one, its colour, shape, place and size [M, 3]."""
        if not len(count):
            return hidden.sum() * 0
        counts, colours, shapes, places = self.mention(hidden).float().split(self.mention_sizes, -1)
        places = torch.cat((places, self.mention_size(hidden).float()), -1)
        is_one = colour >= 0
        far = distance(places[is_one], place[is_one]) if is_one.any() else 0.0
        few = count < 2
        counted = mean_loss(counts, count.masked_fill(few, -100)) + mean_loss(counts, count.masked_fill(~few, -100))
        return counted + mean_loss(colours, colour) + mean_loss(shapes, shape) + 6 * far

    def between_loss(self, hidden, between):
        """At the second of two nouns [P, D] that mean one thing each: how much further right and down the second thing
        is, and (log2, halved) how much bigger."""
        if not len(between):
            return hidden.sum() * 0
        return F.smooth_l1_loss(self.between(hidden).float(), between, beta=0.05)

    def event_loss(self, hidden, event):
        """At visual tokens [B, n-1, G, D] of later pictures: what has happened there since the first? Changes are few,
        so they and the rest are means of their own."""
        logits, event = self.event(hidden).float().flatten(0, 2), event.flatten()
        is_same = event == 0
        change = mean_loss(logits, event.masked_fill(is_same, -100))
        return change + 3 * mean_loss(logits, event.masked_fill(~is_same, -100))

    def stood_loss(self, hidden, colour, shape):
        """At visual tokens [C, D] of later pictures where something has changed: what stood there in the first."""
        if not len(colour):
            return hidden.sum() * 0
        colours, shapes = self.stood(hidden).float().split(self.stood_sizes, -1)
        return F.cross_entropy(colours, colour) + F.cross_entropy(shapes, shape)

    def shift_loss(self, hidden, shift):
        """At visual tokens [S, D] that hold a moving thing: how far it has moved, in pictures to the right and down."""
        return F.smooth_l1_loss(self.shift(hidden).float(), shift, beta=0.1) if len(shift) else hidden.sum() * 0

    def two_mention_loss(self, hidden, first, last):
        """At a noun [M, D]: how many it means in the first scene, and how many in the last."""
        if not len(first):
            return hidden.sum() * 0
        return sum(
            F.cross_entropy(logits, count)
            for logits, count in zip(self.two_mention(hidden).float().chunk(2, -1), (first, last), strict=True)
        )

    def place_loss(self, hidden, place):
        return distance(self.place(hidden).float(), place)

    def thing_loss(self, hidden, box, gh: int, gw: int):
        """At visual tokens [B, G, D] that hold a thing: its place in the picture, its size as of a noun; is it big?"""
        _, g, parts, _ = box.shape
        y, x = torch.meshgrid(torch.arange(gh), torch.arange(gw), indexing="ij")
        part = torch.arange(parts)
        x = (2 * x.reshape(1, g, 1) + part % 2 + 0.5 + box[..., 0]) / (2 * gw)
        y = (2 * y.reshape(1, g, 1) + part // 2 + 0.5 + box[..., 1]) / (2 * gh)
        held = box[..., 0] > -5
        first = held & (held.cumsum(-1) == 1)
        truth = torch.stack((x, y, box[..., 3]), -1)[first]
        if not len(truth):
            return hidden.sum() * 0
        hidden, is_big = hidden[first.any(-1)], (truth[:, 2] > BIG).float()
        big = F.binary_cross_entropy_with_logits(self.big(hidden).float()[:, 0], is_big)
        return distance(self.thing(hidden).float(), truth) + 0.2 * big

    def tower_place_loss(self, tokens, place):
        """The tower has to say where a token lies: the language model's rotary angles hardly tell columns apart."""
        return F.mse_loss(self.tower_place(tokens).float(), place)

"""Attention that is told where to look: what a batch's aims are as tensors, and the loss of a layer's attention.

Each aim of `tiny_vl_aims.py` is a query whose attention should lie on given visual tokens. Nothing of it is left in the
weights' format: it is a loss on the probabilities that attention computes anyway.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# The attention that is told where to look: by layer, query heads under each of the two key heads.
AIM_LAYERS, NOUN_LAYER, COUNT_LAYERS, ASKED_LAYERS, KIND_LAYERS = (3, 4), 2, (2, 3), (4, 5), (5, 6)
AIM_HEADS, COUNT_HEADS, ASKED_HEADS = (0, 3), (1, 4), (2, 5)

COUNT_WEIGHT = 2.0  # of the shares' own precision
KIND_WEIGHT = 3.0  # of what a description counts: so much less often asked than what nouns mean


def attention_of(heads, q, k, mask, row, token):
    """Logarithms of the attention [M, heads, L] that the given queries pay; `row` [M] ascends."""
    counts = torch.bincount(row, minlength=len(q))
    slot = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    with torch.autocast("cpu", enabled=False):
        asking = q.new_zeros(len(q), int(counts.max()), len(heads), q.shape[-1])
        asking = asking.index_put((row, slot), q.transpose(1, 2)[row, token][:, heads]).transpose(1, 2)
        scores = asking.float() @ k[:, heads].float().mT * q.shape[-1] ** -0.5  # [B, heads, queries of a row, L]
        return (scores.transpose(1, 2)[row, slot] + mask[row, :, token]).log_softmax(-1)


def aim_loss(attention, wanted):
    """Minus the logarithm of the attention's share on what each aim may look at, mean over aims and heads."""
    return -attention.masked_fill(~wanted[:, None], -1e4).logsumexp(-1).mean()


def count_loss(attention, noun, end, at, start):
    """How far attention [M, 2, L] is from the shares it is to have: equal ones for all that a noun means in the first
    picture, or in the last, and for the token before them, whose share then tells how many these are.

    A thing's share lies on any of the tokens `at` [K, 4] (-1: none) that have its centre in them or at their edge.
    Cross entropy, and a Huber loss on the shares' logarithms: six and seven things are an eighth of a share apart, of
    which cross entropy by itself makes nothing.
    """
    share = torch.ones(attention.shape[:2]).index_put((noun, end), torch.ones(len(noun)), accumulate=True).reciprocal()
    on_thing = attention[noun[:, None], end[:, None], at].masked_fill(at < 0, -1e4).logsumexp(-1)
    on_start = attention[torch.arange(len(start)), :, start]
    apart = -((on_thing * share[noun, end]).sum() + (on_start * share).sum()) / share.numel()
    off = on_thing - share[noun, end].log(), on_start - share.log()
    return apart + COUNT_WEIGHT * sum(
        F.smooth_l1_loss(some, torch.zeros_like(some), beta=0.1) for some in off if some.numel()
    )


def told(index, q, k, mask, aims=None, asked_aims=None, noun_aims=None, kind_aims=None):
    """What the attention of one layer is told. `aims`, `asked_aims`: row [M], token [M], wanted [M, L] bool;
    `noun_aims`: row, token, what `count_loss` takes, whether it means just one thing in just one picture [M], where
    [M, L]; `kind_aims` likewise."""
    loss = 0.0
    for told_layers, heads, some in ((AIM_LAYERS, AIM_HEADS, aims), (ASKED_LAYERS, ASKED_HEADS, asked_aims)):
        if some is not None and index in told_layers:
            row, token, wanted = some
            loss = loss + aim_loss(attention_of(heads, q, k, mask, row, token), wanted)
    if noun_aims is not None and index in COUNT_LAYERS:
        row, token, things, is_one, wanted = noun_aims
        loss = loss + count_loss(attention_of(COUNT_HEADS, q, k, mask, row, token), *things)
        if index == NOUN_LAYER and is_one.any():
            attention = attention_of(AIM_HEADS, q, k, mask, row[is_one], token[is_one])
            loss = loss + aim_loss(attention, wanted[is_one])
    if kind_aims is not None and index in KIND_LAYERS:
        row, token, things, *_ = kind_aims
        loss = loss + KIND_WEIGHT * count_loss(attention_of(COUNT_HEADS, q, k, mask, row, token), *things)
    return loss


def aims(batch, found):
    """Row and token of each aim of a batch, and where in its row it may look [M, L]; None where there are none."""
    row, token, aim, at = map(torch.from_numpy, found)
    if not len(row):
        return None
    wanted = torch.zeros(len(row), batch.ids.shape[1], dtype=torch.bool)
    wanted[aim, at] = True
    return row, token, wanted


def noun_aims(batch, found):
    """Row and token of each noun, the attention it is to pay to either end, whether it means one thing of a single
    picture, and where [M, L]."""
    if not found or not len(found[0]):
        return None
    row, token, noun, end, at, start = map(torch.from_numpy, found)
    in_first = end == 0
    is_one = (torch.bincount(noun[in_first], minlength=len(row)) == 1) & (batch.events is None)
    wanted = torch.zeros(len(row), batch.ids.shape[1], dtype=torch.bool)
    held = in_first[:, None] & (at >= 0)
    wanted[noun[:, None].expand_as(at)[held], at[held]] = True
    return row, token, (noun, end, at, start), is_one, wanted

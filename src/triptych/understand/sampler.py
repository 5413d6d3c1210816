"""From logits to tokens, a row a request. Random numbers come from (seed, token index) alone, whoever shares the batch.

Order, as in the peers: penalties, bias, minimum length, grammar, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from triptych.core.events import TokenLogprob
from triptych.core.sampling import SamplingParams
from triptych.understand.grammar import GrammarState

_SHORTLIST = 512


@dataclass(slots=True)
class SamplingState:
    """What the sampler keeps of one request between tokens. `tokens` is the sequence's own list, prompt and output."""

    params: SamplingParams
    seed: int
    tokens: list[int]
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...]
    grammar: GrammarState | None = None

    @property
    def token_idx(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


@dataclass(slots=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None = None


def sample(logits: torch.Tensor, states: list[SamplingState]) -> list[Sampled | None]:
    """[N, V] float32, changed in place. None where a row has NaN or +inf, or nothing else than -inf: that request alone
    has a model fault. The maximum of a row shows all three."""
    highest = logits.max(dim=1)
    is_finite, best = torch.isfinite(highest.values).tolist(), highest.indices.tolist()
    raw = {
        i: logits[i].clone()
        for i, state in enumerate(states)
        if is_finite[i] and state.params.top_logprobs is not None and _changes_logits(state)
    }
    for i, state in enumerate(states):
        if is_finite[i] and _changes_logits(state):
            _adjust(logits[i], state)
            best[i] = int(logits[i].argmax())
    out: list[Sampled | None] = []
    for i, state in enumerate(states):
        if not is_finite[i]:
            out.append(None)
            continue
        token_id = best[i] if state.params.temperature == 0 else _draw(logits[i], state)
        out.append(Sampled(token_id, _logprob(raw.get(i, logits[i]), token_id, state.params.top_logprobs)))
    return out


def _changes_logits(state: SamplingState) -> bool:
    p = state.params
    return bool(
        p.repetition_penalty != 1
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or state.grammar is not None
        or (state.token_idx < p.min_tokens and state.end_token_ids)
    )


def _adjust(row: torch.Tensor, state: SamplingState) -> None:
    p = state.params
    if p.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(state.tokens)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    output = state.tokens[state.num_prompt_tokens :]
    if output and (p.presence_penalty or p.frequency_penalty):
        ids, counts = np.unique(output, return_counts=True)
        penalty = p.presence_penalty + p.frequency_penalty * torch.from_numpy(counts).to(row)
        row[torch.from_numpy(ids).to(row.device)] -= penalty
    for token_id, bias in p.logit_bias.items():
        if token_id < row.shape[0]:
            row[token_id] += bias
    if state.token_idx < p.min_tokens:
        row[list(state.end_token_ids)] = float("-inf")
    if state.grammar is not None:
        state.grammar.mask_logits(row)


def _draw(row: torch.Tensor, state: SamplingState) -> int:
    """Inverse transform sampling with one uniform number from Philox keyed by (seed, token index)."""
    p = state.params
    uniform = np.random.Generator(np.random.Philox(key=[state.seed % 2**64, state.token_idx])).random()
    probs = torch.softmax(row.double() / p.temperature, dim=0)
    if p.top_p >= 1 and not p.top_k and not p.min_p:
        return _invert(probs, uniform)
    kept, ids = _filtered(probs, p)
    return int(ids[_invert(kept, uniform)])


def _filtered(probs: torch.Tensor, p: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens that top-k, top-p and min-p leave, in falling order: probabilities and ids."""
    limit = min(probs.shape[0], p.top_k or probs.shape[0])
    top_p = p.top_p if p.top_p < 1 else math.inf  # 1 keeps all, whatever a sum rounds to
    kept, ids = probs.topk(min(limit, _SHORTLIST))
    is_cut_short = len(kept) < limit and float(kept.sum()) < top_p and float(kept[-1]) >= p.min_p * float(kept[0])
    if is_cut_short:
        kept, ids = probs.topk(limit)
    if p.top_k:
        kept = kept / kept.sum()
    keep = (kept.cumsum(0) - kept < top_p) & (kept >= p.min_p * kept[0])
    keep[0] = True
    return kept[keep], ids[keep]


def _invert(probs: torch.Tensor, uniform: float) -> int:
    cumulative = probs.cumsum(0)
    target = torch.tensor([uniform * float(cumulative[-1])], dtype=cumulative.dtype, device=cumulative.device)
    index = int(torch.searchsorted(cumulative, target, right=True))
    return min(index, probs.shape[0] - 1)


def _logprob(row: torch.Tensor, token_id: int, num_top: int | None) -> TokenLogprob | None:
    """Of the model's own distribution, before penalties, masks and temperature."""
    if num_top is None:
        return None
    logprobs = torch.log_softmax(row, dim=0)
    values, ids = logprobs.topk(num_top)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), top)

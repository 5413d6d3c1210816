"""The sampler against transformers' logits processors, and its own promises: seeds, faults, log probabilities."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triptych.core.errors import InvalidRequest
from triptych.core.sampling import SamplingParams
from triptych.understand.sampler import SamplingState, _filtered, sample

VOCAB = 1000


def state_of(tokens=(1, 2, 3), num_prompt=3, seed=0, ends=(), **params):
    return SamplingState(SamplingParams(**params), seed, list(tokens), num_prompt, ends)


def random_logits(seed, rows=1):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32)) * 4


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 5, 50]),
    st.sampled_from([0.1, 0.7, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_filters_keep_the_tokens_that_transformers_keeps(seed, temperature, top_k, top_p, min_p):
    """Temperature, top-k and top-p as the stock warpers do; min-p relative to the best."""
    logits = random_logits(seed)
    expected = TemperatureLogitsWarper(temperature)(None, logits.double())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    kept = set(torch.nonzero(torch.isfinite(expected[0]))[:, 0].tolist())

    probs = torch.softmax(logits[0].double() / temperature, dim=0)
    _, ids = _filtered(probs, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))

    assert len(kept ^ set(ids.tolist())) <= 1  # a tie at the edge of top-p may fall either way


def test_repetition_penalty_equals_transformers():
    """Over prompt and output tokens alike."""
    logits = random_logits(3)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[5, 9, 9, 30]]), logits.clone())

    sample(logits, [state_of((5, 9, 9, 30), 2, temperature=0, repetition_penalty=1.7)])

    torch.testing.assert_close(expected, logits)


def test_presence_and_frequency_count_output_tokens_only():
    """Presence once, frequency by count, the prompt not at all (OpenAI's formula)."""
    logits = torch.zeros(1, VOCAB)

    sample(logits, [state_of((7, 8, 8, 8, 9), 2, temperature=0, presence_penalty=0.5, frequency_penalty=0.25)])

    assert [round(float(logits[0, i]), 3) for i in (7, 8, 9)] == [0.0, -1.0, -0.75]


def test_same_seed_same_token_in_any_batch():
    """The draw follows from seed and token index, whatever else is in the batch."""
    rows = random_logits(1, rows=4)
    alone = sample(rows[2:3].clone(), [state_of(temperature=1.0, seed=42)])[0]
    states = [state_of(temperature=1.0, seed=s) for s in (1, 2, 42, 3)]

    assert alone.token_id == sample(rows.clone(), states)[2].token_id


def test_draws_follow_the_distribution():
    """Ten thousand seeds give each token its probability, within four standard errors."""
    logits = torch.full((1, VOCAB), -30.0)
    logits[0, :3] = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    draws = [sample(logits.clone(), [state_of(temperature=1.0, top_p=0.999, seed=s)])[0].token_id for s in range(2000)]

    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert abs(draws.count(token) / 2000 - share) < 4 * (share * (1 - share) / 2000) ** 0.5


def test_a_row_that_is_not_finite_is_none_and_the_others_stay():
    """NaN in one row is that request's fault alone."""
    rows = random_logits(5, rows=3)
    expected = int(rows[2].argmax())
    rows[1, 17] = float("nan")

    out = sample(rows, [state_of(temperature=0)] * 3)

    assert out[1] is None
    assert out[2].token_id == expected


def test_minimum_length_forbids_the_end():
    """Before min_tokens no end token is chosen, even the most likely."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 11] = 9.0

    out = sample(logits, [state_of(temperature=0, min_tokens=2, ends=(11,))])

    assert out[0].token_id != 11


def test_logprobs_are_of_the_models_own_distribution():
    """Penalties and temperature do not show in the log probabilities."""
    logits = random_logits(9)
    expected = torch.log_softmax(logits[0], dim=0)

    out = sample(logits.clone(), [state_of(temperature=0, logit_bias={4: 100.0}, top_logprobs=3)])[0]

    assert out.token_id == 4
    assert out.logprob.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    assert [i for i, _ in out.logprob.top] == expected.topk(3).indices.tolist()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature must be between 0 and 100, got -1"),
        ({"top_p": 0}, "top_p must be between"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens 9 is over max_tokens 3"),
        ({"grammar_kind": "xml", "grammar": ""}, "grammar_kind 'xml' is not known"),
    ],
)
def test_parameters_out_of_range_name_the_field(params, message):
    """The error says which field, which range and which value."""
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**params)

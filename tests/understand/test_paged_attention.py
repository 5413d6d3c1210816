"""Packed, paged attention equals transformers' own `generate`, whatever shares the batch."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from triptych.models.base import KvSpec
from triptych.models.paged_attention import ATTENTION_NAME, PagedKv, SequenceStep, build_batch, register

BLOCK = 4
COMMON = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=97,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON))


def gemma2() -> PreTrainedModel:
    """Sliding windows on every other layer, and soft-capped scores."""
    return Gemma2ForCausalLM(Gemma2Config(**COMMON, sliding_window=6, attn_logit_softcapping=3.0))


def run_packed(model, prompts, num_new, chunk):
    kv = PagedKv(
        [KvSpec(2, 8)] * 3,
        num_blocks=64,
        block_size_tokens=BLOCK,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tables = [list(range(i, 64, len(prompts))) for i in range(len(prompts))]  # interleaved on purpose
    seqs, past = [list(p) for p in prompts], [0] * len(prompts)
    outs = [[] for _ in prompts]
    while min(len(o) for o in outs) < num_new:
        order = sorted(range(len(seqs)), key=lambda i: len(seqs[i]) - past[i] != 1)
        new = [min(chunk, len(seqs[i]) - past[i]) for i in order]
        steps = [SequenceStep(tables[i], past[i], n) for i, n in zip(order, new, strict=True)]
        ids = [t for i, n in zip(order, new, strict=True) for t in seqs[i][past[i] : past[i] + n]]
        pos = [p for i, n in zip(order, new, strict=True) for p in range(past[i], past[i] + n)]
        hidden = model.model(
            inputs_embeds=model.get_input_embeddings()(torch.tensor([ids])),
            position_ids=torch.tensor([pos]),
            use_cache=False,
            paged=build_batch(kv, steps),
        ).last_hidden_state[0]
        row = 0
        for i, n in zip(order, new, strict=True):
            row, past[i] = row + n, past[i] + n
            if past[i] == len(seqs[i]):
                seqs[i].append(int(model.lm_head(hidden[row - 1]).argmax()))
                outs[i].append(seqs[i][-1])
    return [o[:num_new] for o in outs]


@pytest.mark.parametrize("family", [llama, gemma2])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_packed_greedy_equals_generate(family, chunk):
    """Three sequences of different lengths, packed, in chunks: the tokens of `generate`, each alone."""
    register()
    torch.manual_seed(0)
    model = family().eval()
    prompts = [torch.randint(1, 97, (n,)) for n in (17, 5, 9)]
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        expected = [model.generate(p[None], max_new_tokens=12, do_sample=False)[0, len(p) :].tolist() for p in prompts]
        model.set_attn_implementation(ATTENTION_NAME)
        actual = run_packed(model, [p.tolist() for p in prompts], 12, chunk)

    assert expected == actual


def test_whole_span_attends_both_ways():
    """A key after the query is in reach inside a whole span, and nowhere else."""
    kv = PagedKv(
        [KvSpec(1, 4)],
        num_blocks=8,
        block_size_tokens=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    part = build_batch(kv, [SequenceStep([0, 1], 0, 6, whole=((2, 5),))]).prefill[0]

    mask = part.mask(None)

    assert mask is not None
    assert mask[2].tolist() == [True, True, True, True, True, False]
    assert mask[1].tolist() == [True, True, False, False, False, False]

"""Decode step of the SmolVLM-256M language shape: native kernels against the stock modules, in one run.

    .venv/bin/python bench/decode.py [--context 256] [--batches 1,8] [--dtype bfloat16] [--rounds 12]

Both paths take turns on the same pools and weights (random, of bfloat16 as checkpoints are), so that other load on the
machine meets both alike; the smallest of several rounds is printed. A step is embeddings to logits: all layers, final
norm and the output head.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from triptych.models.base import KvSpec
from triptych.models.native.decoder import NativeDecoder, NativeLinear
from triptych.models.native.structs import PRODUCT_NAMES
from triptych.models.paged_attention import ATTENTION_NAME, PagedBatch, PagedKv, SequenceStep, build_batch, register

BLOCK_TOKENS = 32
CONFIG = dict(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49280,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)


@dataclass
class Case:
    """One packed step, both ways."""

    model: LlamaForCausalLM
    decoder: NativeDecoder
    head: NativeLinear
    embeds: torch.Tensor
    positions: torch.Tensor
    batch: PagedBatch

    def eager(self) -> torch.Tensor:
        hidden = self.model.model(
            inputs_embeds=self.embeds[None], position_ids=self.positions, use_cache=False, paged=self.batch
        ).last_hidden_state[0]
        return self.model.lm_head(hidden[-8:]).float()

    def native(self) -> torch.Tensor:
        cos, sin = self.model.model.rotary_emb(self.embeds.float(), self.positions)
        return self.head(self.decoder.forward(self.embeds, cos[0], sin[0], self.batch)[-8:])


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    register()
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16().to(getattr(torch, args.dtype)).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    results = []
    with torch.inference_mode():
        native = (NativeDecoder(model.model), NativeLinear(model.lm_head))
        for batch_size in args.batches:
            steps = [(args.context, 1)] * batch_size
            results.append(compare(f"decode {batch_size} at context {args.context}", model, native, steps, args.rounds))
        for num_tokens in args.prefill:
            results.append(compare(f"prefill {num_tokens}", model, native, [(0, num_tokens)], args.rounds))
    print(
        json.dumps(
            {
                "dtype": args.dtype,
                "threads": args.threads,
                "products": PRODUCT_NAMES[native[0].products],
                "results": results,
            }
        )
    )


def compare(name: str, model: LlamaForCausalLM, native: tuple, sizes: list[tuple[int, int]], rounds: int) -> dict:
    """`sizes`: (past, new) of each sequence. Milliseconds of one step, the best round of each path."""
    case = make_case(model, native, sizes)
    expected, actual = case.eager(), case.native()
    error = float((actual - expected).norm() / expected.norm())
    best = {"eager": float("inf"), "native": float("inf")}
    for _ in range(rounds):
        for path, call in (("eager", case.eager), ("native", case.native)):
            best[path] = min(best[path], best_ms(call, 4))
    row = {"name": name, "eager_ms": best["eager"], "native_ms": best["native"], "difference": error}
    print(f"{name:28} eager {row['eager_ms']:8.2f} ms   native {row['native_ms']:8.2f} ms   "
          f"ratio {row['native_ms'] / row['eager_ms']:.2f}   difference {error:.4f}")  # fmt: skip
    return row


def make_case(model: LlamaForCausalLM, native: tuple, sizes: list[tuple[int, int]]) -> Case:
    config = model.config
    blocks = [-(-(past + new) // BLOCK_TOKENS) for past, new in sizes]
    spec = KvSpec(config.num_key_value_heads, config.head_dim)
    kv = PagedKv(
        [spec] * config.num_hidden_layers,
        num_blocks=sum(blocks),
        block_size_tokens=BLOCK_TOKENS,
        dtype=model.dtype,
        device=model.device,
    )
    for pool in (*kv.keys, *kv.values):
        pool.normal_()
    order = torch.randperm(sum(blocks)).tolist()
    steps = [
        SequenceStep([order.pop() for _ in range(count)], past, new)
        for count, (past, new) in zip(blocks, sizes, strict=True)
    ]
    num_rows = sum(new for _, new in sizes)
    embeds = model.get_input_embeddings()(torch.randint(0, config.vocab_size, (num_rows,)))
    positions = torch.cat([torch.arange(past, past + new) for past, new in sizes])[None]
    return Case(model, *native, embeds, positions, build_batch(kv, steps))


def best_ms(call: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",") if part]  # noqa: E731
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--prefill", type=numbers, default=[90, 512, 1024])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()

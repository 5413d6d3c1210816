"""Preempted and not: with too few blocks for all, two real families still give the tokens of stock `generate`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from triptych.core.config import EngineConfig, MediaConfig
from triptych.core.events import FinalEvent, TokenEvent
from triptych.media.plane import MediaPlane
from triptych.models.paged_attention import PagedKv
from triptych.models.registry import load_served_model
from triptych.prompt.builder import load_prompt_builder
from triptych.understand.engine import InProcessEngine

from .conftest import FAMILIES, PREPROCESSOR, stock_greedy, stock_inputs, tiny, write_folder
from .test_whole_path_qwen import prepare_chat

NUM_NEW, BLOCK_TOKENS = 40, 8
CONVERSATIONS = [
    [("user", ["how many red is the"])],
    [("user", [(60, 60, 1), "how many red"])],
    [("user", [(90, 60, 2), "is"]), ("assistant", ["the"]), ("user", [(40, 70, 3), "how"])],
]


def qwen():
    model, words = tiny("Qwen2_5_VLForConditionalGeneration")
    return model, words, PREPROCESSOR, stock_inputs(words)


def smolvlm():
    family = FAMILIES["smolvlm"]
    model, words = family.build()
    return model, words, family.preprocessor, family.stock_inputs


@pytest.mark.parametrize("make", [qwen, smolvlm], ids=lambda make: make.__name__)
async def test_preempted_tokens_are_the_stock_models(make, tmp_path):
    """Blocks for every prompt and one more, so that growing takes from the youngest, who has two pictures; with the
    prefix cache (its blocks come back) and without (pictures and prompt are computed again)."""
    model, words, preprocessor, inputs = make()
    folder = write_folder(tmp_path, model, words, preprocessor=preprocessor)
    builder = load_prompt_builder(str(folder), dtype="float32")
    served = load_served_model(folder, "float32", "cpu")
    async with MediaPlane(MediaConfig()) as plane:
        requests = [await prepare_chat(builder, plane, i, turns, NUM_NEW) for i, turns in enumerate(CONVERSATIONS)]
    builder.close()
    prompts = [SimpleNamespace(expanded=SimpleNamespace(token_ids=r.token_ids), items=r.items) for r in requests]
    expected = [
        stock_greedy(model, NUM_NEW, input_ids=torch.tensor([p.expanded.token_ids]), **inputs(p)) for p in prompts
    ]

    roomy = sum(blocks_of(request, NUM_NEW) for request in requests)
    tight = sum(blocks_of(request, 0) for request in requests) + 1
    for num_blocks, prefix_cache, is_preempted in ((roomy, True, False), (tight, True, True), (tight, False, True)):
        tokens, finals, stats = await answers(served, requests, num_blocks, prefix_cache=prefix_cache)
        assert expected == tokens, (num_blocks, prefix_cache)
        assert (stats["num_preemptions"] > 0) == is_preempted
        assert (finals[-1].counters["preemptions"] > 0) == is_preempted


def blocks_of(request, num_new):
    return -(-(len(request.token_ids) + num_new) // BLOCK_TOKENS)


async def answers(served, requests, num_blocks, *, prefix_cache):
    block_bytes = PagedKv.block_bytes(served.info.kv, BLOCK_TOKENS, served.dtype)
    config = EngineConfig(
        dtype="float32",
        kv_cache_bytes=num_blocks * block_bytes,
        block_size_tokens=BLOCK_TOKENS,
        prefix_cache=prefix_cache,
    )
    engine = InProcessEngine(served, config, load_tokenizer=lambda: None)
    await engine.start()
    try:
        done = await asyncio.gather(*(answer(engine, request) for request in requests))
        return [tokens for tokens, _ in done], [final for _, final in done], await engine.stats()
    finally:
        await engine.close()


async def answer(engine, request):
    tokens = []
    async for event in engine.submit(request):
        if isinstance(event, TokenEvent):
            tokens += event.token_ids
        elif isinstance(event, FinalEvent):
            assert event.error_message is None, event.error_message
            return tokens, event
    raise AssertionError("no final event")

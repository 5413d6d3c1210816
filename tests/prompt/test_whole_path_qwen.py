"""Qwen-VL kinds through prompt builder and engine, side by side: the tokens of stock `generate`, each alone."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from triptych.core.config import EngineConfig, MediaConfig, Tier
from triptych.core.events import FinalEvent, TokenEvent
from triptych.core.media import MediaRef, Modality
from triptych.core.sampling import SamplingParams
from triptych.core.stages import StageClock
from triptych.media.plane import MediaPlane
from triptych.models.registry import load_served_model
from triptych.prompt.builder import load_prompt_builder
from triptych.understand.engine import InProcessEngine

from .conftest import PREPROCESSOR, PREPROCESSOR3, drawing, stock_greedy, stock_inputs, tiny, tiny_qwen3, write_folder

NUM_NEW = 8
MAKERS = {
    "qwen2-vl": (lambda: tiny("Qwen2VLForConditionalGeneration"), PREPROCESSOR),
    "qwen2.5-vl": (lambda: tiny("Qwen2_5_VLForConditionalGeneration"), PREPROCESSOR),
    "qwen3-vl": (tiny_qwen3, PREPROCESSOR3),
}
CONVERSATIONS = [
    [("user", [(90, 60, 1), "how many red", (40, 120, 2)]), ("assistant", ["the"]), ("user", [(33, 33, 3), "is"])],
    [("user", ["how many red is the"])],
    [("user", [(120, 50, 4)])],
]


def messages_of(turns):
    return [{"role": role, "content": [_part(part) for part in parts]} for role, parts in turns]


def _part(part):
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = io.BytesIO()
    Image.fromarray(drawing(*part).pixels).save(data, "PNG")
    return MediaRef(Modality.IMAGE, data.getvalue(), param="p")


@pytest.mark.parametrize("name", MAKERS)
async def test_answers_are_the_stock_models(name, tmp_path):
    """Three conversations at once, in chunks, then again from the caches: token for token."""
    make, preprocessor = MAKERS[name]
    model, words = make()
    folder = write_folder(tmp_path, model, words, preprocessor=preprocessor)
    builder = load_prompt_builder(str(folder), dtype="float32")
    config = EngineConfig(dtype="float32", kv_cache_bytes=4 * 2**20, block_size_tokens=16, max_step_tokens=48)
    engine = InProcessEngine(
        load_served_model(folder, "float32", "cpu"), config, load_tokenizer=lambda: builder.tokenizer
    )
    async with MediaPlane(MediaConfig()) as plane:
        requests = [
            await prepare_chat(builder, plane, index, turns, NUM_NEW) for index, turns in enumerate(CONVERSATIONS)
        ]
    expected = [stock_greedy(model, NUM_NEW, **_stock(request, words)) for request in requests]
    await engine.start()
    try:
        cold = await asyncio.gather(*(_answer(engine, request) for request in requests))
        again = [replace(request, request_id=f"again-{request.request_id}") for request in requests]
        warm = await asyncio.gather(*(_answer(engine, request) for request in again))
    finally:
        await engine.close()
        builder.close()

    assert expected == cold
    assert expected == warm


async def prepare_chat(builder, plane, index, turns, num_new):
    """A conversation as a greedy request `r-<index>`."""
    return await builder.prepare_chat(
        messages_of(turns),
        sampling=SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True),
        media=plane,
        tier=Tier(),
        tenant="acme",
        request_id=f"r-{index}",
        arrival_s=0.0,
        clock=StageClock(0.0),
    )


def _stock(request, words):
    prompt = SimpleNamespace(expanded=SimpleNamespace(token_ids=request.token_ids), items=request.items)
    return {"input_ids": torch.tensor([request.token_ids])} | stock_inputs(words)(prompt)


async def _answer(engine, request):
    tokens = []
    async for event in engine.submit(request):
        if isinstance(event, TokenEvent):
            tokens += event.token_ids
        elif isinstance(event, FinalEvent):
            assert event.error_message is None, event.error_message
    return tokens

"""An engine on the toy model, and requests for it."""

import asyncio

import pytest
import torch

from triptych.core.config import EngineConfig
from triptych.core.events import FinalEvent, TokenEvent
from triptych.core.prepared import PreparedRequest, Span
from triptych.core.sampling import SamplingParams
from triptych.testing.toy_model import ToyModel
from triptych.understand.engine import InProcessEngine

SMALL = EngineConfig(
    kv_cache_bytes=2**20,
    block_size_tokens=4,
    max_step_tokens=32,
    encoder_cache_bytes=64 * 32 * 4,
    encoder_step_tokens=16,
)


def no_tokenizer():
    raise AssertionError("no grammar in this test")


def request_of(name, parts, max_tokens=6, **sampling):
    """`parts`: ints are text tokens, toy items are pictures."""
    tokens, spans, items = [], [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            spans.append(Span(len(tokens), part.num_embeds, len(items)))
            tokens += [159] * part.num_embeds
            items.append(part)
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
    return PreparedRequest(name, tokens, params, tuple(spans), tuple(items))


async def collect(engine, request):
    """(token ids, final event), and the check that nothing follows the final event."""
    tokens, finals = [], []
    async for event in engine.submit(request):
        assert not finals
        if isinstance(event, TokenEvent):
            tokens += event.token_ids
        elif isinstance(event, FinalEvent):
            finals.append(event)
    assert len(finals) == 1
    return tokens, finals[0]


async def run_all(requests, config=SMALL, model=None):
    """All at once on one engine: {id: (tokens, final)}, and the engine's stats when all is over."""
    engine = InProcessEngine(model or ToyModel(), config, load_tokenizer=no_tokenizer)
    return await run_on(engine, requests)


async def run_on(engine, requests):
    await engine.start()
    try:
        results = await asyncio.gather(*(collect(engine, request) for request in requests))
        return dict(zip([r.request_id for r in requests], results, strict=True)), await engine.stats()
    finally:
        await engine.close()


@pytest.fixture(scope="session")
def reference():
    """Greedy tokens by a plain float32 loop over the whole sequence, through transformers' own attention."""
    model = ToyModel()
    model.language.set_attn_implementation("eager")

    def generate(request, max_tokens=None):
        ids = list(request.token_ids)
        with torch.inference_mode():
            media = [model.encode([item])[0] for item in request.items]
            for _ in range(max_tokens or request.sampling.max_tokens):
                embeds = model.embed(torch.tensor(ids))
                for span in request.spans:
                    rows = media[span.item_idx][span.embed_offset : span.embed_offset + span.length]
                    embeds[span.start : span.end] = rows
                hidden = model.language(inputs_embeds=embeds[None], use_cache=False).last_hidden_state[0, -1:]
                ids.append(int(model.logits(hidden).argmax()))
        return ids[len(request.token_ids) :]

    return generate

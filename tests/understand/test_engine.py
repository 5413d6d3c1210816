"""The engine on a toy model: right tokens whoever shares the batch, faults that stay with their request."""

import asyncio
import math
from dataclasses import replace

import msgspec
import pytest
import torch

from tests.understand.conftest import SMALL, collect, no_tokenizer, request_of, run_all
from triptych.core.errors import InternalError
from triptych.core.events import FinishReason
from triptych.core.prepared import Span
from triptych.testing.toy_model import ToyModel, toy_item
from triptych.understand.engine import InProcessEngine
from triptych.understand.pace import Pace


def workload():
    return [
        request_of("text", [1, 2, 3, 4, 5, 6, 7]),
        request_of("picture", [5, toy_item(b"one", 9), 6, 7]),
        request_of("two", [9, toy_item(b"two", 5), 8, toy_item(b"one", 9), 3, 4]),
        request_of("long", [*range(1, 60)], max_tokens=20),
        request_of("shared", [*range(1, 60), toy_item(b"three", 12), 5], max_tokens=20),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"max_step_tokens": 5},
        {"max_running": 1},
        {"kv_cache_bytes": 40 * 1024, "max_running": 3},
        {"encoder_cache_bytes": 12 * 32 * 4},
        {"prefix_cache": False, "block_size_tokens": 8},
    ],
)
async def test_tokens_equal_the_reference(change, reference):
    """Chunked, alone, preempted, with a cache for one item: the tokens do not change."""
    config = msgspec.structs.replace(SMALL, **change)

    results, stats = await run_all(workload(), config)

    for request in workload():
        tokens, final = results[request.request_id]
        assert (reference(request), FinishReason.LENGTH) == (tokens, final.reason), request.request_id
    assert stats["kv_blocks_used"] == stats["num_running"] == stats["num_waiting_items"] == 0


async def test_preemption_happens_and_changes_nothing(reference):
    """With too few blocks for all, somebody is preempted, and the tokens are still right."""
    requests = [request_of(f"r{i}", [i + 1] * 10 + [i], max_tokens=30) for i in range(4)]
    block_bytes = 2 * 2 * 2 * 8 * 4 * 4  # layers, keys and values, heads, dim, float32, tokens
    config = msgspec.structs.replace(SMALL, kv_cache_bytes=16 * block_bytes)

    results, stats = await run_all(requests, config)

    assert stats["num_preemptions"] > 0
    assert [reference(r) for r in requests] == [results[r.request_id][0] for r in requests]


async def test_poisoned_items_fail_alone(reference):
    """NaN from the encoder, an exception in it, a wrong count: each fails its own request; the others' tokens stay."""
    good = request_of("count", [1, toy_item(b"c", 4), 2])
    wrong_count = replace(good, spans=(Span(1, 3, 0),))
    poison = [
        request_of("nan", [1, toy_item(b"nan", 4, fill=math.nan), 2]),
        request_of("raises", [1, toy_item(b"inf", 4, fill=math.inf), 2]),
        wrong_count,
        request_of("huge", [1, toy_item(b"huge", 65), 2]),
        request_of("empty", []),
        request_of("endless", [1] * 600),
        request_of("vocab", [1, 2, 100_000]),
    ]

    results, stats = await run_all([*poison, *workload()])

    codes = {r.request_id: results[r.request_id][1].error_code for r in poison}
    assert codes == {
        "nan": "model_fault",
        "raises": "model_fault",
        "count": "prompt_refused",
        "huge": "budget_exceeded",
        "empty": "prompt_refused",
        "endless": "budget_exceeded",
        "vocab": "prompt_refused",
    }
    assert all(results[r.request_id][0] == reference(r) for r in workload())
    assert stats["kv_blocks_used"] == 0


async def test_leaving_the_stream_cancels():
    """A client that goes away frees its blocks within a step, in the middle of an encode too."""
    model = ToyModel(num_tower_layers=50)
    model.toy_tower.layer_delay_s = 0.02
    engine = InProcessEngine(model, SMALL, load_tokenizer=no_tokenizer)
    await engine.start()
    stream = engine.submit(request_of("gone", [1, toy_item(b"slow", 8), 2]))
    waiting = asyncio.ensure_future(anext(stream))
    while not (await engine.stats())["num_running"]:
        pass
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    stats = await engine.stats()
    tokens, final = await collect(engine, request_of("next", [1, 2, 3]))
    await engine.close()

    assert stats["num_running"] == stats["kv_blocks_used"] == 0
    assert (len(tokens), final.reason) == (6, FinishReason.LENGTH)


async def tokens_during_an_encode(num_layers: int, max_decode_stall_ms: float) -> int:
    """What a text stream gets while a tower of that many layers, 10 ms each, encodes a picture."""
    model = ToyModel(num_tower_layers=num_layers)
    model.toy_tower.layer_delay_s = 0.01
    config = msgspec.structs.replace(SMALL, max_decode_stall_ms=max_decode_stall_ms)
    engine = InProcessEngine(model, config, load_tokenizer=no_tokenizer)
    await engine.start()
    order = []

    async def follow(request):
        async for event in engine.submit(request):
            if hasattr(event, "token_ids"):
                order.append(request.request_id)

    text = asyncio.create_task(follow(request_of("text", [1, 2, 3], max_tokens=200)))
    while order.count("text") < 3:
        await engine.stats()
    before = len(order)
    picture = asyncio.create_task(follow(request_of("picture", [1, toy_item(b"slow", 8), 2], max_tokens=1)))
    await asyncio.gather(text, picture)
    await engine.close()
    return order.index("picture") - before


async def test_decode_goes_on_while_a_picture_is_encoded():
    """The encoder gives way at layer edges: a text stream gets many tokens during one long encode (F9)."""
    assert await tokens_during_an_encode(40, max_decode_stall_ms=20.0) >= 10


async def test_where_a_layer_takes_longer_than_the_bound_two_go_between_decode_steps():
    """Forty layers, each ten times the bound: a token after every second one, and a few around the encode."""
    assert 15 <= await tokens_during_an_encode(40, max_decode_stall_ms=1.0) <= 24


def test_prefill_takes_as_long_as_the_slices_of_the_encoder():
    """100 ms are two layers' time here, more than the bound: 50 tokens of 2 ms, and 20 before the encoder is known."""
    pace = Pace(max_decode_stall_ms=40.0, max_step_tokens=1000)
    pace.prefill_ms_per_token = 2.0
    before = pace.prefill_cap_tokens(is_decoding=True)

    pace.note_slice(3, 0.150)

    assert (before, pace.prefill_cap_tokens(is_decoding=True)) == (20, 50)
    assert pace.prefill_cap_tokens(is_decoding=False) == 1000


async def test_same_seed_gives_the_same_text_in_any_company():
    """Random numbers come from the seed and the token's index alone."""
    seeded = request_of("seeded", [3, 1, 4, 1, 5], max_tokens=12, temperature=1.0, seed=11)
    others = [request_of(f"o{i}", [i + 1, 2], max_tokens=9, temperature=1.0) for i in range(5)]

    alone, _ = await run_all([seeded])
    crowd, _ = await run_all([*others, seeded])

    assert alone["seeded"][0] == crowd["seeded"][0]


async def test_stages_add_up_to_the_time_of_the_first_token():
    """The engine's stages sum to the time from submission to the first event, by construction."""
    engine = InProcessEngine(ToyModel(), SMALL, load_tokenizer=no_tokenizer)
    await engine.start()
    request = request_of("r", [1, toy_item(b"one", 9), 2])
    async for event in engine.submit(request):
        first = event
        break
    await engine.close()

    assert first.stage_ms.keys() >= {"encoder_queue_ms", "vision_encode_ms", "llm_queue_ms", "llm_prefill_ms"}


async def test_closing_ends_every_stream():
    """Close cancels what runs: each stream still gets its final event."""
    engine = InProcessEngine(ToyModel(), SMALL, load_tokenizer=no_tokenizer)
    await engine.start()
    running = asyncio.create_task(collect(engine, request_of("r", [1, 2], max_tokens=400)))
    await asyncio.sleep(0.05)
    await engine.close()

    assert (await running)[1].reason is FinishReason.CANCELLED


async def test_sampling_parameters_cannot_hurt_the_engine(reference):
    """Ids outside the vocabulary are refused; a grammar that raises in mid-stream fails its own request."""

    class Broken:
        def mask_logits(self, logits):
            raise RuntimeError("grammar gone wrong")

    engine = InProcessEngine(ToyModel(), SMALL, load_tokenizer=no_tokenizer)
    await engine.start()
    good, bad = request_of("good", [1, 2, 3], max_tokens=40), request_of("bad", [4, 5], max_tokens=40)
    tasks = [asyncio.create_task(collect(engine, r)) for r in (good, bad)]
    while (await engine.stats())["num_running"] < 2:
        pass
    await engine._ask(lambda core: setattr(core._sampling["bad"], "grammar", Broken()))
    (tokens, _), (_, failed) = await asyncio.gather(*tasks)
    _, refused = await collect(engine, request_of("ids", [1], stop_token_ids=(160,)))
    await engine.close()

    assert reference(good) == tokens
    assert (failed.error_code, refused.error_code) == ("model_fault", "invalid_request")


async def test_live_media_bytes_are_bounded():
    """Processor outputs are host memory: the request that would exceed the bound is told to come later."""
    model = ToyModel(num_tower_layers=20)
    model.toy_tower.layer_delay_s = 0.01
    requests = [request_of(f"r{i}", [1, toy_item(b"%d" % i, 8), 2]) for i in range(4)]
    config = msgspec.structs.replace(SMALL, max_media_bytes=2 * requests[0].num_media_bytes)

    results, stats = await run_all(requests, config, model)

    codes = [results[r.request_id][1].error_code for r in requests]
    assert codes == [None, None, "overloaded", "overloaded"]
    assert stats["live_media_bytes"] == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_engine_says_so():
    """A bug that ends the engine's thread ends the streams, and later requests get an answer too."""
    engine = InProcessEngine(ToyModel(), SMALL, load_tokenizer=no_tokenizer)
    await engine.start()

    def explode(core):
        raise SystemExit

    running = asyncio.create_task(collect(engine, request_of("r", [1, 2], max_tokens=400)))
    await engine.stats()
    engine._mailbox.post(explode)
    final = (await running)[1]
    late = (await collect(engine, request_of("late", [1])))[1]
    with pytest.raises(InternalError):
        await engine.stats()
    await engine.close()

    assert (final.error_message, late.error_message) == ("the engine stopped",) * 2


async def test_embedding_is_the_last_hidden_state_of_length_one():
    """A request for an embedding, in company: transformers' own last state, normalised; nothing is generated."""
    model = ToyModel()
    request = replace(request_of("e", [5, 6, 7, 8]), wants_embedding=True)
    engine = InProcessEngine(ToyModel(), SMALL, load_tokenizer=no_tokenizer)
    await engine.start()
    company = asyncio.create_task(collect(engine, request_of("text", [1, 2, 3])))
    events = [event async for event in engine.submit(request)]
    await company
    await engine.close()
    model.language.set_attn_implementation("eager")
    with torch.inference_mode():
        states = model.language(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False).last_hidden_state
    expected = torch.nn.functional.normalize(states[0, -1], dim=0)

    torch.testing.assert_close(expected, torch.tensor(events[0].vector), atol=1e-5, rtol=1e-5)
    assert (len(events), events[-1].num_output_tokens) == (2, 0)


async def test_a_grammar_that_cannot_be_built_fails_its_request_alone():
    """Whatever a tokenizer library raises, the engine answers and goes on."""

    def broken_tokenizer():
        raise ValueError("tokenizer of another size")

    engine = InProcessEngine(ToyModel(), SMALL, load_tokenizer=broken_tokenizer)
    await engine.start()
    _, failed = await collect(engine, request_of("json", [1, 2], grammar_kind="regex", grammar="a+"))
    tokens, _ = await collect(engine, request_of("next", [1, 2, 3]))
    await engine.close()

    assert failed.error_code == "model_fault"
    assert len(tokens) == 6


async def test_overload_says_when_to_come_back():
    """A full queue's refusal carries its own delay."""
    config = msgspec.structs.replace(SMALL, max_waiting=0)
    engine = InProcessEngine(ToyModel(), config, load_tokenizer=no_tokenizer)
    await engine.start()
    _, final = await collect(engine, request_of("r", [1]))
    await engine.close()

    assert final.error().retry_after_s == 2.0

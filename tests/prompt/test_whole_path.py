"""PNG bytes to tokens through the real media plane, prompt builder and engine, against the whole stock path.

Where the stock processor of a family can be built here, its prompt, pixels and greedy answer are the reference.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import transformers
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

from .conftest import FAMILIES, drawing, stock_greedy, write_folder

NUM_NEW = 8
STOCK = {
    "idefics3": (transformers.Idefics3Processor, dict(image_seq_len=4)),
    "smolvlm": (transformers.Idefics3Processor, dict(image_seq_len=4)),
    "llava-clip": (
        transformers.LlavaProcessor,
        dict(patch_size=7, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    ),
    "llava-dinov2": (
        transformers.LlavaProcessor,
        dict(patch_size=7, vision_feature_select_strategy="default", num_additional_image_tokens=1),
    ),
    "gemma3": (transformers.Gemma3Processor, dict(image_seq_length=16)),
}
NAMED = {
    "gemma3": dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"),
}


@pytest.fixture(scope="module", params=STOCK)
def family(request, tmp_path_factory):
    chosen = FAMILIES[request.param]
    chosen.named = NAMED.get(request.param, {})
    model, words = chosen.build()
    folder = write_folder(tmp_path_factory.mktemp(request.param), model, words, preprocessor=chosen.preprocessor)
    builder = load_prompt_builder(str(folder), dtype="float32")
    kind, options = STOCK[request.param]
    processor = kind(
        image_processor=builder.layout.image_processor, tokenizer=words, chat_template=words.chat_template, **options
    )
    yield folder, model, processor, builder
    builder.close()


def conversations():
    """(messages with PIL pictures, messages with PNG bytes): two pictures, three turns."""
    turns = [
        ("user", [drawing(90, 40, 1), "how many red"]),
        ("assistant", ["the"]),
        ("user", ["is the", drawing(33, 60, 2), "red"]),
    ]
    return [{"role": r, "content": [_stock(p) for p in parts]} for r, parts in turns], [
        {"role": r, "content": [_ours(p) for p in parts]} for r, parts in turns
    ]


def _stock(part):
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image", "image": Image.fromarray(part.pixels)}


def _ours(part):
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = io.BytesIO()
    Image.fromarray(part.pixels).save(data, "PNG")
    return MediaRef(Modality.IMAGE, data.getvalue(), param="p")


async def prepare(builder, messages, plane):
    return await builder.prepare_chat(
        messages,
        sampling=SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True),
        media=plane,
        tier=Tier(),
        tenant="acme",
        request_id="r-1",
        arrival_s=0.0,
        clock=StageClock(0.0),
    )


async def test_prompt_and_pixels_are_the_stock_processors(family):
    """The same token ids with their placeholders laid, the same pixel values to the bit."""
    _, _, processor, builder = family
    stock_messages, messages = conversations()
    expected = processor.apply_chat_template(
        stock_messages, tokenize=True, return_dict=True, return_tensors="np", add_generation_prompt=True
    )
    async with MediaPlane(MediaConfig()) as plane:
        request = await prepare(builder, messages, plane)
    pixels = np.concatenate([item.features["pixel_values"] for item in request.items])

    assert np.asarray(expected["input_ids"])[0].tolist() == request.token_ids
    assert np.array_equal(np.asarray(expected["pixel_values"]).reshape(-1, *pixels.shape[1:])[: len(pixels)], pixels)


async def test_answer_is_the_stock_models(family):
    """Through the engine, in chunks, twice (the second time from the caches): the tokens of stock `generate`."""
    folder, model, processor, builder = family
    stock_messages, messages = conversations()
    inputs = processor.apply_chat_template(
        stock_messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    wanted = ("input_ids", "pixel_values", "pixel_attention_mask", "token_type_ids")
    expected = stock_greedy(model, NUM_NEW, **{key: inputs[key] for key in wanted if key in inputs})
    config = EngineConfig(dtype="float32", kv_cache_bytes=4 * 2**20, block_size_tokens=16, max_step_tokens=48)
    served = load_served_model(folder, "float32", "cpu")
    engine = InProcessEngine(served, config, load_tokenizer=lambda: builder.tokenizer)
    await engine.start()
    try:
        async with MediaPlane(MediaConfig()) as plane:
            answers = [await _answer(engine, await prepare(builder, messages, plane)) for _ in range(2)]
    finally:
        await engine.close()

    assert [expected, expected] == answers


async def _answer(engine, request):
    tokens = []
    async for event in engine.submit(request):
        if isinstance(event, TokenEvent):
            tokens += event.token_ids
        elif isinstance(event, FinalEvent):
            assert event.error_message is None, event.error_message
    return tokens

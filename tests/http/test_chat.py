"""Chat through the stock `openai` client, whole and streamed."""

import json

import openai
import pytest
from toy_door import picture_message

USER = [{"role": "user", "content": "hello there"}]


def test_whole_answer(toy):
    """An answer comes back whole, with its usage."""
    answer = toy.client().chat.completions.create(model="toy", messages=USER)

    assert answer.choices[0].message.content == "hello there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 11
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 11


def test_streamed_answer_with_usage(toy):
    """A stream begins with the role, carries the text in pieces, and ends with usage when asked."""
    chunks = list(
        toy.client().chat.completions.create(
            model="toy", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello there"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 11


def test_stream_without_usage_has_none(toy):
    """Usage is sent only when asked for."""
    chunks = list(toy.client().chat.completions.create(model="toy", messages=USER, stream=True))

    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


def test_picture_in_several_turns(toy):
    """Pictures of several turns become items in order, and are counted."""
    messages = [
        picture_message("what is this?"),
        {"role": "assistant", "content": "a square"},
        picture_message("and this?"),
    ]
    answer = toy.client().chat.completions.create(model="toy", messages=messages)

    assert answer.choices[0].message.content == "and this?"
    assert len(toy.engine.seen[-1].items) == 2
    assert answer.usage.prompt_tokens_details.image_tokens == 8


def test_stages_in_usage_when_asked(toy):
    """The stage table adds up to the time to first token, streamed or not."""
    client = toy.client()
    whole = client.chat.completions.create(
        model="toy", messages=[picture_message("hi")], extra_body={"include_stages": True}
    )
    *_, last = client.chat.completions.create(
        model="toy", messages=[picture_message("hi")], stream=True, stream_options={"include_stages": True}
    )

    for usage in (whole.usage, last.usage):
        stages = dict(usage.model_extra["stages"])
        ttft_ms, _ = stages.pop("ttft_ms"), stages.pop("tpot_ms")
        assert ttft_ms > 0
        assert abs(sum(stages.values()) - ttft_ms) < 0.05
        assert {"request_parse_ms", "media_fetch_ms", "vision_encode_ms", "first_stream_ms"} <= stages.keys()


def test_stop_string_is_not_in_the_answer(toy):
    """Text up to the stop string is kept; the engine is told to stop."""
    answer = toy.client().chat.completions.create(model="toy", messages=USER, stop=[" the"])

    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 9
    assert toy.engine.finals[-1].reason == "cancelled"


def test_stop_string_in_a_stream(toy):
    """No part of a stop string leaks into a stream."""
    chunks = toy.client().chat.completions.create(model="toy", messages=USER, stop="there", stream=True)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello "


def test_max_tokens_ends_with_length(toy):
    """Both names of the limit work."""
    client = toy.client()
    old = client.chat.completions.create(model="toy", messages=USER, max_tokens=5)
    new = client.chat.completions.create(model="toy", messages=USER, max_completion_tokens=5)

    assert [old.choices[0].message.content, new.choices[0].message.content] == ["hello", "hello"]
    assert new.choices[0].finish_reason == "length"


def test_max_tokens_defaults_to_the_rest_of_the_context(toy):
    """Without a limit the answer may fill the context."""
    toy.client().chat.completions.create(model="toy", messages=USER)

    seen = toy.engine.seen[-1]
    assert seen.sampling.max_tokens + len(seen.token_ids) == 4096


def test_several_choices(toy):
    """Each choice is a request of its own with a seed of its own; the prompt is counted once."""
    answer = toy.client().chat.completions.create(model="toy", messages=USER, n=3, seed=7)

    assert [choice.message.content for choice in answer.choices] == ["hello there"] * 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [request.sampling.seed for request in toy.engine.seen] == [7, 8, 9]
    assert len({request.request_id for request in toy.engine.seen}) == 3
    assert answer.usage.completion_tokens == 33


def test_several_choices_in_a_stream(toy):
    """Chunks of several choices carry their index."""
    texts = {0: "", 1: ""}
    for chunk in toy.client().chat.completions.create(model="toy", messages=USER, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""

    assert texts == {0: "hello there", 1: "hello there"}


def test_logprobs(toy):
    """Log probabilities name tokens with their bytes and rivals, whole and streamed."""
    options = dict(model="toy", messages=USER, logprobs=True, top_logprobs=2)
    whole = toy.client().chat.completions.create(**options).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in toy.client().chat.completions.create(**options, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]

    assert [entry.token for entry in whole] == list("hello there")
    assert whole[0].bytes == [ord("h")]
    assert len(whole[0].top_logprobs) == 2
    assert streamed == whole


def test_characters_of_several_tokens_stay_whole(toy):
    """A character that is spread over tokens is never cut in a stream."""
    messages = [{"role": "user", "content": "née 😀 中"}]
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in toy.client().chat.completions.create(model="toy", messages=messages, stream=True)
    ]

    assert "".join(pieces) == "née 😀 中"
    assert not any("\ufffd" in piece for piece in pieces)


def test_sampling_reaches_the_engine(toy):
    """OpenAI's sampling fields and ours arrive as they were written."""
    toy.client().chat.completions.create(
        model="toy",
        messages=USER,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"5": 3},
        extra_body=dict(
            top_k=40, min_p=0.05, repetition_penalty=1.1, min_tokens=2, stop_token_ids=[9], cache_salt="s", priority=4
        ),
    )

    seen = toy.engine.seen[-1]
    sampling = seen.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, -0.1, 1.1)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.logit_bias) == (2, (9,), {5: 3.0})
    assert (seen.priority, seen.cache_salt) == (4, b"public/s")


@pytest.mark.parametrize(
    ("response_format", "grammar"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}, {"type": "integer"}),
    ],
)
def test_response_format_becomes_a_grammar(toy, response_format, grammar):
    """JSON mode and JSON schemas are the engine's grammar."""
    toy.client().chat.completions.create(model="toy", messages=USER, response_format=response_format)

    sampling = toy.engine.seen[-1].sampling
    held = json.loads(sampling.grammar)
    assert sampling.grammar_kind == "json_schema"
    assert "whitespace_pattern" in held.pop("x-guidance")
    assert held == grammar


TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def test_tool_call_that_the_model_makes(toy):
    """A call in the model's own form becomes OpenAI's, whole and streamed."""
    options = dict(model="toy", messages=[{"role": "user", "content": f"Let me see. {CALL}"}], tools=TOOLS)
    whole = toy.client().chat.completions.create(**options).choices[0]
    chunks = list(toy.client().chat.completions.create(**options, stream=True))
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]

    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me see."
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    assert (streamed[0].function.name, streamed[0].index) == ("weather", 0)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "<tool_call>" not in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_tool_choice_none_leaves_the_text(toy):
    """With tool_choice none nothing is parsed, and the template hears of no tools."""
    answer = toy.client().chat.completions.create(
        model="toy", messages=[{"role": "user", "content": CALL}], tools=TOOLS, tool_choice="none"
    )

    assert answer.choices[0].message.content == CALL
    assert b"weather" not in bytes(t for t in toy.engine.seen[-1].token_ids[:20] if t < 256)


def test_named_tool_is_forced_by_grammar(toy):
    """A named tool holds the answer to its parameters' schema, and the answer is its arguments."""
    answer = toy.client().chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": '{"city": "Rome"}'}],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )

    assert TOOLS[0]["function"]["parameters"].items() <= json.loads(toy.engine.seen[-1].sampling.grammar).items()
    call = answer.choices[0].message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})


def test_required_tools_are_forced_by_grammar(toy):
    """Required tools hold the answer to a list of calls."""
    text = '[{"name": "weather", "arguments": {"city": "Rome"}}]'
    answer = toy.client().chat.completions.create(
        model="toy", messages=[{"role": "user", "content": text}], tools=TOOLS, tool_choice="required"
    )

    assert json.loads(toy.engine.seen[-1].sampling.grammar)["items"]["anyOf"][0]["properties"]["name"] == {
        "const": "weather"
    }
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def test_tool_results_go_back_into_the_prompt(toy):
    """The tool's turn is rendered like any other."""
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = toy.client().chat.completions.create(model="toy", messages=messages, tools=TOOLS)

    assert answer.choices[0].message.content == "rain"


def test_media_id_stands_for_the_content_later(toy):
    """A picture that was sent with an id may be named by it alone; an unknown one is refused."""
    client = toy.client()
    client.chat.completions.create(model="toy", messages=[picture_message("one", media_id="cat")])
    again = [{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "cat"}]}]
    client.chat.completions.create(model="toy", messages=again, max_tokens=1)

    assert toy.engine.seen[0].items[0].key == toy.engine.seen[1].items[0].key
    unknown = [{"role": "user", "content": [{"type": "image_url", "media_id": "dog"}]}]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="toy", messages=unknown)
    assert refusal.value.code == "unknown_media_id"
    assert refusal.value.param == "messages.0.content.0"


async def test_async_client(toy):
    """The asynchronous client streams as well."""
    async with openai.AsyncOpenAI(base_url=f"{toy.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model="toy", messages=USER, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert text == "hello there"

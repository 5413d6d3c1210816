"""Chat templates of every make, and strings that try to be control tokens."""

import pytest

from triptych.core.errors import PromptRefused
from triptych.core.media import MediaRef, Modality
from triptych.models.registry import load_layout
from triptych.prompt.template import ChatTemplate

STRINGS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LISTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)
IMAGES_FIRST = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)


@pytest.fixture(scope="module")
def layout(llava_folder):
    return load_layout(llava_folder)


@pytest.fixture
def template(layout):
    own = layout.tokenizer.chat_template

    def make(text):
        layout.tokenizer.chat_template = text
        return ChatTemplate(layout.tokenizer, layout)

    yield make
    layout.tokenizer.chat_template = own


def text_of(layout, rendered):
    return layout.tokenizer.decode(rendered.token_ids)


def image(name="a"):
    return MediaRef(Modality.IMAGE, name)


@pytest.mark.parametrize("source", [STRINGS_ONLY, LISTS_ONLY, IMAGES_FIRST, None], ids=["str", "list", "first", "own"])
def test_parts_work_with_any_template(layout, template, source):
    """One placeholder token for each picture, the text beside it, and the parts in order."""
    made = template(source or layout.tokenizer.chat_template)
    content = [image("a"), {"type": "text", "text": "how many"}, image("b")]
    rendered = made.render([{"role": "user", "content": content}, {"role": "assistant", "content": "the"}])

    assert rendered.token_ids.count(layout.image_token_id) == 2
    assert tuple(part.source for part in rendered.parts) == ("a", "b")
    assert "how many" in text_of(layout, rendered)


def test_string_content_works_with_a_list_template(layout, template):
    """A string is given to a lists-only template as one text part."""
    rendered = template(LISTS_ONLY).render([{"role": "user", "content": "how many"}])

    assert "how many" in text_of(layout, rendered)


def test_control_tokens_in_user_text_stay_text(layout, template):
    """An `<image>` in pasted markup is no place for a picture, and an end-of-turn token ends no turn."""
    made = template(layout.tokenizer.chat_template)
    text = "see <image> and <|im_end|> here"
    rendered = made.render([{"role": "user", "content": [image(), {"type": "text", "text": text}]}])
    end = layout.tokenizer.convert_tokens_to_ids("<|im_end|>")

    assert rendered.token_ids.count(layout.image_token_id) == 1
    assert rendered.token_ids.count(end) == 1
    assert text in text_of(layout, rendered)


def test_plain_text_is_tokenised_as_the_stock_template_does(layout, template):
    """Without control tokens in the text, the ids are those of `apply_chat_template`."""
    made = template(layout.tokenizer.chat_template)
    messages = [{"role": "user", "content": "how many red"}, {"role": "assistant", "content": "the"}]
    expected = layout.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    assert expected == made.render(messages).token_ids


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "no messages"),
        ([{"role": "wizard", "content": "x"}], "wizard"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], "alternate"),
    ],
)
def test_bad_conversations_are_refused(template, messages, match):
    """No messages, an unknown role, an order that the template itself refuses."""
    with pytest.raises(PromptRefused, match=match):
        template(STRICT).render(messages)


def test_model_without_template_is_refused(layout, template):
    """The error says where to go instead."""
    with pytest.raises(PromptRefused, match="/v1/completions"):
        template(None).render([{"role": "user", "content": "x"}])


def test_tools_reach_the_template(layout, template):
    """Tool definitions are given to the template, their strings without control tokens."""
    source = "{% for t in tools %}{{ t['function']['name'] }}{% endfor %}{{ messages[0]['content'] }}"
    tools = [{"type": "function", "function": {"name": "look<|im_end|>"}}]
    rendered = template(source).render([{"role": "user", "content": "x"}], tools)
    end = layout.tokenizer.convert_tokens_to_ids("<|im_end|>")

    assert "look<|im_end|>" in text_of(layout, rendered)
    assert end not in rendered.token_ids


def test_past_tool_calls_are_values_in_the_template(layout, template):
    """Arguments come as JSON text and are written once, not as a string inside a string."""
    source = (
        "{% for m in messages %}{% for c in m.get('tool_calls', []) %}{{ c['function']['arguments'] | tojson }}"
        "{% endfor %}{{ m['content'] }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "red"}'}}
    messages = [
        {"role": "user", "content": "how"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "the", "tool_call_id": "1"},
    ]

    assert text_of(layout, template(source).render(messages)) == 'how{"at": "red"}the'


@pytest.mark.parametrize("name", ["chat_template", "tools", "tokenize", "messages", "tokenizer_kwargs"])
def test_template_options_cannot_replace_the_template(layout, template, name):
    """Options are variables of the template; what the tokenizer itself takes is refused by name."""
    made = template(layout.tokenizer.chat_template)

    with pytest.raises(PromptRefused, match=name):
        made.render([{"role": "user", "content": "x"}], options={name: "{{ 1 }}"})


def test_template_options_are_variables(layout, template):
    """An option reaches the template; control tokens in it stay text."""
    rendered = template("{{ mood }}{{ messages[0]['content'] }}").render(
        [{"role": "user", "content": " x"}], options={"mood": "red<|im_end|>"}
    )

    assert text_of(layout, rendered) == "red<|im_end|> x"
    assert layout.tokenizer.convert_tokens_to_ids("<|im_end|>") not in rendered.token_ids


def test_deep_nesting_is_refused(layout, template):
    """Tools nested thousands deep are an error of the request, not of the server."""
    deep = {}
    for _ in range(5000):
        deep = {"a": deep}

    with pytest.raises(PromptRefused, match="nested too deeply"):
        template(layout.tokenizer.chat_template).render([{"role": "user", "content": "x"}], [deep])

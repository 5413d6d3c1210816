"""Tool calls in an answer, however it is cut into pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.prompt import ToolCall, ToolCallStream, ToolStyle, tool_style

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
LLAMA = '{"name": "look", "parameters": {"at": 1}}'


def run(style, text, size):
    stream = ToolCallStream(style)
    out = "".join(stream.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = stream.finish()
    return out + rest, calls


@given(size=st.integers(1, 30), before=st.text("ab <{", max_size=12))
def test_hermes_calls_in_any_pieces(size, before):
    """Text before is kept, calls are parsed, none of the markup is given out."""
    text, calls = run(ToolStyle.HERMES, before + CALL + "\n" + CALL, size)

    assert before.strip() == text.strip()
    assert [ToolCall("look", '{"at": "é"}')] * 2 == calls


@given(size=st.integers(1, 30), tag=st.sampled_from(["", "<|python_tag|>", " \n"]))
def test_llama_calls_in_any_pieces(size, tag):
    """A bare object, or one after the tag; several are parted by semicolons."""
    text, calls = run(ToolStyle.LLAMA_JSON, f"{tag}{LLAMA}; {LLAMA}", size)

    assert text.strip() == ""
    assert [ToolCall("look", json.dumps({"at": 1}))] * 2 == calls


@given(text=st.text('<tool_cal>{}"name: é\n', max_size=60), size=st.integers(1, 9), style=st.sampled_from(ToolStyle))
def test_text_without_calls_is_untouched(text, size, style):
    """Whatever looks like the beginning of a call and is none comes out as it went in."""
    out, calls = run(style, text, size)

    assert (text, []) == (out, calls)


def test_cut_call_is_text():
    """An answer cut off inside a call loses nothing."""
    text, calls = run(ToolStyle.HERMES, "so " + CALL[:30], 4)

    assert ("so " + CALL[:30], []) == (text, calls)


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", ToolStyle.HERMES),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", ToolStyle.LLAMA_JSON),
    ],
)
def test_style_follows_the_template(template, style):
    """The form is the one that the chat template teaches."""
    assert style == tool_style(template)

"""Ids to text as they come: the pieces join to the whole, and no stop string leaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.prompt import Detokenizer

from .conftest import tiny


@pytest.fixture(scope="module")
def words():
    return tiny("Qwen2VLForConditionalGeneration")[1]


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


@given(text=texts, sizes=st.lists(st.integers(1, 5), min_size=1))
def test_pieces_join_to_the_whole(words, text, sizes):
    """However the tokens are grouped, the pieces are the text, and no piece ends inside a character."""
    ids = words.encode(text, add_special_tokens=False)
    expected = words.decode(ids, skip_special_tokens=True)
    stream, pieces, index = Detokenizer(words), [], 0
    while index < len(ids):
        step = sizes[len(pieces) % len(sizes)]
        pieces.append(stream.push(ids[index : index + step]))
        index += step
    pieces.append(stream.finish())

    assert expected == "".join(pieces)


@given(text=texts, stop=st.text("ab ", min_size=1, max_size=4))
def test_text_ends_before_the_first_stop_string(words, text, stop):
    """With a stop string, what is given out is the text before it, token by token, never a part of it."""
    text = text + "ab a" + stop + "tail"
    ids = words.encode(text, add_special_tokens=False)
    whole = words.decode(ids, skip_special_tokens=True)
    stream = Detokenizer(words, [stop])
    out = ""
    for token in ids:
        out += stream.push([token])
        assert stop not in out
    out += stream.finish()

    assert whole[: whole.index(stop)] == out
    assert (True, stop) == (stream.stopped, stream.stop_string)


def test_stop_can_be_included(words):
    """`include_stop` keeps the stop string itself."""
    stream = Detokenizer(words, ["many"], include_stop=True)

    assert stream.push(words.encode("how many red")) + stream.finish() == "how many"


def test_bytes_that_are_no_text_do_not_stall(words):
    """A run of stray bytes comes out as replacement characters at last, not never."""
    stray = words.convert_tokens_to_ids("ÿ")
    stream = Detokenizer(words)
    out = stream.push([stray] * 20) + stream.push(words.encode("red"))

    assert out.endswith("red")
    assert "\ufffd" in out


def test_special_tokens_are_silent(words):
    """End-of-turn tokens have no text."""
    stream = Detokenizer(words)

    assert stream.push([*words.encode("red"), words.eos_token_id]) + stream.finish() == "red"

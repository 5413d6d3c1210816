"""The public names, and `triptych.Engine`: the server's own rooms in this process."""

import subprocess
import sys

import pytest

import triptych
from tests.http.tiny_folder import make_tiny_text
from triptych import Engine, SamplingParams
from triptych.core.errors import PromptRefused, UnknownModel


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with Engine(str(make_tiny_text(tmp_path_factory.mktemp("model") / "tiny-text"))) as engine:
        yield engine


def test_public_names_are_sorted_and_there():
    """`__all__` is the whole interface."""
    assert sorted(triptych.__all__) == triptych.__all__
    assert all(getattr(triptych, name) is not None for name in triptych.__all__)


def test_importing_the_package_does_not_load_torch():
    """Pure rooms can be imported without paying for a tensor library."""
    code = "import sys, triptych.core.errors, triptych.understand.schedule.scheduler; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_and_many_give_the_same_text(engine):
    """Greedy answers do not depend on who shares the batch."""
    questions = [[{"role": "user", "content": f"say {word}"}] for word in ("a", "bb", "ccc")]
    params = SamplingParams(max_tokens=8, temperature=0.0)

    alone = [engine.chat(messages, sampling=params) for messages in questions]
    together = engine.chat_many(questions, sampling=params)

    assert [reply.text for reply in alone] == [reply.text for reply in together]
    assert [reply.token_ids for reply in alone] == [reply.token_ids for reply in together]
    assert alone[0].num_prompt_tokens > 0
    assert {"request_parse_ms", "llm_prefill_ms", "first_stream_ms"} <= alone[0].stage_ms.keys()


def test_refusals_are_raised_as_themselves(engine):
    """The leaf of the error tree reaches the caller, and the engine goes on."""
    with pytest.raises(PromptRefused, match="context"):
        engine.chat([{"role": "user", "content": "x" * 5000}])

    assert engine.ask("still there?", sampling=SamplingParams(max_tokens=2)).finish_reason


def test_a_model_that_is_not_there_is_named():
    """A wrong name fails at the start, with what can be had."""
    with pytest.raises(UnknownModel, match="no-such-model"):
        Engine("no-such-model").start()

"""A client that goes away: its request ends in whatever stage it is, streamed or not, and everything it held is free.

The server is a real one; each case makes one stage last (a source that does not answer, a slow decoder, a slow tower, a
slow language model), looks in `/metrics` until the request is in that stage, and hangs up.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from tests.served.conftest import Served
from tests.served.pictures import ask, image_part, picture
from triptych.media import decode as decoders
from triptych.models.qwen2_vl import Layout

LONG_S = 40.0  # what a stage would take if nobody ended it; no wait of these tests is as long
FEW_STEPS = 3  # the step that runs, and those between the hang-up and its reading


@contextlib.contextmanager
def sent(served: Served, body: dict[str, object]) -> Iterator[None]:
    """A client that has sent its request and waits; leaving the block is hanging up."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: user\r\nContent-Length: {len(data)}\r\n\r\n"
    address = urlsplit(served.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + data)
        yield


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)


def leave_in(served: Served, body: dict[str, object], is_there: Callable[[dict[str, float]], bool]) -> int:
    """Send, wait until `/metrics` show the request in its stage, hang up, wait until nothing is held. Returns how many
    engine steps went by after the hang-up."""
    cancelled = served.num_cancelled()
    with sent(served, body):
        wait_for(lambda: is_there(served.metrics()))
        before = served.metrics()
    served.wait_until_free()
    wait_for(lambda: served.num_cancelled() == cancelled + 1)
    return int(served.metrics()["triptych_engine_steps_total"] - before["triptych_engine_steps_total"])


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request) -> bool:
    return request.param


@pytest.fixture(autouse=True)
def _empty_and_alive(served) -> Iterator[None]:
    """Each case begins with empty caches, and the server answers after it."""
    served.flush()
    yield
    assert served.chat(ask("hello")).status_code == 200


def test_in_fetch(served, stream):
    """A source that does not answer is let go of."""
    served.sources.hold()
    held = served.sources.num_held
    try:
        body = ask("?", image_part(served.sources.url("/slow")), stream=stream)
        leave_in(served, body, lambda metrics: served.sources.num_held > held and metrics["media_fetch_queue"] == 1)
    finally:
        served.sources.release()


def test_in_decode(served, stream, monkeypatch):
    """A decoder that works in steps ends at its next one."""

    def slow(*args):
        for _ in range(int(LONG_S / 0.01)):
            time.sleep(0.01)
            yield
        return (yield from real(*args))

    real = decoders.decode
    monkeypatch.setattr(decoders, "decode", slow)
    body = ask("?", image_part(picture(1, 84, 84)), stream=stream)
    leave_in(served, body, lambda metrics: metrics["triptych_decode_workers_busy"] == 1)


def test_in_processor(served, stream, monkeypatch):
    """A processor's thread cannot be stopped: what it made is dropped, its caller is free at once."""
    started, go_on = threading.Event(), threading.Event()

    def slow(self, *args):
        started.set()
        go_on.wait(LONG_S)
        return real(self, *args)

    real = Layout.process
    monkeypatch.setattr(Layout, "process", slow)
    try:
        body = ask("?", image_part(picture(1, 84, 84)), stream=stream)
        leave_in(served, body, lambda metrics: started.is_set() and metrics["triptych_decode_workers_busy"] == 0)
    finally:
        go_on.set()


def test_in_the_encoders_queue(served, stream):
    """A picture that waits behind two others, each a job of four layers, is not encoded. The others run on: their
    answers are long, so that it is the third whose place is seen to be free."""
    with contextlib.ExitStack() as others, served.slow(layer_s=0.8, step_s=0.1):
        for index in range(2):
            others.enter_context(sent(served, ask("?", image_part(picture(index, 448, 448)), max_tokens=300)))
        wait_for(lambda: served.metrics()["triptych_running"] == 2)
        cancelled = served.num_cancelled()
        with sent(served, ask("?", image_part(picture(3, 448, 448)), stream=stream)):
            wait_for(lambda: served.metrics()["triptych_running"] == 3)
            assert served.metrics()["encoder_queue"] >= 1
        wait_for(lambda: served.num_cancelled() == cancelled + 1)
        wait_for(lambda: served.metrics()["triptych_running"] == 2)
        assert served.metrics()["encoder_queue"] <= 1
    served.wait_until_free()


def test_in_the_encoder(served, stream):
    """A picture in the tower is left at the next layer's edge: four layers of a second each would be four seconds."""
    with served.slow(layer_s=1.0):
        body = ask("?", image_part(picture(1, 84, 84)), stream=stream)
        misses = served.metrics()["triptych_cache_misses_total"]
        steps = leave_in(
            served, body, lambda m: m["triptych_running"] == 1 and m["triptych_cache_misses_total"] > misses
        )
    assert steps <= FEW_STEPS
    assert served.metrics()["encoder_entries"] == 0


def test_in_the_language_models_queue(served, stream):
    """A request that waits for a place among those that run is forgotten."""
    with contextlib.ExitStack() as running, served.slow(step_s=0.1):
        for index in range(4):
            running.enter_context(sent(served, ask(f"hello {index}", max_tokens=400)))
        wait_for(lambda: served.metrics()["triptych_running"] == 4)
        cancelled = served.num_cancelled()
        with sent(served, ask("hello", stream=stream)):
            wait_for(lambda: served.metrics()["llm_queue"] == 1)
        wait_for(lambda: served.metrics()["llm_queue"] == 0)
        wait_for(lambda: served.num_cancelled() == cancelled + 1)
        assert served.metrics()["triptych_running"] == 4
    served.wait_until_free()


def test_in_prefill(served, stream):
    """A long prompt is left between two of its windows: it has fourteen, of a third of a second each."""
    prompt = ask("red " * 1700, stream=stream)
    with served.slow(step_s=0.3):
        steps = leave_in(served, prompt, lambda m: m["triptych_running"] == 1 and m["triptych_kv_blocks_used"] > 50)
    assert steps <= FEW_STEPS


def test_in_decode_of_text(served, stream):
    """An answer of hundreds of tokens ends within a step."""
    tokens = ask("hello", max_tokens=1000, stream=stream)
    with served.slow(step_s=0.1):
        begun = served.metrics()["triptych_engine_steps_total"]
        steps = leave_in(served, tokens, lambda m: m["triptych_engine_steps_total"] > begun + 5)
    assert steps <= FEW_STEPS

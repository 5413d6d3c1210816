"""Limits on traffic by tier, and what becomes of a client that leaves."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import openai
import pytest
from hypothesis import given

from triptych.core.config import Config, Tier
from triptych.core.errors import RateLimited
from triptych.http.traffic import Traffic
from triptych.testing.toy_engine import ToyEngine, ToyTimes

USER = [{"role": "user", "content": "hello there"}]


@given(st.integers(1, 100), st.lists(st.floats(0, 30), max_size=300))
def test_no_minute_has_more_than_twice_the_limit(per_minute, gaps_s):
    """A bucket of one minute's depth: never more than the depth plus what was refilled, however requests come."""
    traffic, tier, now_s, starts = Traffic(), Tier(requests_per_minute=per_minute), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        with contextlib.suppress(RateLimited):
            traffic.reserve("t", tier, now_s)
            starts.append(now_s)
            traffic.release("t")
    for index, start_s in enumerate(starts):
        within = [s for s in starts[index:] if s <= start_s + 60]
        assert len(within) <= 2 * per_minute + 1


@given(st.integers(1, 60))
def test_waiting_as_told_is_enough(per_minute):
    """Whoever waits for retry_after_s gets in."""
    traffic, tier = Traffic(), Tier(requests_per_minute=per_minute)
    for _ in range(per_minute):
        traffic.reserve("t", tier, 0.0)
    with pytest.raises(RateLimited) as refusal:
        traffic.reserve("t", tier, 0.0)

    traffic.reserve("t", tier, refusal.value.retry_after_s + 1e-6)


def test_tenants_do_not_share_a_bucket():
    """One tenant's burst is not another's refusal."""
    traffic, tier = Traffic(), Tier(requests_per_minute=1, max_concurrent_requests=1)
    traffic.reserve("a", tier, 0.0)

    traffic.reserve("b", tier, 0.0)
    assert traffic.running("a") == traffic.running("b") == 1


def test_concurrency_limit_is_429(serve):
    """More at once than the tier allows: 429 with Retry-After, and the place comes back."""
    engine = ToyEngine(is_held=True)
    running = serve(Config(tiers={"default": Tier(max_concurrent_requests=1)}), engine)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: running.client().chat.completions.create(model="toy", messages=USER))
        wait_for(lambda: engine.num_running == 1)
        with pytest.raises(openai.RateLimitError) as refusal:
            running.client().chat.completions.create(model="toy", messages=USER)
        engine.is_held = False
        assert first.result().choices[0].message.content == "hello there"

    assert int(refusal.value.response.headers["retry-after"]) >= 1
    assert running.client().chat.completions.create(model="toy", messages=USER)


def test_rate_limit_is_429(serve):
    """The minute's requests are counted by tenant."""
    running = serve(Config(tiers={"default": Tier(requests_per_minute=2)}))
    for _ in range(2):
        running.client().chat.completions.create(model="toy", messages=USER)
    with pytest.raises(openai.RateLimitError) as refusal:
        running.client().chat.completions.create(model="toy", messages=USER)

    assert "requests_per_minute is 2" in refusal.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("before_first_token", [False, True])
def test_client_that_leaves_cancels_its_request(serve, stream, n, before_first_token):
    """A closed connection ends all choices in the engine, whole or streamed, waiting or running."""
    times = ToyTimes(prefill_s=30) if before_first_token else ToyTimes(token_s=0.02)
    engine = ToyEngine(times=times)
    running = serve(engine=engine)
    text = "x" * 1000
    body = f'{{"messages":[{{"role":"user","content":"{text}"}}],"n":{n},"stream":{str(stream).lower()}}}'
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        wait_for(lambda: engine.num_running == n)
        time.sleep(0.1)
    wait_for(lambda: engine.num_running == 0)

    assert [final.reason for final in engine.finals] == ["cancelled"] * n
    wait_for(lambda: running.front.num_in_flight == 0)
    record = running.front.ledger.recent()[0]
    assert (record.status, record.code) == (499, "cancelled")


def test_stopped_stream_of_the_openai_client_cancels(serve):
    """Closing the client's stream is leaving."""
    engine = ToyEngine(times=ToyTimes(token_s=0.02))
    running = serve(engine=engine)
    stream = running.client().chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "x" * 1000}], stream=True
    )
    next(iter(stream))
    stream.close()

    wait_for(lambda: engine.num_running == 0)
    assert engine.finals[0].reason == "cancelled"


def test_health_answers_while_requests_run(serve):
    """Many streams do not keep the health check waiting for long."""
    running = serve(engine=ToyEngine(times=ToyTimes(token_s=0.002)))
    body = {"messages": [{"role": "user", "content": "x" * 200}], "stream": True}
    with running.http() as http:
        path = "/v1/chat/completions"
        threads = [threading.Thread(target=http.post, args=(path,), kwargs={"json": body}) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert http.get("/health").status_code == 200
        for thread in threads:
            thread.join()


def wait_for(condition, timeout_s=10.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)

"""The load client against a server whose times are known."""

import asyncio

import pytest
from bench.load import Client, closed_loop, open_loop, split_events, steady_beside
from bench.work import WorkSpec, bodies, chat_body, poisson_offsets_s
from hypothesis import given
from hypothesis import strategies as st

NUM_TOKENS = 5


def made(kind="text", count=4):
    return bodies("toy", WorkSpec(kind, NUM_TOKENS, size_px=32), count)


async def test_stream_times_are_the_servers(toy_url):
    """TTFT holds the server's prefill, the whole holds its token times too, and all tokens are counted."""
    async with Client(toy_url(prefill_s=0.05, token_s=0.02)) as client:
        record = await client.send("text", made()[0])

    assert record.error is None
    assert record.num_output_tokens == len(record.texts_s) == NUM_TOKENS
    assert record.ttft_s >= 0.05
    assert record.e2e_s >= 0.05 + 4 * 0.02
    assert record.tpot_s == pytest.approx((record.texts_s[-1] - record.texts_s[0]) / 4)
    assert sum(record.gaps_s) == pytest.approx(4 * record.tpot_s)


async def test_pictures_arrive_as_pictures(toy_url):
    """A picture's placeholder tokens are in the prompt that the server counts."""
    async with Client(toy_url()) as client:
        text = await client.send("text", made("text")[0])
        picture = await client.send("unique", made("unique")[0])

    assert picture.error is None
    assert picture.num_prompt_tokens == text.num_prompt_tokens + 4


async def test_closed_loop_never_exceeds_its_concurrency(toy_url):
    """With three at a time, no moment has more than three requests in flight, and all are sent."""
    async with Client(toy_url(prefill_s=0.02)) as client:
        records = await closed_loop(client, "text", made(count=10), 3)

    edges = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records], key=lambda e: (e[0], e[1]))
    in_flight, most = 0, 0
    for _, change in edges:
        in_flight += change
        most = max(most, in_flight)
    assert len(records) == 10
    assert most == 3


async def test_open_loop_counts_from_the_intended_time(toy_url):
    """Requests go out at the fixed offsets while earlier ones are still running; lag is sent minus intended."""
    async with Client(toy_url(prefill_s=0.5)) as client:
        records = await open_loop(client, "text", made(count=6), 200.0, seed=3)

    offsets_s = poisson_offsets_s(200.0, 6, 3)
    start_s = records[0].intended_s
    assert [record.intended_s - start_s for record in records] == pytest.approx(offsets_s)
    assert all(record.lag_s >= 0 for record in records)
    assert records[-1].sent_s < records[0].end_s
    assert all(record.ttft_s == record.texts_s[0] - record.intended_s for record in records)


async def test_steady_load_lasts_as_long_as_the_main_one(toy_url):
    """Text streams keep coming until the last picture has ended, not longer."""
    async with Client(toy_url(prefill_s=0.03)) as client:
        pictures = asyncio.create_task(open_loop(client, "unique", made("unique"), 20.0, seed=0))
        done_s = []
        pictures.add_done_callback(lambda _: done_s.append(client.now_s()))
        texts = await steady_beside(client, "text", made(), 2, [pictures])
        last_s = max(record.end_s for record in await pictures)

    assert all(record.sent_s <= done_s[0] for record in texts)
    assert max(record.end_s for record in texts) >= last_s


async def test_refusals_are_recorded_not_raised(toy_url):
    """A status other than 200, and a server that is not there, each become the record's error."""
    url = toy_url()
    async with Client(url) as client:
        refused = await client.send("text", chat_body("nobody", WorkSpec("text"), 0))
    async with Client("http://127.0.0.1:9") as client:
        gone = await client.send("text", made()[0])

    assert refused.error.startswith("status 404")
    assert "ClientConnectorError" in gone.error


@given(st.lists(st.text(alphabet="ab{}:", max_size=8)), st.data())
def test_events_survive_any_cut(texts, data):
    """However the network cuts the stream, the same payloads come out in order."""
    stream = b"".join(f"data: x{text}\n\n".encode() for text in texts) + b"data: [DONE]\n\n"
    payloads, rest = [], b""
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found, rest = split_events(rest + stream[:cut])
        stream = stream[cut:]
        payloads += found

    assert [f"x{text}".encode() for text in texts] == payloads
    assert rest == b""

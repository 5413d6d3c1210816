"""Features that need not be sent again: the engine asks for what it lacks, and the answers are the same."""

import asyncio
import threading

import msgspec
import pytest

from tests.understand.conftest import SMALL, collect, request_of
from triptych.core.errors import InternalError
from triptych.core.events import FeaturesWanted, FinishReason
from triptych.testing import toy_engine_process
from triptych.testing.toy_model import toy_item
from triptych.understand import remote, withhold
from triptych.understand.remote import RemoteEngine
from triptych.understand.withhold import HeldEmbeddings


@pytest.fixture
async def engine(tmp_path):
    """The two ends of the wire, the far one on a thread."""
    address = f"ipc://{tmp_path}/engine"
    made = RemoteEngine(address)
    far = threading.Thread(target=toy_engine_process.main, args=(address, msgspec.json.encode(SMALL).decode()))
    far.start()
    await made.start()
    yield made
    await made.close()
    far.join()


def asking(name, content=b"x"):
    return request_of(name, [1, toy_item(content, 3), 2])


async def test_a_known_picture_is_not_sent_again(engine, reference):
    """The second time its features stay here; the tokens are the same."""
    first, _ = await collect(engine, asking("a"))
    before = await engine.stats()
    second, final = await collect(engine, asking("b"))
    after = await engine.stats()

    assert first == second == reference(asking("c"))
    assert before["transfer_withheld_bytes"] == 0
    assert after["transfer_withheld_bytes"] == asking("c").num_media_bytes
    assert after["transfers_asked_for"] == 0
    assert final.counters["encoder_misses"] == 0


async def test_dropped_embeddings_are_sent_again(engine, reference):
    """The engine says what it dropped: the next request brings the features, and nothing has to be asked for."""
    await collect(engine, asking("a"))
    await engine.flush("encoder")
    await engine.flush("prefix")
    await collect(engine, request_of("text", [4, 5]))  # a step, in which the engine lets go
    tokens, final = await collect(engine, asking("b"))
    stats = await engine.stats()

    assert tokens == reference(asking("c"))
    assert (stats["transfer_withheld_bytes"], stats["transfers_asked_for"]) == (0, 0)
    assert final.counters["encoder_misses"] == 1


async def test_what_the_engine_never_had_is_asked_for(engine, reference):
    """A wrong mirror costs a question: several items of several requests, and the same tokens."""
    requests = [
        request_of(f"r{i}", [1, toy_item(b"%d" % i, 3), 2, toy_item(b"%d!" % i, 4), 3, toy_item(b"shared", 2)])
        for i in range(6)
    ]
    for request in requests:
        engine._held.lighten(request)  # as if it had been sent
    results = await asyncio.gather(*(collect(engine, request) for request in requests))
    stats = await engine.stats()

    assert [tokens for tokens, _ in results] == [reference(request) for request in requests]
    assert {final.reason for _, final in results} == {FinishReason.LENGTH}
    assert stats["transfers_asked_for"] >= 13
    assert (stats["num_running"], stats["live_media_bytes"]) == (0, 0)


async def test_more_pictures_than_the_cache_holds(engine, reference):
    """Rounds of pictures that push each other out, in and out of step with the mirror: always the reference's
    tokens."""
    for turn in range(4):
        pictures = [toy_item(b"%d" % (turn * i % 10), 9) for i in range(10)]  # seven fit
        requests = [request_of(f"{turn}.{i}", [turn, 5, picture, 6]) for i, picture in enumerate(pictures)]
        results = await asyncio.gather(*(collect(engine, request) for request in requests))
        assert [tokens for tokens, _ in results] == [reference(request) for request in requests]
    stats = await engine.stats()

    assert stats["encoder_cache_evictions"] > 0
    assert stats["transfer_withheld_bytes"] > 0
    assert (stats["num_running"], stats["live_media_bytes"]) == (0, 0)


async def test_a_client_that_leaves_while_its_features_are_asked_for(engine, reference):
    """The question finds nobody, the request is cancelled there, and the next one is served."""
    request = asking("gone")
    engine._held.lighten(request)
    stream = engine.submit(request)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stream.aclose()
    tokens, _ = await collect(engine, asking("next"))
    stats = await engine.stats()

    assert tokens == reference(asking("next"))
    assert (stats["num_running"], stats["num_waiting"], stats["live_media_bytes"]) == (0, 0, 0)


async def test_features_that_cannot_be_sent_end_their_request(engine, reference, monkeypatch):
    """No memory for the copy: one final event here, nothing left there."""
    request = asking("poor")
    engine._held.lighten(request)

    def broken(*arguments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(remote, "pack_supply", broken)
        _, final = await collect(engine, request)
    tokens, _ = await collect(engine, asking("next"))
    stats = await engine.stats()

    assert (final.reason, final.error_code) == (FinishReason.ERROR, InternalError.code)
    assert tokens == reference(asking("next"))
    assert (stats["num_running"], stats["live_media_bytes"]) == (0, 0)


async def test_a_late_question_is_answered_with_nothing(engine):
    """The stream has ended: there is nothing to send, and nothing to raise."""
    await engine._supply(FeaturesWanted("over", [0]))
    assert (await engine.stats())["transfers_asked_for"] == 0


def test_the_mirror_is_bounded(monkeypatch):
    """The key used longest ago goes first."""
    monkeypatch.setattr(withhold, "MAX_KEYS", 2)
    held = HeldEmbeddings()
    for content in (b"a", b"b", b"a", b"c"):
        held.lighten(asking(content.decode(), content))

    sent = [held.lighten(asking("again", content)).items[0].is_withheld for content in (b"a", b"c", b"b")]
    assert sent == [True, True, False]

"""Every form that an HTTP/1.x answer may have, and what a connection does after it; against raw sockets."""

import asyncio
from contextlib import asynccontextmanager, suppress

import h11
import pytest

from triptych.core.config import FetchConfig
from triptych.media import http1
from triptych.media.http1 import Connection, TooLate

HEADERS = [(b"Host", b"there")]
OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def connected(*answers, close=False, **config):
    """A connection to a server that gives these bytes, one of them for each request, and then closes if told so."""
    ended = asyncio.Event()

    tasks = []

    async def serve(reader, writer):
        tasks.append(asyncio.current_task())
        with suppress(ConnectionError):
            for answer in answers:
                await reader.readuntil(b"\r\n\r\n")
                for part in [answer] if isinstance(answer, bytes) else answer:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)
            if not close:
                await ended.wait()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    made = await Connection.open("127.0.0.1", port, FetchConfig(**config), timeout_s=5, tls=None, host="there")
    try:
        yield made
    finally:
        made.close()
        ended.set()
        listener.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def body_of(connection):
    return b"".join([block async for block in connection.body()])


@pytest.mark.parametrize(
    ("answer", "body", "may_be_used_again"),
    [
        (OK + b"content-length: 5\r\n\r\nhello", b"hello", True),
        (OK + b"Content-Length: 0\r\n\r\n", b"", True),
        (
            OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n there\r\n0\r\na: b\r\n\r\n",
            b"hello there",
            True,
        ),
        ([OK, b"content-length: 5\r\n", b"\r\nhe", b"llo"], b"hello", True),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK + b"content-length: 2\r\n\r\nhi", b"hi", True),
        (OK + b"connection: close\r\ncontent-length: 2\r\n\r\nhi", b"hi", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"hi", False),
        (OK + b"content-length: 2\r\n\r\nhi" + OK + b"content-length: 4\r\n\r\nevil", b"hi", False),
    ],
)
async def test_an_answer_of_this_form_is_read(answer, body, may_be_used_again):
    """The body, whole; and a connection is kept only where nothing is left on it."""
    async with connected(answer) as connection:
        response = await connection.get(b"/", HEADERS)
        assert response.status == 200
        assert await body_of(connection) == body
        assert connection.finish() is may_be_used_again


async def test_a_body_without_a_length_ends_with_the_connection():
    """And so can be used once."""
    async with connected([OK + b"\r\n", b"hel", b"lo"], close=True) as connection:
        await connection.get(b"/", HEADERS)
        assert await body_of(connection) == b"hello"
        assert not connection.finish()


async def test_one_answer_after_the_other():
    """The same connection, each answer to its own request; header names in lower case."""
    answers = [OK + b"ETag: %d\r\ncontent-length: 1\r\n\r\n%d" % (i, i) for i in range(3)]
    async with connected(*answers) as connection:
        for i in range(3):
            response = await connection.get(b"/%d" % i, HEADERS)
            assert (response.header(b"etag"), response.header(b"vary")) == (b"%d" % i, b"")
            assert await body_of(connection) == b"%d" % i
            assert connection.finish()
            assert not connection.is_stale()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        OK + b"content-length: x\r\n\r\n",
        OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nhi",
        OK + b"a: " + b"x" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
    ],
)
async def test_an_answer_that_is_none_is_refused(answer):
    """One kind of error, whatever is wrong with the head."""
    async with connected(answer, close=True) as connection:
        with pytest.raises(h11.ProtocolError):
            await connection.get(b"/", HEADERS)
        assert not connection.finish()


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"content-length: 9\r\n\r\nhi",
        OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhel",
        OK + b"transfer-encoding: chunked\r\n\r\nz\r\nhello",
    ],
)
async def test_a_body_that_breaks_off_is_refused(answer):
    """What came is not taken for the whole."""
    async with connected(answer, close=True) as connection:
        await connection.get(b"/", HEADERS)
        with pytest.raises(h11.ProtocolError):
            await body_of(connection)
        assert not connection.finish()


async def test_silence_has_a_deadline():
    """Before the head, and within the body."""
    async with connected(b"", read_timeout_s=0.1) as connection:
        with pytest.raises(TooLate):
            await connection.get(b"/", HEADERS)
    async with connected(OK + b"content-length: 9\r\n\r\nhi", read_timeout_s=0.1) as connection:
        await connection.get(b"/", HEADERS)
        with pytest.raises(TooLate):
            await body_of(connection)


async def test_an_unread_answer_is_not_left_for_the_next():
    """An exchange that ends early costs its connection."""
    async with connected(OK + b"content-length: 5\r\n\r\nhello") as connection:
        await connection.get(b"/", HEADERS)
        assert not connection.finish()


async def test_what_comes_on_an_idle_connection_makes_it_stale():
    """A server that speaks out of turn, or goes, or is not asked for long."""
    late = OK + b"content-length: 4\r\n\r\nevil"
    async with connected([OK + b"content-length: 2\r\n\r\nhi", late]) as connection:
        await connection.get(b"/", HEADERS)
        await body_of(connection)
        assert connection.finish()
        await asyncio.sleep(0.1)
        assert connection.is_stale()
    async with connected(OK + b"content-length: 2\r\n\r\nhi", close=True) as connection:
        await connection.get(b"/", HEADERS)
        await body_of(connection)
        connection.finish()
        await asyncio.sleep(0.1)
        assert connection.is_stale()


async def test_an_old_idle_connection_is_stale(monkeypatch):
    """Servers close what is idle, and may do so just when it is used."""
    async with connected(OK + b"content-length: 2\r\n\r\nhi") as connection:
        await connection.get(b"/", HEADERS)
        await body_of(connection)
        assert connection.finish()
        monkeypatch.setattr(http1, "KEEP_ALIVE_S", -1.0)
        assert connection.is_stale()

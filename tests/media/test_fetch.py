"""Downloads against servers on loopback that are slow, lie, redirect inwards, or send bombs."""

import asyncio
import gzip
import ssl
import threading
import tracemalloc
from ipaddress import ip_address
from typing import ClassVar

import pytest

from tests.media.servers import FakeResolver, answering, loopback_policy, response, server
from triptych.core.config import FetchConfig, SourcePolicy
from triptych.core.errors import BudgetExceeded, ForbiddenSource, SourceTimeout, SourceUnavailable
from triptych.media import connections, transport
from triptych.media.fetch import ByteLimit, Fetcher
from triptych.media.policy import Policy

LIMIT = ByteLimit("max_item_bytes", 1_000_000)


class fetcher:  # noqa: N801 - used as a context manager
    """A Fetcher that may reach 127.0.0.1 on the given ports."""

    def __init__(self, *ports, resolver=None, policy=None, **config):
        self.made = Fetcher(policy or Policy(loopback_policy(*ports)), FetchConfig(**config), resolver=resolver)

    async def __aenter__(self):
        return self.made

    async def __aexit__(self, *_):
        await self.made.close()


async def get(fetch, url, limit=LIMIT, max_s=20.0, **kwargs):
    return await fetch.fetch(url, limit, max_s=max_s, **kwargs)


async def test_body_arrives_whole_and_connections_are_reused():
    """Two downloads from one server share a connection."""
    async with server(answering(b"x" * 300_000)) as served, fetcher(served.port) as fetch:
        assert await get(fetch, f"{served.url}/a?b=1") == b"x" * 300_000
        assert await get(fetch, f"{served.url}/c") == b"x" * 300_000

        assert [path for path, _ in served.requests] == ["/a?b=1", "/c"]
        assert served.num_connections == 1
        assert served.requests[0][1]["host"] == f"127.0.0.1:{served.port}"
        assert "cookie" not in served.requests[0][1]
        assert "authorization" not in served.requests[0][1]


async def test_environment_is_not_read(monkeypatch):
    """A proxy in the environment is passed over."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with server(answering(b"x")) as served, fetcher(served.port) as fetch:
        assert await get(fetch, served.url) == b"x"


async def test_hostile_resolver_gets_no_connection():
    """Public at one lookup and private at the next: each connection's own answer is judged, and nothing else is looked
    up between the judgement and the connection."""
    async with server(answering(b"inside")) as served:
        resolver = FakeResolver({"evil.example": ["93.184.216.34", "127.0.0.1"]})
        policy = Policy(SourcePolicy(schemes=("http",), ports=(served.port,)))
        async with fetcher(policy=policy, resolver=resolver, connect_timeout_s=0.2, max_retries=0) as fetch:
            for error in (SourceTimeout | SourceUnavailable, ForbiddenSource):
                with pytest.raises(error if isinstance(error, type) else error.__args__):
                    await get(fetch, f"http://evil.example:{served.port}/")
            assert resolver.lookups == ["evil.example"] * 2
        assert served.num_connections == 0


async def test_one_inside_address_spoils_a_name():
    """A name that resolves to public and private addresses is refused whole, and the error names no address."""
    async with server(answering(b"inside")) as served:
        resolver = FakeResolver({"mixed.example": [["8.8.8.8", "127.0.0.1"]]})
        policy = Policy(SourcePolicy(schemes=("http",), ports=(served.port,)))
        async with fetcher(policy=policy, resolver=resolver) as fetch:
            with pytest.raises(ForbiddenSource) as caught:
                await get(fetch, f"http://mixed.example:{served.port}/secret")
        assert "127.0.0.1" not in caught.value.message
        assert "secret" not in caught.value.message
        assert served.num_connections == 0


async def test_checked_address_is_the_one_connected_to():
    """The name stays in the Host header; the connection goes to the address that the resolver gave once."""
    async with server(answering(b"x")) as served:
        resolver = FakeResolver({"img.example": ["127.0.0.1"]})
        async with fetcher(served.port, resolver=resolver) as fetch:
            assert await get(fetch, f"http://img.example:{served.port}/a") == b"x"
        assert served.requests[0][1]["host"] == f"img.example:{served.port}"
        assert resolver.lookups == ["img.example"]


async def test_every_redirect_is_judged():
    """A chain that ends inwards is refused at the hop that leads there, without a connection."""
    async with server(answering(b"secret")) as inside:
        targets = {
            "/1": "/2",
            "/2": "http://hop.example:{port}/3",
            "/3": f"http://127.0.0.2:{inside.port}/",
        }

        async def answer(path, headers, writer):
            writer.write(response(status=302, location=targets[path].format(port=outside.port)))
            return True

        async with server(answer) as outside:
            resolver = FakeResolver({"hop.example": ["127.0.0.1"]})
            async with fetcher(outside.port, inside.port, resolver=resolver) as fetch:
                with pytest.raises(ForbiddenSource):
                    await get(fetch, f"{outside.url}/1")
            assert [path for path, _ in outside.requests] == ["/1", "/2", "/3"]
        assert inside.num_connections == 0


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "data:,x", "ftp://example.com/", "http://localhost/", "//[::1]/"]
)
async def test_redirects_to_other_schemes_are_refused(location):
    """A redirect leads to http and https only, and never to a name of an inside network."""
    async with server(answering(status=302, location=location)) as served, fetcher(served.port) as fetch:
        with pytest.raises(ForbiddenSource):
            await get(fetch, served.url)


async def test_redirects_are_counted():
    """A loop ends at max_redirects."""
    async with server(answering(status=302, location="/again")) as served, fetcher(served.port) as fetch:
        with pytest.raises(SourceUnavailable, match="max_redirects"):
            await get(fetch, served.url)
        assert len(served.requests) == 4


async def test_slow_drip_ends_at_the_total_deadline():
    """A server that sends a byte now and then is cut by the total time, not by each read."""

    async def drip(path, headers, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with server(drip) as served, fetcher(served.port, read_timeout_s=5.0) as fetch:
        with pytest.raises(SourceTimeout, match=r"within 0\.4 s"):
            await get(fetch, served.url, max_s=0.4)


async def test_silent_server_ends_at_the_read_deadline():
    """A server that accepts and says nothing is a timeout, and is not asked again."""

    async def silence(path, headers, writer):
        await asyncio.sleep(60)

    async with server(silence) as served, fetcher(served.port, read_timeout_s=0.2) as fetch:
        with pytest.raises(SourceTimeout):
            await get(fetch, served.url)
        assert len(served.requests) == 1


async def test_slow_name_server_ends_at_the_dns_deadline():
    """A lookup has a deadline of its own."""
    resolver = FakeResolver({"slow.example": ["8.8.8.8"]}, delay_s=30)
    async with fetcher(resolver=resolver, dns_timeout_s=0.1) as fetch:
        with pytest.raises(SourceTimeout, match="not resolved"):
            await get(fetch, "https://slow.example/")


async def test_unknown_name_is_unavailable():
    """A name without an address is an upstream failure, not ours."""
    async with fetcher(resolver=FakeResolver({}), max_retries=0) as fetch:
        with pytest.raises(SourceUnavailable, match="could not be resolved"):
            await get(fetch, "https://nowhere.example/")


async def test_declared_length_over_the_limit_is_refused_unread():
    """Content-Length alone suffices for a refusal, which names limit and value."""
    async with server(answering(b"", content_length="5000000")) as served, fetcher(served.port) as fetch:
        with pytest.raises(BudgetExceeded) as caught:
            await get(fetch, served.url)
    assert (caught.value.limit, caught.value.allowed, caught.value.requested) == ("max_item_bytes", 1e6, 5e6)


async def test_endless_body_is_cut_at_the_limit():
    """Without a length, bytes are counted as they come."""
    sent = 0

    async def endless(path, headers, writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    async with server(endless) as served, fetcher(served.port) as fetch:
        with pytest.raises(BudgetExceeded):
            await get(fetch, served.url)
    assert sent < 20_000_000


@pytest.mark.parametrize("length", ["10", "500000"])
async def test_lying_length_is_an_upstream_failure_or_cut(length):
    """A body shorter than promised is an error; of a longer one only what was promised is read."""
    body = b"y" * 200_000

    async def answer(path, headers, writer):
        writer.write(response(body, content_length=length))
        return False

    async with server(answer) as served, fetcher(served.port) as fetch:
        if int(length) > len(body):
            with pytest.raises(SourceUnavailable, match="broke off"):
                await get(fetch, served.url)
        else:
            assert await get(fetch, served.url) == b"y" * 10


async def test_gzip_bomb_is_cut_while_unpacking():
    """200 MB in 200 KB: refused by the unpacked size, within a bound on memory."""
    bomb = gzip.compress(b"\0" * 200_000_000, 9)
    assert len(bomb) < 250_000
    async with server(answering(bomb, content_encoding="gzip")) as served, fetcher(served.port) as fetch:
        tracemalloc.start()
        try:
            with pytest.raises(BudgetExceeded):
                await get(fetch, served.url)
            assert tracemalloc.get_traced_memory()[1] < 8_000_000
        finally:
            tracemalloc.stop()


async def test_gzip_body_is_unpacked_and_a_cut_one_refused():
    """A server that packs unasked is understood; half of its body is not taken for the whole."""
    plain = bytes(range(256)) * 1000
    packed = gzip.compress(plain)
    async with server(answering(packed, content_encoding="gzip")) as served, fetcher(served.port) as fetch:
        assert await get(fetch, served.url) == plain
    async with server(answering(packed[:-20], content_encoding="gzip")) as served, fetcher(served.port) as fetch:
        with pytest.raises(SourceUnavailable, match="cut off"):
            await get(fetch, served.url)


async def test_body_packed_in_several_parts_is_unpacked_whole():
    """gzip parts one after another are one body; a body of nothing but parts is cut off."""
    packed = b"".join(gzip.compress(bytes([i]) * 70_000) for i in range(5))
    async with server(answering(packed, content_encoding="gzip")) as served, fetcher(served.port) as fetch:
        assert await get(fetch, served.url) == b"".join(bytes([i]) * 70_000 for i in range(5))
    empty = gzip.compress(b"") * 40_000
    async with server(answering(empty, content_encoding="gzip")) as served, fetcher(served.port) as fetch:
        with pytest.raises(SourceUnavailable, match="packed parts"):
            await get(fetch, served.url)


async def test_unknown_encoding_is_refused():
    """What was not asked for and cannot be bounded is not unpacked."""
    async with server(answering(b"x", content_encoding="br")) as served, fetcher(served.port) as fetch:
        with pytest.raises(SourceUnavailable, match="'br'"):
            await get(fetch, served.url)


@pytest.mark.parametrize("status", [204, 206, 400, 401, 403, 404, 410, 429, 500])
async def test_other_statuses_are_unavailable_at_once(status):
    """The status is named, and the request is not repeated."""
    async with server(answering(b"", status=status)) as served, fetcher(served.port) as fetch:
        with pytest.raises(SourceUnavailable, match=str(status)):
            await get(fetch, served.url)
        assert len(served.requests) == 1


async def test_gateway_errors_are_tried_once_more():
    """503 and a connection that breaks before an answer are safe to repeat."""
    answers = iter([b"", response(status=503), response(b"good")])

    async def answer(path, headers, writer):
        writer.write(next(answers))
        return False

    async with server(answer) as served, fetcher(served.port, max_retries=2) as fetch:
        assert await get(fetch, served.url) == b"good"
        assert len(served.requests) == 3


async def test_downloads_per_host_are_limited():
    """No more than max_connections_per_host at a time reach one server."""

    async def slow(path, headers, writer):
        await asyncio.sleep(0.05)
        writer.write(response(b"x"))
        return True

    async with server(slow) as served, fetcher(served.port, max_connections_per_host=3) as fetch:
        await asyncio.gather(*(get(fetch, f"{served.url}/{i}") for i in range(9)))
        assert served.max_open == 3
        assert fetch._connections._hosts == {}


async def test_response_cache_asks_before_it_answers():
    """A kept body is used only after its server confirmed it, per tenant, and replaced when it changed."""
    state = {"etag": '"1"', "body": b"one"}

    async def answer(path, headers, writer):
        if headers.get("if-none-match") == state["etag"]:
            writer.write(response(status=304, content_length=None))
        else:
            writer.write(response(state["body"], etag=state["etag"]))
        return True

    async with server(answer) as served, fetcher(served.port, response_cache_bytes=10_000) as fetch:
        assert await get(fetch, served.url, tenant="a") == b"one"
        assert await get(fetch, served.url, tenant="a") == b"one"
        assert fetch.cache.hits == 1
        await get(fetch, served.url, tenant="b")
        assert "if-none-match" not in served.requests[-1][1]
        state.update(etag='"2"', body=b"two")
        assert await get(fetch, served.url, tenant="a") == b"two"
        assert (fetch.cache.hits, fetch.cache.misses) == (1, 3)


async def test_response_cache_asks_by_date_too():
    """A server without tags is asked by the date that it gave; a 304 without a kept body is not taken for one."""

    async def answer(path, headers, writer):
        if headers.get("if-modified-since") == "Sun, 01 Nov 2026 10:00:00 GMT" or path == "/odd":
            writer.write(response(status=304, content_length=None))
        else:
            writer.write(response(b"dated", last_modified="Sun, 01 Nov 2026 10:00:00 GMT"))
        return True

    async with server(answer) as served, fetcher(served.port, response_cache_bytes=10_000) as fetch:
        assert [await get(fetch, served.url) for _ in range(3)] == [b"dated"] * 3
        assert (fetch.cache.hits, fetch.cache.misses) == (2, 1)
        with pytest.raises(BudgetExceeded):
            await get(fetch, served.url, limit=ByteLimit("max_item_bytes", 3))
        with pytest.raises(SourceUnavailable, match="304"):
            await get(fetch, f"{served.url}/odd")


async def test_vary_is_read_in_any_spelling():
    """`Vary: Accept-Encoding` does not keep a body out of the cache: the same encoding is always asked for."""
    answer = answering(b"x", etag='"1"', vary="Accept-Encoding")
    async with server(answer) as served, fetcher(served.port, response_cache_bytes=9999) as fetch:
        await get(fetch, served.url)
        assert fetch.cache.num_entries == 1


async def test_connections_that_the_server_closed_are_not_used_again():
    """An idle connection that ended is noticed before a request is lost on it."""

    async def once(path, headers, writer):
        writer.write(response(b"x"))
        return False

    async with server(once) as served, fetcher(served.port, max_retries=0) as fetch:
        for _ in range(3):
            assert await get(fetch, served.url) == b"x"
            await asyncio.sleep(0.02)
        assert served.num_connections == 3


async def test_idle_connections_are_bounded(monkeypatch):
    """No more than MAX_IDLE wait to be used again, and closing leaves none."""
    monkeypatch.setattr(connections, "MAX_IDLE", 3)

    async def slow(path, headers, writer):
        await asyncio.sleep(0.05)
        writer.write(response(b"x"))
        return True

    async with server(slow) as served, fetcher(served.port) as fetch:
        await asyncio.gather(*(get(fetch, f"{served.url}/{i}") for i in range(8)))
        assert served.num_connections == 8
        assert fetch._connections._num_idle == 3
        await asyncio.gather(*(get(fetch, f"{served.url}/{i}") for i in range(3)))
        assert served.num_connections == 8
    assert fetch._connections._num_idle == 0
    assert fetch._connections._idle == {}


async def test_a_name_is_looked_up_once_at_a_time(monkeypatch):
    """Sixteen downloads from one host wait for one lookup, also when some give up."""
    lookups, gate = [], threading.Event()

    def look_up(host, *args, **kwargs):
        lookups.append(host)
        gate.wait(5)
        return [(2, 1, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(transport.socket, "getaddrinfo", look_up)
    resolver = transport.SystemResolver()
    early = [asyncio.create_task(resolver.resolve("img.example", 443)) for _ in range(3)]
    await asyncio.sleep(0.02)
    for task in early:
        task.cancel()
    late = [asyncio.create_task(resolver.resolve("img.example", 443)) for _ in range(13)]
    await asyncio.sleep(0.02)
    gate.set()
    assert await asyncio.gather(*late) == [[ip_address("127.0.0.1")]] * 13
    assert lookups == ["img.example"]
    await resolver.resolve("img.example", 443)
    assert len(lookups) == 2
    assert resolver._running == {}
    resolver.close()


@pytest.mark.parametrize(
    "headers", [{}, {"etag": '"1"', "cache_control": "no-store"}, {"etag": '"1"', "vary": "Cookie"}]
)
async def test_responses_without_a_usable_validator_are_not_kept(headers):
    """No validator, no-store or an unknown Vary: the next download starts anew."""
    async with server(answering(b"x", **headers)) as served, fetcher(served.port, response_cache_bytes=9999) as fetch:
        await get(fetch, served.url)
        await get(fetch, served.url)
        assert fetch.cache.num_entries == 0
        assert all("if-none-match" not in headers for _, headers in served.requests)


class RecordingContext(ssl.SSLContext):
    """Notes the server names that connections ask for."""

    names: ClassVar[list[str]] = []

    def wrap_bio(self, incoming, outgoing, server_side=False, server_hostname=None, session=None):
        self.names.append(server_hostname)
        return super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)


async def test_tls_is_for_the_name_and_not_for_the_address():
    """The connection goes to the checked address; server name and certificate check are the URL's host."""

    async def refuse(reader, writer):
        writer.write(b"\x15\x03\x01\x00\x02\x02\x28")  # a fatal alert in place of a certificate
        writer.close()

    listener = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    tls = RecordingContext(ssl.PROTOCOL_TLS_CLIENT)
    resolver = FakeResolver({"img.example": ["127.0.0.1"]})
    made = Fetcher(Policy(loopback_policy(port)), FetchConfig(max_retries=0), resolver=resolver, tls=tls)
    try:
        with pytest.raises(SourceUnavailable, match="could not be reached"):
            await made.fetch(f"https://img.example:{port}/", LIMIT, max_s=5)
    finally:
        await made.close()
        listener.close()
    assert tls.names == ["img.example"]
    assert tls.check_hostname

"""The whole way of a bad item: through the real door and the real plane to a status, a code and the field's name."""

import asyncio
import base64
import gzip

import httpx
import pytest
from PIL import Image

from tests.media import bombs
from tests.media.made import photo, saved, tone, wav
from tests.media.servers import loopback_config, response, server
from triptych.core.config import Config, Tier
from triptych.http.app import build_app
from triptych.http.front import Front
from triptych.http.seams import Served
from triptych.media.plane import MediaPlane
from triptych.prompt import Detokenizer
from triptych.testing.toy_engine import ToyEngine, ToyTokenizer, toy_embed, toy_token_bytes
from triptych.testing.toy_prompts import MAX_TOKENS, ToyPrompts

PICTURE = saved(Image.fromarray(photo(64, 48)), "PNG")
BOMB = gzip.compress(bytes(40_000_000))


def data_url(data):
    return "data:;base64," + base64.b64encode(data).decode()


async def site(path, headers, writer):
    """A server of everything that goes wrong."""
    if path == "/slow":
        await asyncio.sleep(30)
    answers = {
        "/good": response(PICTURE),
        "/gone": response(status=404),
        "/inside": response(status=302, location="http://169.254.169.254/latest/meta-data"),
        "/local": response(status=302, location="file:///etc/passwd"),
        "/loop": response(status=302, location="/loop"),
        "/bomb": response(BOMB, content_encoding="gzip"),
        "/long": response(b"", content_length="99999999999"),
        "/page": response(b"<html>not a picture</html>", content_type="image/png"),
        "/sound": response(wav(tone(0.1)), content_type="image/png"),
        "/cut": response(PICTURE, content_length=str(len(PICTURE) + 10)),
    }
    writer.write(answers[path])
    return path != "/cut"


CASES = [
    ("/good", 200, None),
    ("/gone", 424, "source_unavailable"),
    ("/inside", 403, "forbidden_source"),
    ("/local", 403, "forbidden_source"),
    ("/loop", 424, "source_unavailable"),
    ("/bomb", 413, "budget_exceeded"),
    ("/long", 413, "budget_exceeded"),
    ("/page", 422, "unsupported_media"),
    ("/sound", 422, "unsupported_media"),
    ("/cut", 424, "source_unavailable"),
    ("/slow", 504, "source_timeout"),
    ("https://10.0.0.1/a.png", 403, "forbidden_source"),
    ("https://localhost/a.png", 403, "forbidden_source"),
    ("ftp://example.com/a.png", 403, "forbidden_source"),
    ("file:///etc/passwd", 403, "forbidden_source"),
    ("a.png", 400, "invalid_request"),
    (data_url(PICTURE), 200, None),
    (data_url(PICTURE[:200]), 400, "invalid_media"),
    (data_url(b"hello"), 422, "unsupported_media"),
    ("data:;base64,!!", 400, "invalid_media"),
    (data_url(bombs.png_21_kb()), 413, "budget_exceeded"),
    (data_url(bombs.jpeg_bomb()), 413, "budget_exceeded"),
]


@pytest.mark.parametrize(("url", "status", "code"), CASES, ids=[case[0][:30] for case in CASES])
async def test_bad_items_have_their_status(url, status, code):
    """Never a 500, never an address or a path in the text, always the field."""
    async with server(site) as outside:
        config = loopback_config(outside.port, fetch={"max_retries": 0})
        async with MediaPlane(config) as plane:
            answer = await ask(plane, url if ":" in url or url == "a.png" else outside.url + url)

    assert answer.status_code == status
    if code is None:
        assert answer.json()["choices"]
        return
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, "messages.0.content.0")
    assert "169.254" not in error["message"]
    assert "passwd" not in error["message"]
    assert len(error["message"]) < 300
    if status == 413:
        assert error["requested"] > error["allowed"] > 0
        assert error["limit"] in error["message"]


async def ask(plane, url):
    """One chat request through the door, on this loop."""
    served = Served(
        name="toy",
        engine=ToyEngine(),
        prompts=ToyPrompts(),
        max_tokens=MAX_TOKENS,
        text_stream=lambda stop: Detokenizer(ToyTokenizer(), stop),
        token_bytes=toy_token_bytes,
        tool_stream=lambda: None,
        modalities=("image",),
        embed=toy_embed,
        flushers={},
    )
    tier = Tier(max_download_s=2.0, max_item_bytes=2_000_000)
    app = build_app(Front(Config(tiers={"default": tier}), [served], plane))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://door", timeout=20) as http:
        part = {"type": "image_url", "image_url": {"url": url}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        return await http.post("/v1/chat/completions", json=body)

"""What the server's log says of a request that failed: a line for what is known, where it happened for what is not."""

from __future__ import annotations

import logging

import httpx
import pytest

from triptych.core.errors import ModelFault
from triptych.http.middleware import Errors


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ModelFault("the encoder gave NaN"), "model_fault", "request failed: model_fault: the encoder gave NaN"),
        (KeyError("secret"), "internal_error", "in broken_app"),
    ],
)
async def test_a_known_fault_is_one_line(
    error: Exception, code: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A leaf of the error tree is logged without a traceback, anything else with one; the client sees no more of it
    than its code."""

    async def broken_app(scope, receive, send):
        raise error

    with caplog.at_level(logging.ERROR):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(Errors(broken_app)), base_url="http://host"
        ) as client:
            answer = await client.get("/")

    (record,) = caplog.records
    assert words in record.getMessage()
    assert ("Traceback" in record.getMessage()) == (code == "internal_error")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, code)
    assert "secret" not in answer.text

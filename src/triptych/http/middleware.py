"""The outermost layers, in order: arrival (clock and id), errors. Plain ASGI, so that a stream passes untouched."""

from __future__ import annotations

import logging
import re
import traceback

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.core.clock import Clock
from triptych.core.errors import InternalError, InvalidRequest, TriptychError
from triptych.core.ids import new_id
from triptych.http.responses import json_response
from triptych.http.status import error_body, error_headers, status_of

LOGGER = logging.getLogger("triptych.http")
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Arrival:
    """Stamps the request's clock before anything is read, and names it; the answer carries the name."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        prefix = (
            "cmpl" if scope["path"].endswith("/v1/completions") else "chatcmpl" if "chat" in scope["path"] else "req"
        )
        request_id = new_id(prefix)
        # Starlette hands every request the lifespan's state: a copy keeps this request's own out of it
        scope["state"] = {**scope.get("state", {}), "arrival_s": self._clock.now_s(), "request_id": request_id}
        shown = _caller_id(scope) or request_id.encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", shown)]}
            await send(message)

        await self._app(scope, receive, send_named)


def _caller_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _GOOD_ID.fullmatch(value.decode("latin-1")):
            return bytes(value)
    return None


class Errors:
    """Leaves become their status and the OpenAI form. What is no leaf is our mistake: 500, logged, without its text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_see(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        except Exception as error:
            leaf = _leaf(error)
            if isinstance(leaf, InternalError):
                LOGGER.error("request failed: %s", _as_logged(error))
            if started or scope["type"] != "http":
                return  # a stream ends with its own last words; a second answer would corrupt it
            status = error.status_code if isinstance(error, HTTPException) else status_of(leaf)
            await json_response(error_body(leaf), error_headers(leaf), status)(scope, receive, send)


def _as_logged(error: Exception) -> str:
    """A leaf says what happened in a line; what nobody expected comes with where it did."""
    return f"{error.code}: {error}" if isinstance(error, TriptychError) else "".join(traceback.format_exception(error))


def _leaf(error: Exception) -> TriptychError:
    if isinstance(error, TriptychError):
        return error
    if isinstance(error, HTTPException):
        return InvalidRequest(error.detail)
    return InternalError("the server failed")

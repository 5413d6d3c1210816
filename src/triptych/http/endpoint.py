"""From a function of one `Call` to an ASGI application: record, disconnect and deadline, for all endpoints alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.core.errors import Cancelled, DeadlineExceeded
from triptych.http.call import Call
from triptych.http.front import Front
from triptych.http.sse import EventStream, last_words

Handler = Callable[[Call], Awaitable[ASGIApp]]


class Endpoint:
    """`handler` returns the response, an ASGI application. The client's leaving cancels it wherever it is."""

    def __init__(self, front: Front, name: str, handler: Handler) -> None:
        self._front = front
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        request = Request(scope, receive)
        async with Call(self._front, request, self._name, state["request_id"], state["arrival_s"]) as call:
            reply = _Reply(call, send)
            work = asyncio.create_task(_answer(call, self._handler, reply))
            watch = asyncio.create_task(_client_gone(call))
            try:
                await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and not reply.complete:
                    raise Cancelled("the client left")
                await work
            finally:
                watch.cancel()
                work.cancel()
                await asyncio.gather(work, watch, return_exceptions=True)


class _Reply:
    """The response as it is written: whether it has begun, whether it is whole."""

    def __init__(self, call: Call, send: Send) -> None:
        self._call = call
        self._send = send
        self.started = False
        self.complete = False

    async def send(self, message: Message) -> None:
        self.started = True
        await self._send(message)
        if message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
            if message.get("body"):
                self._call.sent()


async def _answer(call: Call, handler: Handler, reply: _Reply) -> None:
    try:
        async with call.timeout:
            call.set_timeout(None)
            response = await handler(call)
            await response(call.request.scope, call.request.receive, reply.send)
    except TimeoutError as error:
        if not call.timeout.expired():
            raise
        late = DeadlineExceeded(f"the request took longer than {call.deadline_s - call.clock.started_s:g} s")
        if not reply.started:
            raise late from error
        call.failure = late
        await reply.send({"type": "http.response.body", "body": last_words(late), "more_body": False})
    except ClientDisconnect as error:
        raise Cancelled("the client left while sending") from error
    else:
        if isinstance(response, EventStream) and response.failure:
            call.failure = response.failure


async def _client_gone(call: Call) -> None:
    """Returns when the client has left. The body must be read first: both come over the same channel."""
    await call.body_read.wait()
    while (await call.request.receive())["type"] != "http.disconnect":
        pass

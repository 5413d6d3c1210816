"""`/health`: the process lives. `/ready`: it can serve. `/version`. `/metrics`. None of them asks for a key."""

from __future__ import annotations

from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from triptych.http.front import Front
from triptych.http.responses import json_response


async def health(request: Request) -> Response:
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """200, or 503 with what is not ready: an engine that does not answer counts."""
    front: Front = request.app.state.front
    reasons = []
    if not front.ready:
        reasons.append("loading")
    if front.draining:
        reasons.append("shutting down")
    if front.ready:
        stats = await front.stats()
        named = (*front.models, *front.drawing.engines)
        reasons += [f"engine of {name} does not answer" for name in named if not stats[name]["engine_up"]]
    if reasons:
        return json_response({"status": "not ready", "reasons": reasons}, {"retry-after": "2"}, status=503)
    return json_response({"status": "ready", "models": [*front.models, *front.drawing.engines]})


async def show_version(request: Request) -> Response:
    return json_response({"version": version("triptych")})


async def metrics(request: Request) -> Response:
    front: Front = request.app.state.front
    return Response(front.metrics.render(await front.stats()), media_type=CONTENT_TYPE_LATEST)

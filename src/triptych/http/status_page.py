"""`GET /`: one built-in page, and `GET /v1/status`, the figures it shows: models, queues, caches, recent requests."""

from __future__ import annotations

import time
from functools import cache
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from triptych.http.admin import cache_table
from triptych.http.front import Front
from triptych.http.responses import json_response
from triptych.metrics.names import sample_for

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; media-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def page(request: Request) -> Response:
    return HTMLResponse(_html(), headers={"content-security-policy": _POLICY, "cache-control": "no-cache"})


async def status(request: Request) -> Response:
    """A tenant sees its own requests; an administrator, and everybody on an open server, sees all. Never a prompt."""
    front: Front = request.app.state.front
    tenant = front.tenants.of(request.headers)
    sees_all = tenant.admin or front.tenants.is_open
    stats = await front.stats()
    return json_response(
        {
            "uptime_s": round(time.time() - front.started_s, 1),
            "ready": front.ready and not front.draining,
            "in_flight": front.num_in_flight,
            "slo_ms": {kind: front.slo_ms(kind) for kind in ("text", "multimodal")},
            "models": {
                served.name: {
                    "max_tokens": served.max_tokens,
                    "modalities": ["text", *served.modalities],
                    "details": dict(served.details),
                    "state": _state(stats[served.name]),
                    "caches": cache_table(stats[served.name]),
                }
                for served in front.models.values()
            },
            "front": {"state": _state(stats["front"]), "caches": cache_table(stats["front"])},
            "recent": [msgspec.to_builtins(r) for r in front.ledger.recent(None if sees_all else tenant.name)],
        }
    )


def _state(stats: dict[str, float]) -> dict[str, float]:
    """What is neither a cache's nor unknown to the table."""
    known = {stat: sample_for(stat) for stat in stats}
    return {stat: stats[stat] for stat, sample in known.items() if sample and "cache" not in sample.labels}


@cache
def _html() -> str:
    return files("triptych.http").joinpath("status.html").read_text("utf-8")

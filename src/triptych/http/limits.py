"""`GET /v1/limits`: a caller's own tier (F3), so that a refusal is no surprise."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from triptych.http.front import Front
from triptych.http.responses import json_response


async def limits(request: Request) -> Response:
    front: Front = request.app.state.front
    tenant = front.tenants.of(request.headers)
    http = front.config.http
    return json_response(
        {
            "object": "limits",
            "tenant": tenant.name,
            "tier": tenant.tier,
            "limits": msgspec.to_builtins(front.config.tier(tenant.tier)),
            "server": {
                "max_body_bytes": http.max_body_bytes,
                "max_choices": http.max_choices,
                "max_stop_strings": http.max_stop_strings,
                "max_cache_salt_chars": http.max_cache_salt_chars,
                "max_media_id_chars": http.max_media_id_chars,
                "request_timeout_s": http.request_timeout_s,
            },
            "models": {served.name: {"max_model_tokens": served.max_tokens} for served in front.models.values()},
            "running": front.traffic.running(tenant.name),
        }
    )

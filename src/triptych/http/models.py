"""`GET /v1/models`: what is served, and what each takes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.core.errors import UnknownModel
from triptych.http.front import Front
from triptych.http.responses import json_response
from triptych.http.seams import Served


async def list_models(request: Request) -> Response:
    front: Front = request.app.state.front
    front.tenants.of(request.headers)
    return json_response({"object": "list", "data": [_entry(served) for served in front.models.values()]})


async def show_model(request: Request) -> Response:
    front: Front = request.app.state.front
    front.tenants.of(request.headers)
    name = request.path_params["name"]
    if name not in front.models:
        raise UnknownModel(f"no model {name!r} here; served: {', '.join(sorted(front.models))}", param="model")
    return json_response(_entry(front.models[name]))


def _entry(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created_s,
        "owned_by": "triptych",
        "max_model_len": served.max_tokens,
        "modalities": ["text", *served.modalities],
        "embeddings": served.embed is not None,
        "tools": served.tool_stream is not None,
        **served.details,
    }

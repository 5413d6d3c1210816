"""`GET /v1/models`: what is served, and what each takes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.core.errors import UnknownModel
from triptych.generate.request import ModelTraits
from triptych.http.front import Front
from triptych.http.responses import json_response
from triptych.http.seams import Served


async def list_models(request: Request) -> Response:
    front: Front = request.app.state.front
    front.tenants.of(request.headers)
    return json_response({"object": "list", "data": list(_entries(front).values())})


async def show_model(request: Request) -> Response:
    front: Front = request.app.state.front
    front.tenants.of(request.headers)
    name = request.path_params["name"]
    entries = _entries(front)
    if name not in entries:
        raise UnknownModel(f"no model {name!r} here; served: {', '.join(sorted(entries))}", param="model")
    return json_response(entries[name])


def _entries(front: Front) -> dict[str, dict[str, Any]]:
    answering = {name: _entry(served) for name, served in front.models.items()}
    drawing = {name: _drawing_entry(engine.traits, front) for name, engine in front.drawing.engines.items()}
    return answering | drawing


def _drawing_entry(traits: ModelTraits, front: Front) -> dict[str, Any]:
    return {
        "id": traits.name,
        "object": "model",
        "created": int(front.started_s),
        "owned_by": "triptych",
        "architecture": traits.architecture,
        "tasks": sorted(task.value for task in traits.tasks),
        "default_size": f"{traits.default_width_px}x{traits.default_height_px}",
        "default_num_steps": traits.default_num_steps,
        "default_guidance_scale": traits.default_guidance_scale,
        "step_caches": list(traits.step_caches),
        "step_cache_min_steps": traits.step_cache_min_steps,
        "default_step_cache": traits.default_step_cache,
    }


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

"""The door in one screen: which path is which endpoint, and what every request passes through."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from triptych.core.errors import InvalidRequest
from triptych.core.suggest import did_you_mean
from triptych.http import admin, health, images, limits, models, status_page, videos
from triptych.http.chat import chat
from triptych.http.completions import completions
from triptych.http.embeddings import embeddings
from triptych.http.endpoint import Endpoint, Handler
from triptych.http.front import Front
from triptych.http.middleware import Arrival, Errors
from triptych.http.responses import json_response
from triptych.http.schema import ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from triptych.http.status import error_body
from triptych.http.tokenize import detokenize, tokenize
from triptych.http.validate import learn

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]

CALLS: tuple[tuple[str, str, Handler], ...] = (
    ("/v1/chat/completions", "chat", chat),
    ("/v1/completions", "completions", completions),
    ("/v1/embeddings", "embeddings", embeddings),
    ("/tokenize", "tokenize", tokenize),
    ("/v1/tokenize", "tokenize", tokenize),
    ("/detokenize", "detokenize", detokenize),
    ("/v1/detokenize", "detokenize", detokenize),
)

LOOKS = (
    ("/", status_page.page),
    ("/v1/status", status_page.status),
    ("/v1/models", models.list_models),
    ("/v1/models/{name:path}", models.show_model),
    ("/v1/limits", limits.limits),
    ("/v1/admin/caches", admin.show_caches),
    ("/health", health.health),
    ("/ready", health.ready),
    ("/version", health.show_version),
    ("/metrics", health.metrics),
)


def build_app(front: Front, lifespan: Lifespan | None = None) -> Starlette:
    """`front` holds the models and the media plane; `lifespan` starts and stops them with the server."""
    learn(ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)
    routes = [Route(path, Endpoint(front, name, handler), methods=["POST"]) for path, name, handler in CALLS]
    routes += [
        Route(path, look, methods=["GET"]) for path, look in LOOKS if front.config.http.status_page or path != "/"
    ]
    routes.append(Route("/v1/admin/caches/{cache}/flush", admin.flush_cache, methods=["POST"]))
    routes += images.routes(front, front.drawing) + videos.routes(front, front.drawing)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Arrival, clock=front.clock), Middleware(Errors)],
        exception_handlers={404: _not_found, 405: _not_allowed},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a client that does not follow would get an empty answer
    app.state.front = front
    return app


async def _not_found(request: Request, error: Exception) -> Response:
    path = request.url.path[:200]
    known = [path for path, _, _ in CALLS]
    near = did_you_mean(path, known if request.method == "POST" else [path for path, _ in LOOKS])
    advice = near or f"; POST goes to {', '.join(known)}"
    return json_response(error_body(InvalidRequest(f"no {path} here{advice}")), status=404)


async def _not_allowed(request: Request, error: Exception) -> Response:
    headers = getattr(error, "headers", None) or {}
    takes = ", ".join(method for method in ("GET", "POST", "DELETE") if method in headers.get("Allow", ""))
    message = f"{request.url.path[:200]} takes {takes or 'another method'}, not {request.method}"
    return json_response(error_body(InvalidRequest(message)), headers, status=405)

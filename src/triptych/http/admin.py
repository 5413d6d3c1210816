"""`GET /v1/admin/caches` and `POST /v1/admin/caches/{cache}/flush`: look at a cache, empty one. Administrators only."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.core.errors import InvalidRequest
from triptych.core.suggest import did_you_mean
from triptych.http.front import Front
from triptych.http.responses import json_response
from triptych.metrics.names import CACHE_METRICS, sample_for

MEDIA = "media"  # media ids and fetched responses: the media plane's, whatever the model


async def show_caches(request: Request) -> Response:
    front: Front = request.app.state.front
    front.tenants.admin(request.headers)
    stats = await front.stats()
    return json_response({"object": "caches", "models": {owner: cache_table(found) for owner, found in stats.items()}})


async def flush_cache(request: Request) -> Response:
    """Of the model in the query, or of all. A miss is never fatal, so running requests go on."""
    front: Front = request.app.state.front
    front.tenants.admin(request.headers)
    cache, wanted = request.path_params["cache"], request.query_params.get("model")
    if cache == MEDIA:
        return json_response({"object": "flush", "cache": cache, "entries": {"front": front.media.flush()}})
    chosen = [front.select(wanted)] if wanted else list(front.models.values())
    known = [MEDIA, *sorted({name for served in chosen for name in served.flushers})]
    if cache not in known:
        raise InvalidRequest(
            f"no cache {cache!r}{did_you_mean(cache, known)}; there are: {', '.join(known)}", param="cache"
        )
    flushed = {served.name: await served.flushers[cache]() for served in chosen if cache in served.flushers}
    return json_response({"object": "flush", "cache": cache, "entries": flushed})


def cache_table(stats: dict[str, float]) -> dict[str, dict[str, Any]]:
    """One owner's statistics by cache: {cache: {bytes, capacity_bytes, entries, hits, misses, ...}}."""
    table: dict[str, dict[str, Any]] = {}
    for stat, value in stats.items():
        sample = sample_for(stat)
        if sample is not None and sample.metric in CACHE_METRICS:
            table.setdefault(sample.labels["cache"], {})[sample.metric.name.removeprefix("cache_")] = value
    return table

"""`/v1/videos`: jobs. POST creates (JSON or form), GET looks and lists, DELETE cancels, content is the file."""

from __future__ import annotations

from typing import Any

import msgspec
from blake3 import blake3
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from triptych.core.errors import InvalidRequest, UnsupportedMedia
from triptych.generate.request import ModelTraits
from triptych.generate.service import GenerateService
from triptych.generate.video_jobs import VARIANTS, VideoJob
from triptych.http.call import Call
from triptych.http.endpoint import Endpoint
from triptych.http.forms import is_form, parse_form
from triptych.http.front import Front
from triptych.http.generated import rounded
from triptych.http.image_bodies import VideoRequest, build_requests, parse_size
from triptych.http.responses import json_response
from triptych.http.status import error_body
from triptych.http.validate import decode_body, refuse_typos

DEFAULT_SECONDS = 4.0
MAX_PAGE = 100


def routes(front: Front, service: GenerateService) -> list[Route]:
    videos = Videos(service)
    return [
        Route("/v1/videos", Endpoint(front, "videos", videos.create), methods=["POST"]),
        Route("/v1/videos", videos.page, methods=["GET"]),
        Route("/v1/videos/{video_id}", videos.show, methods=["GET"]),
        Route("/v1/videos/{video_id}", videos.delete, methods=["DELETE"]),
        Route("/v1/videos/{video_id}/content", videos.content, methods=["GET"]),
    ]


class Videos:
    """The handlers. A job belongs to its tenant; another tenant's is a 404."""

    def __init__(self, service: GenerateService) -> None:
        self._service = service

    async def create(self, call: Call) -> ASGIApp:
        raw = await call.body()
        body = await _body(call, raw)
        call.parsed()
        if body.input_reference is not None:
            raise UnsupportedMedia("input_reference is not supported: text to video only", param="input_reference")
        model, engine = self._service.select(body.model)
        call.record.model = model
        frames_per_s = body.fps or engine.traits.default_frames_per_s
        requests = build_requests(
            call,
            body,
            engine.traits,
            number=1,
            size_px=parse_size(body.size, engine.traits),
            num_frames=_num_frames(body, engine.traits, frames_per_s),
            frames_per_s=frames_per_s,
        )
        tenant = call.tenant.name
        run = self._service.start(
            engine,
            requests,
            tenant=tenant,
            idempotency_key=call.request.headers.get("idempotency-key"),
            digest=blake3(b"video" + raw).digest(),
        )
        jobs, max_open = self._service.jobs, call.tier.max_concurrent_requests
        job = jobs.create(tenant, model, run.requests[0], run, max_open=max_open)
        return json_response(_form(job), call.headers)

    async def page(self, request: Request) -> Response:
        query = request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order must be asc or desc, got {order[:20]!r}", param="order")
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_PAGE:
            raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}, got {limit[:20]!r}", param="limit")
        jobs, has_more = self._service.jobs.page(
            _tenant(request), after=query.get("after"), limit=int(limit), order=order
        )
        data = [_form(job) for job in jobs]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": data, "has_more": has_more, **ends})

    async def show(self, request: Request) -> Response:
        return json_response(_form(self._service.jobs.get(_tenant(request), request.path_params["video_id"])))

    async def delete(self, request: Request) -> Response:
        job = self._service.jobs.delete(_tenant(request), request.path_params["video_id"])
        return json_response({"id": job.job_id, "object": "video.deleted", "deleted": True})

    async def content(self, request: Request) -> Response:
        variant = request.query_params.get("variant", "video")
        data = self._service.jobs.content(_tenant(request), request.path_params["video_id"], variant)
        return Response(data, media_type=VARIANTS[variant])


def _tenant(request: Request) -> str:
    front: Front = request.app.state.front
    return front.tenants.of(request.headers).name


async def _body(call: Call, raw: bytes) -> VideoRequest:
    if not is_form(call.request.headers):
        body, ignored = decode_body(raw, VideoRequest)
        call.ignore(ignored)
        return body
    form = await parse_form(call.request.headers, raw)
    refuse_typos(dict.fromkeys([*form.fields, *form.files]), VideoRequest)
    fields: dict[str, Any] = dict(form.fields)
    if "input_reference" in form.files:
        fields["input_reference"] = "file"
    try:
        return msgspec.convert(fields, VideoRequest, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the form: {error}") from error


def _num_frames(body: VideoRequest, traits: ModelTraits, frames_per_s: float) -> int:
    """As asked for; from seconds, the nearest length that the model's VAE can make."""
    if body.num_frames is not None:
        return body.num_frames
    try:
        seconds = float(DEFAULT_SECONDS if body.seconds is None else body.seconds)
    except ValueError as error:
        raise InvalidRequest(f"seconds must be a number, got {str(body.seconds)[:40]!r}", param="seconds") from error
    if not 0 < seconds <= 3600:
        raise InvalidRequest(f"seconds must be between 0 and 3600, got {seconds:g}", param="seconds")
    return round(seconds * frames_per_s / traits.frames_multiple) * traits.frames_multiple + 1


def _form(job: VideoJob) -> dict[str, Any]:
    request = job.request
    return {
        "id": job.job_id,
        "object": "video",
        "model": job.model,
        "status": job.status.value,
        "progress": job.progress,
        "created_at": job.created_at,
        "completed_at": job.completed_at,
        "expires_at": job.expires_at,
        "size": f"{request.width_px}x{request.height_px}",
        "seconds": f"{request.num_frames / request.frames_per_s:g}",
        "prompt": request.prompt,
        "error": error_body(job.error)["error"] if job.error else None,
        "remixed_from_video_id": None,
        "triptych": {
            "num_frames": request.num_frames,
            "fps": request.frames_per_s,
            "seed": request.seed,
            "num_inference_steps": request.num_steps,
            "guidance_scale": request.guidance_scale,
            "stage_ms": rounded(job.stage_ms),
            "counters": rounded(job.counters),
        },
    }

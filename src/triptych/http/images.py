"""`POST /v1/images/generations` and `/v1/images/edits`, streamed or whole, and `GET /v1/images/{id}/content`."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from triptych.core.errors import InvalidRequest
from triptych.generate.events import GenerateFinal, PreviewEvent
from triptych.generate.picture_files import FORMATS, encode_picture, enlarge
from triptych.generate.request import GenerateRequest, ModelTraits, why_no_default_cache
from triptych.generate.run import Indexed, Run, error_of, finals_of
from triptych.generate.service import GenerateService
from triptych.http.call import Call
from triptych.http.endpoint import Endpoint
from triptych.http.forms import is_form, parse_form
from triptych.http.front import Front
from triptych.http.generated import record_final, rounded
from triptych.http.image_bodies import (
    EditRequest,
    ImagesRequest,
    build_requests,
    check_picture_fields,
    num_pictures,
    parse_size,
)
from triptych.http.pictures_in import edit_size, init_pixels, mask_pixels, open_pictures
from triptych.http.responses import json_response
from triptych.http.sse import EventStream
from triptych.http.validate import decode_body, refuse_typos


def routes(front: Front, service: GenerateService) -> list[Route]:
    images = Images(service)
    return [
        Route("/v1/images/generations", Endpoint(front, "images", images.generations), methods=["POST"]),
        Route("/v1/images/edits", Endpoint(front, "image_edits", images.edits), methods=["POST"]),
        Route("/v1/images/{file_id}/content", images.content, methods=["GET"]),
    ]


@dataclass(frozen=True, slots=True)
class _Job:
    call: Call
    body: ImagesRequest
    model: str
    traits: ModelTraits
    run: Run
    operation: str  # image_generation or image_edit
    created_s: int

    @property
    def output_format(self) -> str:
        return self.body.output_format or "png"

    @property
    def size(self) -> str:
        request = self.run.requests[0]
        return f"{request.width_px}x{request.height_px}"


class Images:
    """The handlers. `Idempotency-Key` joins or replays a call of the same tenant, key and body."""

    def __init__(self, service: GenerateService) -> None:
        self._service = service

    async def generations(self, call: Call) -> ASGIApp:
        raw = await call.body()
        body, ignored = decode_body(raw, ImagesRequest)
        call.ignore(ignored)
        call.parsed()
        model, engine = self._open(call, body)
        size_px = parse_size(body.size, engine.traits)
        requests = build_requests(
            call,
            body,
            engine.traits,
            number=num_pictures(body, call.tier),
            size_px=size_px,
            num_previews=body.partial_images or 0,
        )
        return await self._answer(call, body, model, requests, raw, "image_generation")

    async def edits(self, call: Call) -> ASGIApp:
        raw = await call.body()
        body, sources = await _edit_body(call, raw)
        call.parsed()
        model, engine = self._open(call, body)
        blobs = await open_pictures(call, sources)
        size_px = edit_size(body.size, blobs[0], engine.traits)
        number = num_pictures(body, call.tier)
        plain = build_requests(call, body, engine.traits, number=number, size_px=size_px)  # refused before any decode
        more: dict[str, Any] = {"init_image": await init_pixels(call, blobs[0], size_px)}
        if len(blobs) > 1:
            more["mask"] = await mask_pixels(blobs[1], blobs[0], size_px)
        if body.strength is not None:
            more["strength"] = body.strength
        body.seed = plain[0].seed
        requests = build_requests(
            call, body, engine.traits, number=number, size_px=size_px, num_previews=body.partial_images or 0, **more
        )
        return await self._answer(call, body, model, requests, raw, "image_edit")

    def _open(self, call: Call, body: ImagesRequest) -> tuple[str, Any]:
        check_picture_fields(body)
        call.streaming = bool(body.stream)
        call.set_timeout(body.timeout_s)
        model, engine = self._service.select(body.model)
        call.record.model = model
        return model, engine

    async def _answer(
        self, call: Call, body: ImagesRequest, model: str, requests: list[GenerateRequest], raw: bytes, operation: str
    ) -> ASGIApp:
        _, engine = self._service.select(model)
        digest = blake3(operation.encode() + raw).digest()
        key = call.request.headers.get("idempotency-key")
        run = self._service.start(engine, requests, tenant=call.tenant.name, idempotency_key=key, digest=digest)
        job = _Job(call, body, model, engine.traits, run, operation, int(time.time()))
        return self._stream(job) if body.stream else await self._whole(job)

    async def _whole(self, job: _Job) -> Response:
        async with aclosing(job.run.follow()) as events:
            finals = await finals_of(events)
        data = []
        for index in sorted(finals):
            record_final(job.call, job.model, job.run.requests[index], finals[index])
            data.append(await self._datum(job, finals[index], index))
        return json_response(
            {
                "created": job.created_s,
                "data": data,
                "background": "opaque",
                "output_format": job.output_format,
                "size": job.size,
                "usage": _usage(list(finals.values())),
                "triptych": _metadata(job, finals),
            },
            job.call.headers,
        )

    async def _datum(self, job: _Job, final: GenerateFinal, index: int) -> dict[str, Any]:
        assert final.frames is not None
        data = await asyncio.to_thread(encode_picture, final.frames[0], job.output_format, job.body.output_compression)
        datum: dict[str, Any] = {"seed": job.run.requests[index].seed, "flagged": bool(final.counters.get("flagged"))}
        if job.body.response_format == "url":
            file_id = self._service.keep_file(job.call.tenant.name, FORMATS[job.output_format], data)
            return {"url": str(job.call.request.base_url) + f"v1/images/{file_id}/content", **datum}
        return {"b64_json": base64.b64encode(data).decode(), **datum}

    def _stream(self, job: _Job) -> EventStream:
        return EventStream(self._frames(job), job.call.headers)

    async def _frames(self, job: _Job) -> AsyncGenerator[bytes, None]:
        async with aclosing(job.run.follow()) as events:
            async for entry in events:
                error = error_of(entry.event)
                if error is not None:
                    raise error
                if isinstance(entry.event, PreviewEvent):
                    yield await self._partial(job, entry, entry.event)
                elif isinstance(entry.event, GenerateFinal):
                    record_final(job.call, job.model, job.run.requests[entry.index], entry.event)
                    yield await self._completed(job, entry, entry.event)

    async def _partial(self, job: _Job, entry: Indexed, event: PreviewEvent) -> bytes:
        request = job.run.requests[entry.index]
        pixels = await asyncio.to_thread(enlarge, event.pixels, request.width_px, request.height_px)
        data = await asyncio.to_thread(encode_picture, pixels, job.output_format, job.body.output_compression)
        payload = {**_event(job, "partial_image", data), "partial_image_index": event.index, "index": entry.index}
        return _named_frame(payload)

    async def _completed(self, job: _Job, entry: Indexed, final: GenerateFinal) -> bytes:
        assert final.frames is not None
        data = await asyncio.to_thread(encode_picture, final.frames[0], job.output_format, job.body.output_compression)
        extra = {"index": entry.index, "usage": _usage([final]), "triptych": _metadata(job, {entry.index: final})}
        return _named_frame({**_event(job, "completed", data), **extra})

    async def content(self, request: Request) -> Response:
        front: Front = request.app.state.front
        tenant = front.tenants.of(request.headers)
        mime, data = self._service.file(tenant.name, request.path_params["file_id"])
        return Response(data, media_type=mime)


async def _edit_body(call: Call, raw: bytes) -> tuple[EditRequest, list[tuple[str, str | bytes]]]:
    """The fields, and the picture and mask by field name. Raises InvalidRequest."""
    if not is_form(call.request.headers):
        body, ignored = decode_body(raw, EditRequest)
        call.ignore(ignored)
        images: list[Any] = [body.image] if isinstance(body.image, str) else list(body.image or ())
        masks: list[Any] = [body.mask] if body.mask else []
    else:
        form = await parse_form(call.request.headers, raw)
        refuse_typos(dict.fromkeys([*form.fields, *form.files]), EditRequest)
        try:
            body = msgspec.convert(form.fields, EditRequest, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"the form: {error}") from error
        images, masks = list(form.files.get("image", ())), list(form.files.get("mask", ()))
    if len(images) != 1:
        raise InvalidRequest(f"an edit takes one image, got {len(images)}", param="image")
    return body, [("image", images[0]), *(("mask", mask) for mask in masks[:1])]


def _event(job: _Job, kind: str, data: bytes) -> dict[str, Any]:
    return {
        "type": f"{job.operation}.{kind}",
        "b64_json": base64.b64encode(data).decode(),
        "background": "opaque",
        "created_at": job.created_s,
        "output_format": job.output_format,
        "quality": job.body.quality or "auto",
        "size": job.size,
    }


def _named_frame(payload: dict[str, Any]) -> bytes:
    kind: str = payload["type"]
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(payload) + b"\n\n"


def _usage(finals: list[GenerateFinal]) -> dict[str, Any]:
    text = int(sum(final.counters.get("text_tokens", 0) for final in finals))
    image = int(sum(final.counters.get("image_tokens", 0) for final in finals))
    output = int(sum(final.counters.get("latent_tokens", 0) for final in finals))
    return {
        "input_tokens": text + image,
        "input_tokens_details": {"text_tokens": text, "image_tokens": image},
        "output_tokens": output,
        "total_tokens": text + image + output,
    }


def _metadata(job: _Job, finals: dict[int, GenerateFinal]) -> dict[str, Any]:
    """What was run, and where the time went: one entry a picture."""
    request = job.run.requests[0]
    off = why_no_default_cache(job.traits, request.task, request.num_steps) if job.body.step_cache is None else None
    return {
        "model": job.model,
        "architecture": job.traits.architecture,
        "is_distilled": job.traits.is_distilled,
        "num_inference_steps": request.num_steps,
        "guidance_scale": request.guidance_scale,
        "step_cache": request.step_cache,
        **({"step_cache_off": off} if off else {}),
        "pictures": [
            {"stage_ms": rounded(final.stage_ms), "counters": rounded(final.counters)}
            for _, final in sorted(finals.items())
        ],
    }

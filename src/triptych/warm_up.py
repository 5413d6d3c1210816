"""The first request of a model, asked by the house itself: lazy imports, first allocations and first kernels are paid
before `/ready`, not by a user.

The front's half (decode, processor, template) runs while the engine loads its weights; the requests that it gives are
kept for an engine that is started again. Nothing of it is left in a cache or a counter.
"""

from __future__ import annotations

import asyncio
import io
import logging
import wave
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, Protocol

import av
import numpy as np
from PIL import Image

from triptych.core.clock import Clock, MonotonicClock
from triptych.core.config import MediaConfig, Tier
from triptych.core.errors import TriptychError
from triptych.core.events import Event, FinalEvent, FinishReason
from triptych.core.media import MediaRef, Modality
from triptych.core.prepared import PreparedRequest
from triptych.core.sampling import SamplingParams
from triptych.core.stages import StageClock
from triptych.media.plane import MediaPlane
from triptych.prompt.builder import PromptBuilder

LOGGER = logging.getLogger("triptych.warm_up")
TIMEOUT_S = 60.0  # of one request in the engine
_SAMPLING = SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, seed=0, ignore_eos=True)
_TEXT = "What is there to see, to hear and to read here? One word is enough."


class WarmEngine(Protocol):
    """What is asked of an engine."""

    def submit(self, request: PreparedRequest) -> AsyncIterator[Event]: ...

    async def forget(self) -> None: ...


class WarmUp:
    """One model's. `start` the front's half early; call it with the engine once that has loaded. A model that cannot
    answer this still serves what it can: nothing is raised but by a bug."""

    def __init__(self, name: str, builder: PromptBuilder, media: MediaConfig, clock: Clock | None = None) -> None:
        self._name = name
        self._builder = builder
        self._media = media
        self._clock = clock or MonotonicClock()
        self._requests: asyncio.Task[list[PreparedRequest]] | None = None

    def start(self) -> None:
        if self._requests is None:
            self._requests = asyncio.create_task(self._prepare_all())

    async def close(self) -> None:
        if self._requests is not None:
            self._requests.cancel()
            await asyncio.gather(self._requests, return_exceptions=True)

    async def __call__(self, engine: WarmEngine) -> None:
        self.start()
        assert self._requests is not None
        requests = await self._requests
        started_s = self._clock.now_s()
        for request in requests:
            now_s = self._clock.now_s()
            await self._run(engine, replace(request, arrival_s=now_s, handoff_s=now_s, deadline_s=now_s + TIMEOUT_S))
        try:
            await engine.forget()
        except TriptychError as error:  # the engine was lost: whoever watches it says so
            LOGGER.warning("%s: warm-up: %s", self._name, error)
        LOGGER.info("%s: warm after %.1f s", self._name, self._clock.now_s() - started_s)

    async def _run(self, engine: WarmEngine, request: PreparedRequest) -> None:
        async for event in engine.submit(request):
            if isinstance(event, FinalEvent) and event.reason is FinishReason.ERROR:
                LOGGER.info("%s: %s: %s", self._name, request.request_id, event.error_message)

    async def _prepare_all(self) -> list[PreparedRequest]:
        """Text, each kind of media that the model takes, and text under a grammar; what cannot be made is left out."""
        found: list[PreparedRequest] = []
        kinds: list[Modality | None] = [None, *(kind for kind in Modality if kind in self._builder.layout.modalities)]
        async with MediaPlane(self._media) as media:  # one of its own: the server's counters stay the users'
            for kind in kinds:
                try:
                    found.append(await self._prepare(kind, media))
                except TriptychError as error:
                    LOGGER.info("%s: warm-up without %s: %s", self._name, kind or "text", error)
        if found:
            grammar = {"grammar_kind": "json_schema", "grammar": '{"type": "object"}', "ignore_eos": False}
            sampling = SamplingParams(max_tokens=2, temperature=0.0, **grammar)  # type: ignore[arg-type]
            found.append(replace(found[0], request_id="warm-up-grammar", sampling=sampling))
            stream = self._builder.text_stream(("\n",))
            stream.push(found[0].token_ids)
            stream.finish()
        self._builder.forget()
        return found

    async def _prepare(self, kind: Modality | None, media: MediaPlane) -> PreparedRequest:
        now_s = self._clock.now_s()
        known: dict[str, Any] = dict(
            sampling=_SAMPLING, tenant="warm-up", arrival_s=now_s, clock=StageClock(now_s), request_id=f"warm-up-{kind}"
        )
        if kind is None and self._builder.tokenizer.chat_template is None:
            return await self._builder.prepare_completion(_TEXT, **known)
        content: Any = _TEXT
        if kind is not None:
            sample = await asyncio.to_thread(SAMPLES[kind])
            content = [MediaRef(kind, sample, options={"detail": "low"}), {"type": "text", "text": _TEXT}]
        message = {"role": "user", "content": content}
        return await self._builder.prepare_chat([message], media=media, tier=Tier(), **known)


def _picture() -> bytes:
    file = io.BytesIO()
    Image.fromarray(_pixels(224)).save(file, "JPEG")
    return file.getvalue()


def _clip() -> bytes:
    """Two seconds of eight frames."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(4))
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(_pixels(64), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _sound() -> bytes:
    """A second of a tone."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes((np.sin(np.arange(16_000) / 6) * 8000).astype("<i2").tobytes())
    return file.getvalue()


def _pixels(side_px: int) -> np.ndarray:
    """[side, side, 3]: a ramp of colours."""
    ramp = np.linspace(0, 255, side_px, dtype=np.uint8)
    return np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], np.uint8(90)), axis=-1)


SAMPLES: dict[Modality, Callable[[], bytes]] = {
    Modality.IMAGE: _picture,
    Modality.VIDEO: _clip,
    Modality.AUDIO: _sound,
}

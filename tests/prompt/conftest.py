"""A tiny Qwen2.5-VL folder without weights that matter, a media plane that decodes nothing, and builders over them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from blake3 import blake3

from tests.models.conftest import single_thread
from tests.models.folders import stock_greedy, write_folder
from tests.models.parity import drawing
from tests.models.test_image_families import FAMILIES
from tests.models.test_qwen2_audio import EXTRACTOR, tiny_audio
from tests.models.test_qwen2_vl import PREPROCESSOR, stock_inputs, tiny
from tests.models.test_qwen3_vl import PREPROCESSOR as PREPROCESSOR3
from tests.models.test_qwen3_vl import tiny_qwen3
from triptych.core.config import Tier
from triptych.core.media import DecodedImage, MediaBlob, MediaHeader, MediaRef, Modality
from triptych.core.sampling import SamplingParams
from triptych.core.stages import StageClock
from triptych.prompt.builder import load_prompt_builder
from triptych.testing.clock import FakeClock

__all__ = [
    "EXTRACTOR",
    "FAMILIES",
    "PREPROCESSOR",
    "PREPROCESSOR3",
    "drawing",
    "single_thread",
    "stock_greedy",
    "stock_inputs",
    "tiny",
    "tiny_audio",
    "tiny_qwen3",
    "write_folder",
]


class DrawnMedia:
    """Stands for the media plane: a source `WxH#seed` is a picture of that size, there at once unless `late` names an
    event to wait for. Counts what is asked of it."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.num_decoded = 0
        self.num_opened = 0
        self.decoding = asyncio.Event()
        self.late: dict[str, asyncio.Event] = {}
        self.fails_on: str | None = None
        self.error: Exception | None = None

    async def open(self, refs, *, tier, tenant, on_open=None):
        self.clock.advance(0.5)
        return await asyncio.gather(*(self._open(index, ref, on_open) for index, ref in enumerate(refs)))

    async def _open(self, index, ref, on_open) -> MediaBlob:
        if ref.source in self.late:
            await self.late[ref.source].wait()
        blob = self._blob(ref)
        if on_open is not None:
            on_open(index, blob)
        self.num_opened += 1
        return blob

    def _blob(self, ref: MediaRef) -> MediaBlob:
        size = str(ref.source).partition("#")[0]
        width, height = (int(v) for v in size.split("x"))
        header = MediaHeader(ref.modality, "image/png", 1, width, height, 1)
        data = str(ref.source).encode()
        return MediaBlob(header, data, blake3(data).digest(), ref.param, ref.options)

    async def decode(self, blob, spec, *, tier):
        self.num_decoded += 1
        self.decoding.set()
        await asyncio.sleep(0.01)
        self.clock.advance(0.25)
        if self.error is not None and blob.data.decode() == self.fails_on:
            raise self.error
        value = blake3(blob.data).digest()[0]
        return DecodedImage(np.full((blob.header.height_px, blob.header.width_px, 3), value, np.uint8))


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory):
    model, words = tiny("Qwen2_5_VLForConditionalGeneration")
    return write_folder(tmp_path_factory.mktemp("prompt-qwen"), model, words, preprocessor=PREPROCESSOR)


@pytest.fixture(scope="session")
def llava_folder(tmp_path_factory):
    family = FAMILIES["llava-clip"]
    model, words = family.build()
    return write_folder(tmp_path_factory.mktemp("prompt-llava"), model, words, preprocessor=family.preprocessor)


@pytest.fixture
def clock():
    return FakeClock(100.0)


@pytest.fixture
def media(clock):
    return DrawnMedia(clock)


@pytest.fixture
def builder(qwen_folder, clock):
    made = load_prompt_builder(str(qwen_folder), dtype="float32", time=clock)
    yield made
    made.close()


@pytest.fixture
def prepare(builder, media, clock):
    """`await prepare(messages, ...)` with everything else filled in."""

    async def run(messages, *, sampling=None, tier=None, tenant="acme", stage_clock=None, using=None, **rest):
        return await (using or builder).prepare_chat(
            messages,
            sampling=sampling or SamplingParams(max_tokens=8),
            media=media,
            tier=tier or Tier(),
            tenant=tenant,
            request_id="r-1",
            arrival_s=clock.now_s(),
            clock=stage_clock or StageClock(clock.now_s()),
            **rest,
        )

    return run


def picture(source: str, **options) -> MediaRef:
    return MediaRef(Modality.IMAGE, source, param="messages.0.content.0", options=options)

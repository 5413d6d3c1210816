"""Real containers through media plane and prompt builder: what the header promises is what is served."""

from __future__ import annotations

import io
import wave

import av
import numpy as np
import pytest

from triptych.core.config import MediaConfig, Tier
from triptych.core.media import MediaRef, Modality
from triptych.core.sampling import SamplingParams
from triptych.core.stages import StageClock
from triptych.media.plane import MediaPlane
from triptych.prompt.builder import load_prompt_builder

from .conftest import (
    EXTRACTOR,
    FAMILIES,
    PREPROCESSOR,
    PREPROCESSOR3,
    drawing,
    tiny,
    tiny_audio,
    tiny_qwen3,
    write_folder,
)


def clip_bytes(num_frames, rate, width_px=96, height_px=64):
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width_px, height_px, "yuv420p"
        for seed in range(num_frames):
            frame = av.VideoFrame.from_ndarray(drawing(width_px, height_px, seed).pixels, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return data.getvalue()


def sound_bytes(num_samples, rate):
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(rate)
        tone = (np.sin(np.arange(num_samples) * 0.05) * 12_000).astype("<i2")
        file.writeframes(np.repeat(tone[:, None], 2, axis=1).tobytes())
    return data.getvalue()


async def served_and_counted(builder, ref):
    messages = [{"role": "user", "content": [ref, {"type": "text", "text": "how many"}]}]
    async with MediaPlane(MediaConfig()) as plane:
        counted = await builder.count_tokens(messages, media=plane, tier=Tier(), tenant="acme")
        request = await builder.prepare_chat(
            messages,
            sampling=SamplingParams(max_tokens=4),
            media=plane,
            tier=Tier(),
            tenant="acme",
            request_id="r",
            arrival_s=0.0,
            clock=StageClock(0.0),
        )
    builder.close()
    return request, counted


@pytest.mark.parametrize(("num_frames", "rate"), [(1, 25), (7, 10), (50, 25), (33, 30)])
@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3-vl"])
async def test_clip_is_served_as_counted(kind, num_frames, rate, tmp_path):
    """A decoded clip fills the placeholders that its header laid, time stamps included."""
    make = tiny_qwen3 if kind == "qwen3-vl" else lambda: tiny("Qwen2_5_VLForConditionalGeneration")
    model, words = make()
    write_folder(tmp_path, model, words, preprocessor=PREPROCESSOR3 if kind == "qwen3-vl" else PREPROCESSOR)
    ref = MediaRef(Modality.VIDEO, clip_bytes(num_frames, rate), options={"max_frames": 8})
    request, counted = await served_and_counted(load_prompt_builder(str(tmp_path)), ref)
    (item,) = request.items

    assert counted.token_ids == request.token_ids
    assert item.num_embeds == sum(span.length for span in request.spans) == counted.media_tokens["video"]
    assert item.num_tokens_encoder == len(item.features["pixel_values"])
    assert item.features["grid_thw"][0, 0] <= 4


@pytest.mark.parametrize(("num_samples", "rate"), [(16_000, 16_000), (30_001, 22_050), (8_000, 8_000)])
async def test_sound_is_served_as_counted(num_samples, rate, tmp_path):
    """A resampled stereo sound fills the placeholders that its header laid."""
    model, words = tiny_audio()
    write_folder(tmp_path, model, words, preprocessor=EXTRACTOR)
    request, counted = await served_and_counted(
        load_prompt_builder(str(tmp_path)), MediaRef(Modality.AUDIO, sound_bytes(num_samples, rate))
    )

    assert counted.token_ids == request.token_ids
    assert request.items[0].num_embeds == request.spans[0].length == counted.media_tokens["audio"]


@pytest.mark.parametrize(("num_frames", "rate"), [(1, 25), (50, 25), (33, 10)])
async def test_smolvlm_clip_is_served_as_counted(num_frames, rate, tmp_path):
    """Frames of one tile each under their times: the decoded clip fills what the header laid."""
    family = FAMILIES["smolvlm"]
    model, words = family.build()
    write_folder(tmp_path, model, words, preprocessor=family.preprocessor)
    ref = MediaRef(Modality.VIDEO, clip_bytes(num_frames, rate), options={"max_frames": 3})
    request, counted = await served_and_counted(load_prompt_builder(str(tmp_path)), ref)
    (item,) = request.items

    assert counted.token_ids == request.token_ids
    assert item.num_embeds == sum(span.length for span in request.spans) == counted.media_tokens["video"]
    assert len(item.features["pixel_values"]) == len(request.spans)

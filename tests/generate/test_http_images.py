"""The image endpoints through a real server, with the stock `openai` client where it can say it."""

from __future__ import annotations

import base64
import io
import threading
import time
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from .conftest import Door

FORM = {"prompt": "a red square", "size": "32x32", "num_inference_steps": 4, "seed": 3}


def pixels_of(b64: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64))))


def png(width_px: int, height_px: int, mode: str = "RGB", colour: Any = (200, 30, 30)) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width_px, height_px), colour).save(out, "PNG")
    return out.getvalue()


def post(door: Door, form: dict[str, Any], path: str = "/v1/images/generations", **options: Any) -> Any:
    with door.http() as http:
        return http.post(path, json=form, **options)


def test_openai_client_gets_pictures(door: Door):
    """`images.generate` with n=2 gives two different pictures of the size asked for, and a token count."""
    extra = {"seed": 5, "num_inference_steps": 3}
    answer = door.client.images.generate(model="pictures", prompt="a cat", n=2, size="48x32", extra_body=extra)

    first, second = (pixels_of(datum.b64_json) for datum in answer.data)
    assert first.shape == second.shape == (32, 48, 3)
    assert (first != second).any()
    assert answer.usage.output_tokens == 2 * (48 // 4) * (32 // 4)
    assert answer.usage.input_tokens_details.text_tokens > 0


def test_a_seed_fixes_the_picture(door: Door):
    """The same seed gives the same picture, alone or as the second of two."""
    pair = post(door, FORM | {"n": 2}).json()["data"]
    alone = post(door, FORM | {"seed": 4}).json()["data"][0]

    assert [datum["seed"] for datum in pair] == [3, 4]
    assert np.abs(pixels_of(pair[1]["b64_json"]).astype(int) - pixels_of(alone["b64_json"])).max() <= 1


def test_stream_gives_partials_then_the_picture(door: Door):
    """Partial images come in order, at full size, before the completed event; the client's types read them."""
    stream = door.client.images.generate(
        prompt="a cat", size="32x32", stream=True, partial_images=3, extra_body={"num_inference_steps": 8}
    )
    events = list(stream)

    assert [event.type for event in events] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:3]] == [0, 1, 2]
    assert {pixels_of(event.b64_json).shape for event in events} == {(32, 32, 3)}
    assert events[-1].usage.output_tokens == 64


def test_edit_with_a_mask_keeps_the_rest(door: Door):
    """Under a mask with a transparent hole an edit gives a picture of the input's size."""
    hole = Image.new("RGBA", (32, 32), (0, 0, 0, 255))
    hole.paste((0, 0, 0, 0), (8, 8, 24, 24))
    out = io.BytesIO()
    hole.save(out, "PNG")
    answer = door.client.images.edit(
        image=("in.png", png(32, 32)),
        mask=("mask.png", out.getvalue()),
        prompt="a blue square",
        extra_body={"num_inference_steps": "6", "strength": "0.7", "seed": "1"},
    )

    assert pixels_of(answer.data[0].b64_json).shape == (32, 32, 3)


def test_edit_takes_a_data_url(door: Door):
    """JSON edits take the picture as a data URL; its size is rounded down to what the model takes."""
    url = "data:image/png;base64," + base64.b64encode(png(35, 34)).decode()
    answer = post(door, {"prompt": "x", "image": url, "num_inference_steps": 4}, "/v1/images/edits")

    assert answer.json()["size"] == "32x32"


@pytest.mark.parametrize(("output_format", "mime"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_output_formats_and_urls(door: Door, output_format: str, mime: str):
    """Each format comes back as itself, by URL too."""
    answer = post(door, FORM | {"output_format": output_format, "response_format": "url"}).json()
    with door.http() as http:
        got = http.get(answer["data"][0]["url"])

    assert got.status_code == 200
    assert Image.open(io.BytesIO(got.content)).format == mime


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"size": "33x32"}, 400, "width must be a positive multiple of 4 px, got 33"),
        ({"size": "huge"}, 400, "size must be WIDTHxHEIGHT or auto, got 'huge'"),
        ({"size": "512x512"}, 413, "max_generated_pixels is 16384, the request has 262144"),
        ({"n": 5}, 413, "max_images_per_request is 4, the request has 5"),
        ({"n": 0}, 400, "n must be 1 or more, got 0"),
        ({"num_inference_steps": 0}, 400, "num_inference_steps must be between 1"),
        ({"num_inference_steps": 1000}, 413, "max_steps is 150, the request has 1000"),
        ({"num_inference_step": 4}, 400, "did you mean 'num_inference_steps'?"),
        ({"prompt": ""}, 400, "prompt is empty"),
        ({"prompt": 3}, 400, "prompt: Expected `str`, got `int`"),
        ({"model": "picturs"}, 404, "did you mean 'pictures'?"),
        ({"partial_images": 2}, 400, "partial_images needs stream: true"),
        ({"partial_images": 9, "stream": True}, 400, "partial_images must be between 0 and 3, got 9"),
        ({"background": "transparent"}, 400, "transparent background is not supported"),
        ({"output_compression": 101}, 400, "output_compression must be between 0 and 100, got 101"),
        ({"output_format": "gif"}, 400, "output_format"),
        ({"step_cache": "teacache"}, 400, "step cache 'teacache' is not available here"),
    ],
)
def test_bad_requests_are_refused_by_name(door: Door, change: dict[str, Any], status: int, words: str):
    """Each mistake gets its status and a message that names the rule and the value."""
    answer = post(door, FORM | change)

    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


@pytest.mark.parametrize(
    ("files", "fields", "status", "words"),
    [
        ({}, {"prompt": "x"}, 400, "an edit takes one image, got 0"),
        ({"image": b"not a picture"}, {"prompt": "x"}, 422, ""),
        ({"image": png(32, 32)[:60]}, {"prompt": "x"}, 400, ""),
        ({"image": png(32, 32), "mask": png(16, 16)}, {"prompt": "x"}, 400, "mask is 16x16, the picture is 32x32"),
        ({"image": png(32, 32)}, {"prompt": "x", "strength": "7"}, 400, "strength must be between 0 and 1, got 7"),
        ({"image": png(32, 32)}, {"prompt": "x", "n": "many"}, 400, "the form"),
        ({"image": png(512, 512)}, {"prompt": "x"}, 413, "max_generated_pixels"),
    ],
)
def test_bad_edits_are_refused(door: Door, files: Any, fields: Any, status: int, words: str):
    """A missing, broken, too large or unfitting picture is the caller's error, by name."""
    with door.http() as http:
        named = {name: (f"{name}.png", data) for name, data in files.items()} or {"other": ("o", b"")}
        answer = http.post("/v1/images/edits", data=fields, files=named)

    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


def test_idempotency_key_joins_and_replays(door: Door):
    """Two calls at once with one key run once; a third replays; another body is a conflict."""
    headers, form = {"idempotency-key": "k1"}, FORM | {"seed": None, "num_inference_steps": 20}
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(post(door, form, headers=headers))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    replay = post(door, form, headers=headers)
    conflict = post(door, FORM, headers=headers)

    pictures = {answer.json()["data"][0]["b64_json"] for answer in [*answers, replay]}
    assert len(pictures) == 1
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "conflict")


def test_a_client_that_hangs_up_frees_its_row(door: Door):
    """Leaving a stream, or a call without a stream, takes the row out of the engine."""
    form = FORM | {"num_inference_steps": 150, "size": "128x128"}
    streamed = form | {"stream": True, "partial_images": 3}
    with door.http() as http, http.stream("POST", "/v1/images/generations", json=streamed) as answer:
        next(answer.iter_lines())
    with pytest.raises(openai.APITimeoutError):
        door.client.images.generate(prompt="x", timeout=0.3, extra_body=form)

    deadline_s = time.monotonic() + 20
    while door.in_flight() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert door.in_flight() == 0


def test_full_queue_is_503_with_retry_after(door: Door):
    """What does not fit the queue is refused whole, at once; what is inside is served."""
    form = FORM | {"n": 4, "num_inference_steps": 20, "size": "32x32"}
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(post(door, form))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    by_status = {answer.status_code for answer in answers}
    refused = [answer for answer in answers if answer.status_code == 503]
    assert by_status == {200, 503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


def test_no_cache_may_be_asked_for_by_name(door: Door):
    """`none` is a step cache that every model has."""
    answer = post(door, FORM | {"step_cache": "none"})

    assert answer.status_code == 200
    assert answer.json()["triptych"]["step_cache"] is None


def test_metrics_name_the_work(door: Door):
    """After a picture, the histograms of its stages carry model, pixels, frames, steps and branches, and the counters
    of work and of batches have grown."""
    with door.http() as http:
        before = http.get("/metrics").text
        with http.stream("POST", "/v1/images/generations", json=FORM | {"stream": True, "partial_images": 1}) as answer:
            answer.read()
        text = http.get("/metrics").text

    def value(text: str, series: str) -> float:
        found = [line for line in text.splitlines() if line.startswith(series + " ")]
        return float(found[0].split()[1]) if found else 0.0

    labels = 'branches="2",frames="1",model="pictures",pixels="1024",steps="4"'
    stages = ("generate_encode_queue_ms", "text_encode_ms", "denoise_queue_ms", "denoise_ms")
    stages += ("generate_decode_queue_ms", "vae_decode_ms", "step_ms", "first_preview_ms", "generate_ms")
    for name in stages:
        series = f"triptych_{name}_count{{{labels}}}"
        assert value(text, series) == value(before, series) + 1, name
    grown = {"generated_pictures": 1, "generated_frames": 1, "generated_pixels": 1024, "generate_row_steps": 4}
    for name, amount in (grown | {"engine_steps": 4}).items():
        series = f'triptych_{name}_total{{model="pictures"}}'
        assert value(text, series) == value(before, series) + amount, name
    assert 'triptych_cache_hits_total{cache="step",model="pictures"}' in text
    assert 'triptych_queue_depth{model="pictures",queue="denoise"}' in text


def test_ready_names_the_models_that_draw(door: Door):
    """And asks each of them whether it is up."""
    with door.http() as http:
        answer = http.get("/ready")

    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "models": ["pictures", "clips"]})

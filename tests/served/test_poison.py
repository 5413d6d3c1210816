"""Bad requests of every kind beside good ones on the embedded model: each gets its own clear refusal, the good ones the
very tokens of a quiet run, and nothing is held afterwards."""

import base64
import json
import random
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from tests.media.bombs import gif_bomb, jpeg_bomb, png_21_kb
from tests.served.faulty_engine import NAN_EMBEDS, RAISING_EMBEDS
from tests.served.pictures import ask, image_part, picture, user

EMBED_PX = 28
WIDTH = 192


def of_embeds(columns: int, rows: int, seed: int = 0) -> bytes:
    """A picture that this model sees as `columns` x `rows` visual tokens."""
    return picture(seed, columns * EMBED_PX, rows * EMBED_PX)


@dataclass(frozen=True)
class Poison:
    """A request, and what it must be answered: status, code, and a word of the message."""

    name: str
    body: dict[str, Any]
    status: int
    code: str
    word: str
    path: str = "/v1/chat/completions"


def embeds(values: np.ndarray, revision: str, **metadata: str) -> dict[str, Any]:
    data = save({"embeddings": values}, {"model_revision": revision, **metadata})
    return {"type": "image_embeds", "image_embeds": base64.b64encode(data).decode()}


def features(revision: str) -> list[Poison]:
    """Embeddings that came with the request: wrong in shape, count, kind, value, revision, form."""
    good = np.ones((4, WIDTH), np.float32)
    not_finite = good.copy()
    not_finite[2, 5] = np.nan

    def refused(name: str, part: dict[str, Any], word: str) -> Poison:
        return Poison(f"embeds: {name}", ask("what?", part), 400, "embeddings_refused", word)

    return [
        refused("too narrow", embeds(good[:, :100].copy(), revision, grid="1,4,4"), "192 wide, got 100"),
        refused("no matrix", embeds(good.ravel(), revision), "[N, 192]"),
        refused("empty", embeds(good[:0], revision), "at least one"),
        refused("another count than the grid's", embeds(good, revision, grid="1,8,8"), "16"),
        refused("not finite", embeds(not_finite, revision, grid="1,4,4"), "not finite"),
        refused("whole numbers", embeds(good.astype(np.int32), revision, grid="1,4,4"), "dtype"),
        refused("another model's", embeds(good, "0" * 64, grid="1,4,4"), "model_revision"),
        refused("no base64", {"type": "image_embeds", "image_embeds": "***"}, "base64"),
        refused("no file", {"type": "image_embeds", "image_embeds": "AAAA"}, "safetensors"),
        refused(
            "a header that lies",
            {"type": "image_embeds", "image_embeds": base64.b64encode(struct.pack("<Q", 2**60) + b"{}").decode()},
            "header",
        ),
    ]


def prompts() -> list[Poison]:
    long = "red " * 2500  # a token each: more than the language cache holds, less than the model's context
    talk = [{"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}]
    return [
        Poison("no messages", ask("", messages=[]), 400, "invalid_request", "must not be empty"),
        Poison("empty text", {"prompt": ""}, 400, "prompt_refused", "empty", "/v1/completions"),
        Poison("endless text", ask("x" * 3_000_000), 400, "prompt_refused", "context is 4096"),
        Poison("text over the cache", ask(long), 413, "budget_exceeded", "max_model_tokens"),
        Poison("ids outside the vocabulary", {"prompt": [5000]}, 400, "prompt_refused", "5000", "/v1/completions"),
        Poison("an unknown role", ask("", messages=[{"role": "robot", "content": "x"}]), 400, "invalid_request",
               "role"),
        Poison("a role without its id", ask("", messages=[{"role": "tool", "content": "x"}]), 400, "invalid_request",
               "tool_call_id"),
        Poison("roles the template refuses", ask("", messages=talk), 400, "prompt_refused", "must alternate"),
        Poison("wrong type", ask("hi", max_tokens="many"), 400, "invalid_request", "max_tokens"),
        Poison("a typo", ask("hi", temprature=0.5), 400, "invalid_request", "temperature"),
        Poison("unknown wrong type", ask("hi", stream_options=7), 400, "invalid_request", "stream_options"),
        Poison("huge salt", ask("hi", cache_salt="s" * 10**6), 400, "invalid_request", "256"),
        Poison("huge seed", ask("hi", seed=2**70), 400, "invalid_request", "seed"),
        Poison("a bad grammar", ask("hi", response_format={"type": "lark", "grammar": "start: ("}), 400,
               "invalid_request", "grammar"),
    ]  # fmt: skip


def media(allowed_port: int) -> list[Poison]:
    whole = picture(1, 112, 112, "JPEG")

    def one(name: str, part: dict[str, Any], status: int, code: str, word: str) -> Poison:
        return Poison(name, ask("what?", part), status, code, word)

    return [
        one("NaN from the tower", image_part(of_embeds(NAN_EMBEDS, 1)), 500, "model_fault", "not finite"),
        one("exception in the tower", image_part(of_embeds(RAISING_EMBEDS, 1)), 500, "model_fault", "encoder failed"),
        one("over the encoder cache", image_part(of_embeds(31, 31)), 413, "budget_exceeded", "encoder_cache_bytes"),
        one("over the pixel budget", image_part(picture(2, 2000, 1500)), 413, "budget_exceeded", "max_item_pixels"),
        Poison("too many items", ask("?", *[image_part(whole)] * 5), 413, "budget_exceeded", "max_images"),
        one("a strip", image_part(picture(2, 4, 1200)), 400, "invalid_media", "aspect ratio"),
        one("truncated JPEG", image_part(whole[: len(whole) // 2]), 400, "invalid_media", ""),
        one("truncated PNG", image_part(picture(1, 112, 112)[:-40]), 400, "invalid_media", ""),
        one("broken header", image_part(b"\x89PNG\r\n\x1a\n" + b"\0" * 50), 400, "invalid_media", ""),
        one("no picture", image_part(b"MZ" + b"\0" * 500), 422, "unsupported_media", ""),
        one("empty", image_part("data:image/png;base64,"), 400, "invalid_media", "no content"),
        one("PNG bomb", image_part(png_21_kb()), 413, "budget_exceeded", "max_item_pixels"),
        one("JPEG bomb", image_part(jpeg_bomb()), 413, "budget_exceeded", "max_"),
        one("GIF bomb", image_part(gif_bomb()), 413, "budget_exceeded", "max_"),
        one("metadata address", image_part("http://169.254.169.254/latest"), 403, "forbidden_source", ""),
        one("inside address", image_part(f"http://10.0.0.1:{allowed_port}/"), 403, "forbidden_source", ""),
        one("inside address, in octal", image_part(f"http://0177.0.0.2:{allowed_port}/"), 403, "forbidden_source", ""),
        one("another port", image_part("http://127.0.0.1:22/"), 403, "forbidden_source", "port"),
        one("a local file", image_part("file:///etc/passwd"), 403, "forbidden_source", ""),
        one("a sound", {"type": "input_audio", "input_audio": {"data": "AAAA"}}, 422, "unsupported_media", ""),
        one("huge id", image_part(whole, media_id="i" * 10**6), 400, "invalid_request", "256"),
        one("an id that nobody gave", {"type": "image_url", "media_id": "nobody"}, 400, "unknown_media_id", "nobody"),
        one("wrong option", image_part(whole, options={"max_pixels": "many"}), 400, "invalid_request", "max_pixels"),
    ]


def good_requests(source_url: str) -> list[dict[str, Any]]:
    """Text, pictures of several sizes, a picture by URL, two that do not fit the encoder cache side by side, a talk, a
    picture of one pixel, a seed, a grammar."""
    talk = [user("what?", image_part(of_embeds(4, 4, 21))), {"role": "assistant", "content": "A disc."}, user("where?")]
    yes_or_no = {"type": "regex", "grammar": "(yes|no)"}
    return [
        ask("How many red circles are there?"),
        ask("Say all that you know. " * 12),
        ask("What is this?", image_part(of_embeds(3, 3, 11))),
        ask("How many?", image_part(of_embeds(5, 4, 12))),
        ask("Which colour?", image_part(picture(13, 300, 200, "JPEG"))),
        ask("Which colour?", image_part(source_url)),
        ask("Is there a box?", image_part(of_embeds(16, 16, 14))),
        ask("What changed?", image_part(of_embeds(22, 22, 15)), image_part(of_embeds(21, 22, 16))),
        ask("", messages=talk),
        ask("What is here?", image_part(picture(17, 1, 1))),
        ask("Tell me.", image_part(of_embeds(4, 2, 18)), temperature=1.0, seed=5),
        ask("Is it red?", image_part(of_embeds(4, 4, 19)), response_format=yes_or_no, ignore_eos=False),
    ]


def tokens_of(body: dict[str, Any], answer: httpx.Response) -> list[list[int]]:
    """The bytes of each token, whole or streamed."""
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        found = answer.json()["choices"][0]["logprobs"]["content"]
    else:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        assert answer.text.endswith("data: [DONE]\n\n")
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        found = [token for choice in choices for token in (choice.get("logprobs") or {"content": []})["content"]]
    return [token["bytes"] for token in found]


@pytest.fixture(scope="module")
def poison(served) -> list[Poison]:
    with served.http() as http:
        revision = http.get("/v1/models").json()["data"][0]["revision"]
    return [*features(revision), *prompts(), *media(served.sources.port)]


def is_alive(served, stop: threading.Event) -> list[int]:
    """The status of /health, asked again and again until `stop`."""
    statuses = []
    while not stop.wait(0.1):
        statuses.append(httpx.get(f"{served.url}/health", timeout=20).status_code)
    return statuses


def test_poison_changes_no_other_answer(served, poison):
    """Every bad request thrown in between good ones, streamed and whole: its own status, code and words; the others'
    tokens are the quiet run's; at the end nothing is reserved, and the server is alive and ready."""
    good = good_requests(served.sources.url("/picture"))
    quiet = [tokens_of(body, served.chat(body)) for body in good]
    assert all(len(tokens) == 24 for tokens in quiet[:-1])
    served.flush()

    def throw(one: Poison, stream: bool) -> Callable[[], str]:
        def check() -> str:
            answer = served.chat({**one.body, "stream": stream}, path=one.path)
            error = answer.json()["error"] if answer.status_code != 200 else {"code": "ok", "message": answer.text}
            told = (answer.status_code, error["code"], one.word in error["message"])
            return (
                "" if told == (one.status, one.code, True) else f"{one.name}: {answer.status_code} {str(error)[:300]}"
            )

        return check

    def check_tokens(index: int, stream: bool) -> Callable[[], str]:
        def check() -> str:
            body = {**good[index], "stream": stream}
            tokens = tokens_of(body, served.chat(body))
            return "" if tokens == quiet[index] else f"good request {index}: {tokens} instead of {quiet[index]}"

        return check

    work = [throw(one, stream) for one in poison for stream in (False, True)]
    work += [check_tokens(index, stream) for index in range(len(good)) for stream in (False, True)]
    random.Random(1).shuffle(work)
    stop = threading.Event()
    with ThreadPoolExecutor(13) as pool:
        alive = pool.submit(is_alive, served, stop)
        wrong = [said for said in pool.map(lambda check: check(), work) if said]
        stop.set()

    assert not wrong, "\n".join(wrong)
    assert set(alive.result()) == {200}
    served.wait_until_free()
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/ready").json()["models"] == ["tiny-vl"]
    metrics = served.metrics()
    assert metrics["triptych_engine_restarts_total"] == 0
    assert metrics["triptych_transfers_shared_total"] > 0


def test_picture_by_embeddings_is_good_company(served):
    """The same form of embeddings as the bad ones, right: it is answered, with the tokens that its numbers give."""
    with served.http() as http:
        revision = http.get("/v1/models").json()["data"][0]["revision"]
    values = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
    body = ask("what?", embeds(values, revision, grid="1,4,4"))
    first, again = (tokens_of(body, served.chat(body)) for _ in range(2))

    assert first == again
    assert len(first) == 24

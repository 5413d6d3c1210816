"""Every refusal has the right status, the OpenAI form, a stable code, and names the field at fault."""

import base64
from concurrent.futures import ThreadPoolExecutor

import pytest
from toy_door import picture_message, png_url

from triptych.core.config import Config, HttpConfig, Tier
from triptych.core.errors import (
    BudgetExceeded,
    DeadlineExceeded,
    InvalidMedia,
    ModelFault,
    Overloaded,
    RateLimited,
    SourceTimeout,
    leaves,
)
from triptych.http.status import error_body, error_headers, status_of
from triptych.testing.toy_engine import ToyEngine, ToyTimes, model_fault

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"messages": "hi"}, 400, "messages", "Expected `array`, got `str`"),
        ({"messages": []}, 400, "messages", "must not be empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role", "may be assistant, developer"),
        ({"messages": [{"role": "usr", "content": "x"}]}, 400, "messages.0.role", "did you mean 'user'?"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", "got `int`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            400,
            "messages.0.content.0.type",
            "image_url, video_url",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, 400, "messages.0.content.0.type", "required"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages", "alternate"),
        ({"messages": USER + USER}, 400, "messages", "alternate"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.tool_call_id", "tool_call_id"),
        ({"max_token": 5}, 400, "max_token", "did you mean 'max_tokens'?"),
        ({"temprature": 5}, 400, "temprature", "did you mean 'temperature'?"),
        ({"max_new_tokens": 5}, 400, "max_new_tokens", "use max_completion_tokens"),
        ({"stream_options": {"include_usge": True}, "stream": True}, 400, "stream_options.include_usge", "usage"),
        ({"max_tokens": "5"}, 400, "max_tokens", "Expected `int | null`, got `str`"),
        ({"max_tokens": 0}, 400, "max_tokens", "between 1 and"),
        ({"temperature": -1}, 400, "temperature", "got -1"),
        ({"top_p": 2}, 400, "top_p", "between"),
        ({"n": 0}, 400, "n", "between 1 and 16"),
        ({"n": 1000}, 400, "n", "got 1000"),
        ({"stop": [""]}, 400, "stop", "empty"),
        ({"stop": ["x"] * 99}, 400, "stop", "99"),
        ({"cache_salt": "s" * 10_000}, 400, "cache_salt", "256"),
        ({"logit_bias": {"cat": 1}}, 400, "logit_bias", "token id"),
        ({"logit_bias": {"1": 1000}}, 400, "logit_bias.1", "-100 and 100"),
        ({"top_logprobs": 3}, 400, "top_logprobs", "logprobs"),
        ({"top_logprobs": 30, "logprobs": True}, 400, "top_logprobs", "between 0 and 20"),
        ({"stream_options": {}}, 400, "stream_options", "stream"),
        ({"tool_choice": "auto"}, 400, "tool_choice", "tools"),
        ({"modalities": ["audio"]}, 400, "modalities", "audio"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "json_schema"),
        ({"model": "toi"}, 404, "model", "did you mean 'toy'?"),
        ({"seed": 2**70}, 400, "seed", ""),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, None, "4096"),
        ({"messages": [{"role": "user", "content": ""}], "timeout_s": 0}, 400, "timeout_s", "over 0"),
    ],
)
def test_bad_field_is_named(toy, change, status, param, words):
    """A wrong type, a wrong value, a typo: 4xx, with the field and what was expected."""
    with toy.http() as http:
        answer = http.post(CHAT, json={"messages": USER, **change})

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert words in error["message"]
    assert set(error) >= {"message", "type", "code", "param"}


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/chat/completions", 404, "did you mean '/v1/chat/completions'?"),
        ("POST", "/v1/chat/completions/", 404, "did you mean '/v1/chat/completions'?"),
        ("POST", "/v1/chat/completion", 404, "did you mean '/v1/chat/completions'?"),
        ("GET", "/nothing/like/it", 404, "POST goes to /v1/chat/completions"),
        ("GET", "/v1/chat/completions", 405, "takes POST, not GET"),
        ("POST", "/v1/models", 405, "takes GET, not POST"),
    ],
)
def test_wrong_path_is_told_the_right_one(toy, method, path, status, words):
    """A forgotten /v1, a slash too many, another method: what would have been right."""
    with toy.http() as http:
        answer = http.request(method, path, json={"messages": USER})

    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"\xff\xfe", "not JSON"),
        (b'{"messages": ' + b"[" * 5000, "too deeply"),
        (b"{}", "messages"),
    ],
)
def test_bad_body_is_refused(toy, body, words):
    """What is no JSON object never becomes a 500."""
    with toy.http() as http:
        answer = http.post(CHAT, content=body)

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "status", "code"),
    [
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}, 403, "forbidden_source"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, 400, "invalid_media"),
        ({"type": "image_url"}, 400, "invalid_request"),
        ({"type": "image_url", "image_url": png_url(), "media_id": "i" * 999}, 400, "invalid_request"),
        ({"type": "image_url", "image_url": png_url(300, 2)}, 413, "budget_exceeded"),
        ({"type": "input_audio", "input_audio": {"data": "***", "format": "wav"}}, 400, "invalid_media"),
        ({"type": "image_embeds", "image_embeds": "***"}, 400, "embeddings_refused"),
    ],
)
def test_bad_media_is_named(serve, part, status, code):
    """A refusal of one part names it by its place."""
    running = serve(Config(tiers={"default": Tier(max_width_px=256)}))
    with running.http() as http:
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]}
        answer = http.post(CHAT, json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert error["param"].startswith("messages.0.content.1")


def test_budget_refusal_carries_its_values(serve):
    """The limit, its value and the request's value are in the error, for a program to read."""
    running = serve(Config(tiers={"default": Tier(max_width_px=256)}))
    with running.http() as http:
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": png_url(300, 2)}]}]}
        error = http.post(CHAT, json=body).json()["error"]

    assert (error["limit"], error["allowed"], error["requested"]) == ("max_width_px", 256, 300)


def test_unknown_field_is_reported_and_ignored(toy):
    """A field that nobody knows, and that is near to none, does no harm; the header says it had no effect."""
    with toy.http() as http:
        body = {"messages": USER, "metadata": {"a": "b"}, "xyzzy": 1}
        answer = http.post(CHAT, json=body)

    assert answer.status_code == 200
    assert answer.headers["x-triptych-ignored"] == "metadata, xyzzy"


@pytest.mark.parametrize("declared", [True, False])
def test_body_over_the_limit_is_413(serve, declared):
    """Too long a body is refused by its declared length, and while reading."""
    running = serve(Config(http=HttpConfig(max_body_bytes=1000)))
    body = b'{"messages": "' + b"x" * 5000 + b'"}'
    with running.http() as http:
        answer = http.post(CHAT, content=body if declared else iter([body[:2000], body[2000:]]))

    assert answer.status_code == 413
    assert answer.json()["error"]["limit"] == "max_body_bytes"


def test_unknown_path_and_method(toy):
    """404 and 405 are in the same form as every error."""
    with toy.http() as http:
        missing, wrong = http.post("/v1/chat"), http.get(CHAT)

    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert "/v1/chat/completions" in missing.json()["error"]["message"]
    assert wrong.headers["allow"] == "POST"


def test_full_engine_is_503_with_retry_after(serve):
    """A full queue is an answer, before the stream begins, with when to come again."""
    running = serve(engine=ToyEngine(max_running=0))
    with running.http() as http:
        for stream in (False, True):
            answer = http.post(CHAT, json={"messages": USER, "stream": stream})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "overloaded"


def test_fault_on_the_way_ends_the_stream_with_an_error(serve):
    """A model that fails after some tokens ends a stream with an error frame, and a whole answer with 500."""
    running = serve(engine=ToyEngine(fault=model_fault))
    bad = [{"role": "user", "content": "abc please fail"}]
    with running.http() as http:
        whole = http.post(CHAT, json={"messages": bad})
        streamed = http.post(CHAT, json={"messages": bad, "stream": True})

    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "model_fault")
    frames = [line for line in streamed.text.splitlines() if line]
    assert '"code":"model_fault"' in frames[-2]
    assert frames[-1] == "data: [DONE]"


def test_internal_mistake_says_nothing_of_itself(serve):
    """An exception that is no leaf is a 500 without its text."""

    def fault(request, num_tokens):
        raise KeyError("secret path")

    running = serve(engine=ToyEngine(fault=fault))
    with running.http() as http:
        answer = http.post(CHAT, json={"messages": USER})
        alive = http.get("/health")

    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert alive.status_code == 200


def test_deadline_is_504(serve):
    """A request over its time ends with 504, and in a stream with an error frame; the engine is told."""
    running = serve(engine=ToyEngine(times=ToyTimes(token_s=0.05)))
    body = {"messages": [{"role": "user", "content": "x" * 100}], "timeout_s": 0.3}
    with running.http() as http:
        whole = http.post(CHAT, json=body)
        streamed = http.post(CHAT, json={**body, "stream": True})

    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert '"code":"deadline_exceeded"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert running.engine.num_running == 0


def test_every_leaf_has_a_status():
    """No leaf falls through the table, and none of a caller's mistakes is a 500."""
    for leaf in leaves():
        error = leaf.__new__(leaf)
        error.message, error.param = "m", None
        error.limit, error.allowed, error.requested, error.retry_after_s = "l", 1, 2, 3.2
        assert 400 <= status_of(error) < 600
        assert error_body(error)["error"]["code"] == leaf.code


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidMedia("x"), 400),
        (BudgetExceeded("max_images", allowed=1, requested=2), 413),
        (SourceTimeout("x"), 504),
        (RateLimited("x", retry_after_s=1.2), 429),
        (Overloaded("x"), 503),
        (DeadlineExceeded("x"), 504),
        (ModelFault("x"), 500),
    ],
)
def test_status_of_a_leaf(error, status):
    """The statuses that clients act upon."""
    assert status_of(error) == status


def test_retry_after_is_whole_seconds_and_never_too_early():
    """Retry-After rounds up."""
    assert error_headers(RateLimited("x", retry_after_s=1.2))["retry-after"] == "2"
    assert error_headers(Overloaded("x", retry_after_s=0.01))["retry-after"] == "1"


def test_poison_beside_good_requests(serve):
    """Requests that fail in every way leave the answers of others as they are in a quiet run."""
    running = serve(engine=ToyEngine(fault=model_fault, times=ToyTimes(token_s=0.001)))
    poison = [
        {"messages": 5},
        {"messages": USER, "max_tokens": "x"},
        {"messages": [{"role": "user", "content": "please fail"}]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": USER, "cache_salt": "s" * 10**6},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": png_url(1, 1)}]}], "n": -1},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "input_audio", "input_audio": {"data": base64.b64encode(b"x" * 99).decode()}}],
                }
            ]
        },
        {"messages": USER, "max_token": 1},
    ]
    good = [{"messages": [picture_message(f"question {index}")]} for index in range(8)]
    with running.http() as http, ThreadPoolExecutor(16) as pool:
        quiet = [http.post(CHAT, json=body).json()["choices"] for body in good]
        answers = list(
            pool.map(
                lambda body: http.post(CHAT, json=body), [p for pair in zip(good, poison, strict=True) for p in pair]
            )
        )

    assert [answer.json()["choices"] for answer in answers[::2]] == quiet
    assert all(answer.status_code in (400, 500) for answer in answers[1::2])
    assert [answer.status_code for answer in answers[1::2]].count(500) == 1
    assert running.front.num_in_flight == running.engine.num_running == 0

"""Completions, embeddings, tokenize, models, health, limits, administration, the status page."""

import base64

import numpy as np
import openai
import pytest
from toy_door import picture_message, toy_served

from triptych.core.config import Config, HttpConfig, Tenant, Tier
from triptych.http.front import Front
from triptych.testing.toy_engine import ToyEngine
from triptych.testing.toy_prompts import ToyMedia

KEYED = Config(
    tenants=(
        Tenant(name="acme", key="sk-acme", tier="small"),
        Tenant(name="root", key="sk-root", admin=True),
    ),
    tiers={"small": Tier(max_images=1)},
)


def test_completion_of_text_and_of_tokens(toy):
    """A prompt is text or token ids, one or several, times n."""
    client = toy.client()
    text = client.completions.create(model="toy", prompt="abc")
    ids = client.completions.create(model="toy", prompt=[[97, 98], [99]], n=2)

    assert text.choices[0].text == "abc"
    assert [choice.text for choice in ids.choices] == ["ab", "ab", "c", "c"]
    assert ids.usage.prompt_tokens == 3


def test_completion_streams_with_echo_and_usage(toy):
    """Echo comes first, text in pieces, usage last."""
    chunks = list(
        toy.client().completions.create(
            model="toy", prompt="abc", echo=True, stream=True, stream_options={"include_usage": True}
        )
    )

    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "abcabc"
    assert chunks[-1].usage.completion_tokens == 3


def test_completion_logprobs(toy):
    """The older form of log probabilities has parallel lists and offsets."""
    logprobs = toy.client().completions.create(model="toy", prompt="abc", logprobs=2).choices[0].logprobs

    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.text_offset == [0, 1, 2]
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize(
    "change", [{"suffix": "x"}, {"best_of": 3}, {"prompt": []}, {"prompt": ["a"] * 65}, {"prompt": ["a", 1]}]
)
def test_completion_refusals(toy, change):
    """What is not served is refused, and named."""
    with toy.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "a", **change})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in change


def test_embeddings(toy):
    """Vectors come as floats and as base64, in the order of the input."""
    client = toy.client()
    floats = client.embeddings.create(model="toy", input=["ab", "c"], encoding_format="float")
    packed = client.embeddings.create(model="toy", input=["ab", "c"])
    with toy.http() as http:
        raw = http.post("/v1/embeddings", json={"input": "ab", "encoding_format": "base64"}).json()

    assert [len(entry.embedding) for entry in floats.data] == [16, 16]
    np.testing.assert_allclose(floats.data[1].embedding, packed.data[1].embedding, rtol=1e-6)
    np.testing.assert_allclose(
        np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4"), floats.data[0].embedding
    )


def test_embedding_cut_to_dimensions_has_unit_length(toy):
    """Fewer dimensions are the first ones, of length one again."""
    vector = toy.client().embeddings.create(model="toy", input="abc", dimensions=4, encoding_format="float")

    assert np.isclose(np.linalg.norm(vector.data[0].embedding), 1)


def test_embeddings_where_the_model_cannot(serve):
    """A model without embeddings says so."""
    with serve(embed=None).http() as http:
        answer = http.post("/v1/embeddings", json={"input": "a"})

    assert answer.status_code == 422


def test_tokenize_counts_media_as_served(toy):
    """The count of /tokenize is the prompt_tokens of the answer."""
    messages = [picture_message("hi")]
    with toy.http() as http:
        counted = http.post("/tokenize", json={"messages": messages}).json()
        plain = http.post("/tokenize", json={"prompt": "abc"}).json()
        back = http.post("/detokenize", json={"tokens": plain["tokens"]}).json()
    answer = toy.client().chat.completions.create(model="toy", messages=messages)

    assert counted["count"] == answer.usage.prompt_tokens
    assert counted["media_tokens"] == {"image": 4}
    assert plain["tokens"] == [97, 98, 99]
    assert back == {"prompt": "abc"}


def test_models(toy):
    """The list says what each model takes; an unknown one is 404."""
    client = toy.client()
    model = client.models.list().data[0]

    assert (model.id, model.model_extra["modalities"]) == ("toy", ["text", "image"])
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_model_may_be_left_out_or_called_default(toy):
    """A server with one model needs no name."""
    with toy.http() as http:
        for body in ({}, {"model": "default"}):
            answer = http.post("/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": "x"}]})
            assert answer.json()["model"] == "toy"


def test_health_ready_version(toy):
    """Alive, able to serve, and which version."""
    with toy.http() as http:
        answers = [http.get(path) for path in ("/health", "/ready", "/version")]

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert answers[1].json()["models"] == ["toy"]


def test_not_ready_while_loading_draining_or_without_engine(serve):
    """/ready is 503 with the reason, /health stays 200, and requests hear when to come again."""
    running = serve()
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with running.http() as http:
        for name, value in (("ready", False), ("draining", True)):
            before = getattr(running.front, name)
            setattr(running.front, name, value)
            assert http.get("/ready").status_code == 503
            refusal = http.post("/v1/chat/completions", json=chat)
            assert (refusal.status_code, int(refusal.headers["retry-after"])) == (503, 5)
            setattr(running.front, name, before)

        async def broken() -> dict[str, float]:
            raise RuntimeError("gone")

        object.__setattr__(running.front.models["toy"], "engine", type("Gone", (), {"stats": staticmethod(broken)})())
        assert http.get("/ready").json()["reasons"] == ["engine of toy does not answer"]
        assert http.get("/health").status_code == 200
        assert 'triptych_engine_up{model="toy"} 0.0' in http.get("/metrics").text


def test_keys(serve):
    """With tenants configured a key is needed; without one, or with a wrong one, it is 401."""
    running = serve(KEYED)
    assert running.client("sk-acme").models.list().data
    for key in ("none", "sk-acm"):
        with pytest.raises(openai.AuthenticationError):
            running.client(key).models.list()
        with pytest.raises(openai.AuthenticationError):
            running.client(key).chat.completions.create(model="toy", messages=[{"role": "user", "content": "x"}])
    with running.http() as http:
        assert http.get("/v1/models").headers["www-authenticate"].startswith("Bearer")
        assert http.get("/v1/models", headers={"x-api-key": "sk-acme"}).status_code == 200
        assert http.get("/health").status_code == 200


def test_limits_are_those_of_the_callers_tier(serve):
    """A caller sees its own tier, and its refusals name it."""
    running = serve(KEYED)
    with running.http(headers={"authorization": "Bearer sk-acme"}) as http:
        limits = http.get("/v1/limits").json()
        two = [picture_message("x"), {"role": "assistant", "content": "y"}, picture_message("z")]
        refusal = http.post("/v1/chat/completions", json={"messages": two})

    assert (limits["tenant"], limits["tier"], limits["limits"]["max_images"]) == ("acme", "small", 1)
    assert (refusal.status_code, refusal.json()["error"]["limit"]) == (413, "max_images")


def test_media_ids_of_tenants_are_apart(serve):
    """A tenant's media id means nothing to another tenant."""
    running = serve(KEYED)
    options = dict(model="toy", max_tokens=1)
    running.client("sk-acme").chat.completions.create(messages=[picture_message("x", media_id="cat")], **options)
    alias = [{"role": "user", "content": [{"type": "image_url", "media_id": "cat"}]}]
    running.client("sk-acme").chat.completions.create(messages=alias, **options)

    with pytest.raises(openai.BadRequestError):
        running.client("sk-root").chat.completions.create(messages=alias, **options)


def test_admin_needs_an_admin_key(serve):
    """Looking at caches and flushing them is for administrators; an open server has none."""
    running, open_server = serve(KEYED), serve()
    with running.http() as http, open_server.http() as other:
        root, acme = {"authorization": "Bearer sk-root"}, {"authorization": "Bearer sk-acme"}
        assert http.get("/v1/admin/caches").status_code == 401
        assert http.get("/v1/admin/caches", headers=acme).status_code == 403
        assert other.get("/v1/admin/caches").status_code == 403
        assert "toy" in http.get("/v1/admin/caches", headers=root).json()["models"]
        flushed = http.post("/v1/admin/caches/processor/flush", headers=root)
        wrong = http.post("/v1/admin/caches/processr/flush", headers=root)

        media = http.post("/v1/admin/caches/media/flush", headers=root)

    assert flushed.json()["entries"] == {"toy": 3}
    assert media.json()["entries"] == {"front": 0}
    assert (wrong.status_code, "did you mean 'processor'?" in wrong.json()["error"]["message"]) == (400, True)


def test_tenant_sees_its_own_requests_alone(serve):
    """The status shows a tenant its own recent requests, an administrator all, and nobody a prompt."""
    running = serve(KEYED)
    for key in ("sk-acme", "sk-root"):
        running.client(key).chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "a secret question"}]
        )
    with running.http() as http:
        mine = http.get("/v1/status", headers={"authorization": "Bearer sk-acme"})
        all_ = http.get("/v1/status", headers={"authorization": "Bearer sk-root"}).json()

    assert [record["tenant"] for record in mine.json()["recent"]] == ["acme"]
    assert {record["tenant"] for record in all_["recent"]} == {"acme", "root"}
    assert "secret" not in mine.text


def test_status_page_is_served_and_can_be_turned_off(serve):
    """The page comes from the package, with a policy that lets nothing in from outside."""
    with serve().http() as http, serve(Config(http=HttpConfig(status_page=False))).http() as off:
        page = http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        assert "https://" not in page.text
        assert off.get("/").status_code == 404


def test_requests_are_named(toy):
    """Each answer carries a request id: the caller's own when it is sane."""
    with toy.http() as http:
        given = http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"]
        made = http.get("/health").headers["x-request-id"]
        bad = http.get("/health", headers={"x-request-id": "a" * 500}).headers["x-request-id"]

    assert given == "abc-1"
    assert len({made, bad, "a" * 500}) == 3


async def test_drain_waits_for_what_runs():
    """Draining takes no more, and returns when the last has ended, or at its timeout."""
    front = Front(Config(), [toy_served(ToyEngine())], ToyMedia())
    front.enter()
    assert not await front.drain(0.01)
    front.leave()
    assert await front.drain(0.01)

"""A small client of the door: a question about media and the answer as it streams, or a picture. For `ask` and `demo`.

Anything that speaks the OpenAI API will do as well.
"""

from __future__ import annotations

import base64
import contextlib
import mimetypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from triptych.core.errors import InternalError, InvalidRequest, SourceUnavailable, TriptychError, from_wire

_PARTS = {"image": "image_url", "video": "video_url", "audio": "audio_url"}


@dataclass(frozen=True, slots=True)
class Answer:
    """`stage_ms` up to the first token, as the server measured them."""

    text: str
    finish_reason: str
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def stage_ms(self) -> dict[str, float]:
        table = self.usage.get("stages", {})
        return {stage: ms for stage, ms in table.items() if stage not in ("ttft_ms", "tpot_ms")}

    @property
    def ttft_ms(self) -> float:
        return float(self.usage.get("stages", {}).get("ttft_ms", 0.0))

    @property
    def tpot_ms(self) -> float:
        return float(self.usage.get("stages", {}).get("tpot_ms", 0.0))


def media_part(source: str) -> dict[str, Any]:
    """A content part for a URL or a local file. Raises InvalidRequest when the file is missing or of no known kind."""
    path = source.partition("?")[0]
    mime = mimetypes.guess_type(path)[0] or ""
    kind = _PARTS.get(mime.partition("/")[0])
    if source.startswith(("http://", "https://", "data:")):
        return _part(kind or "image_url", source)
    file = Path(source)
    if not file.is_file():
        raise InvalidRequest(f"no file {source}")
    if kind is None:
        raise InvalidRequest(f"{source} is no picture, video or sound by its name")
    return _part(kind, f"data:{mime};base64,{base64.b64encode(file.read_bytes()).decode()}")


def _part(kind: str, url: str) -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


def ask(
    url: str,
    question: str,
    media: Sequence[dict[str, Any]] = (),
    *,
    key: str = "",
    on_text: Callable[[str], None] = lambda text: None,
    timeout_s: float = 600.0,
    **fields: Any,
) -> Answer:
    """One question about `media`, streamed. `fields` go into the body as they are (model, max_tokens, ...).

    Raises the leaf that the server answered with; SourceUnavailable when nobody answers at `url`.
    """
    message = {"role": "user", "content": [*media, {"type": "text", "text": question}]}
    body = {"messages": [message], "stream": True, "stream_options": {"include_usage": True, "include_stages": True}}
    with (
        _reaching(url),
        httpx.stream(
            "POST",
            f"{url}/v1/chat/completions",
            json=body | fields,
            headers=_headers(key),
            timeout=timeout_s,
            trust_env=False,
        ) as response,
    ):
        if response.status_code != 200:
            response.read()
            raise _refusal(response)
        return _read(response, on_text)


def draw(url: str, prompt: str, *, key: str = "", timeout_s: float = 600.0, **fields: Any) -> bytes:
    """One picture of `prompt`, as the bytes of its file; `fields` go into the body (model, size, seed, ...).

    Raises as `ask`.
    """
    with _reaching(url):
        response = httpx.post(
            f"{url}/v1/images/generations",
            json={"prompt": prompt, "response_format": "b64_json"} | fields,
            headers=_headers(key),
            timeout=timeout_s,
            trust_env=False,
        )
    if response.status_code != 200:
        raise _refusal(response)
    return base64.b64decode(response.json()["data"][0]["b64_json"])


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """What keeps a server from being reached, as SourceUnavailable."""
    try:
        yield
    except httpx.ConnectError as error:
        raise SourceUnavailable(f"nobody answers at {url}") from error
    except httpx.HTTPError as error:
        raise SourceUnavailable(f"{url} broke off: {type(error).__name__}") from error


def is_ready(url: str) -> bool:
    """Whether a server at `url` can serve now."""
    try:
        return httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _read(response: httpx.Response, on_text: Callable[[str], None]) -> Answer:
    text, finish_reason = "", ""
    usage: dict[str, Any] = {}
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if not line.startswith("data: ") or data == "[DONE]":
            continue
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            raise _leaf(chunk["error"])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") or ""
            text += piece
            on_text(piece)
            finish_reason = choice["finish_reason"] or finish_reason
    return Answer(text, finish_reason, usage)


def _refusal(response: httpx.Response) -> TriptychError:
    try:
        return _leaf(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return InternalError(f"the server answered {response.status_code}")


def _leaf(error: dict[str, Any]) -> TriptychError:
    return from_wire(str(error.get("code")), str(error.get("message")), error.get("param"))

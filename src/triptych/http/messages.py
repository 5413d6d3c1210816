"""From a body's messages to the plain dicts that `prompt` renders, media parts replaced by references."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec

from triptych.core.config import HttpConfig
from triptych.core.errors import EmbeddingsRefused, InvalidMedia, InvalidRequest
from triptych.core.media import MediaRef, Modality
from triptych.http.schema import (
    AudioUrlPart,
    ImageEmbedsPart,
    ImagePart,
    ImageUrl,
    InputAudioPart,
    MediaUrl,
    Message,
    Part,
    RefusalPart,
    TextPart,
    Tool,
    VideoPart,
)
from triptych.prompt import EmbedsPart

_MODALITIES = {ImagePart: Modality.IMAGE, VideoPart: Modality.VIDEO, AudioUrlPart: Modality.AUDIO}


def to_messages(messages: list[Message], limits: HttpConfig) -> list[dict[str, Any]]:
    """Raises InvalidRequest, InvalidMedia, EmbeddingsRefused, with `param` such as `messages.0.content.1`."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    return [_message(message, f"messages.{index}", limits) for index, message in enumerate(messages)]


def to_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    return [{"type": "function", "function": _without_none(tool.function)} for tool in tools]


def _message(message: Message, path: str, limits: HttpConfig) -> dict[str, Any]:
    if message.content is None and not message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"a {message.role} message needs content", param=f"{path}.content")
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidRequest("a tool message needs tool_call_id", param=f"{path}.tool_call_id")
    role = "system" if message.role == "developer" else message.role
    form: dict[str, Any] = {"role": role, "content": _content(message.content, path, limits)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            form[name] = value
    if message.tool_calls:
        form["tool_calls"] = [msgspec.to_builtins(call) for call in message.tool_calls]
    return form


def _content(content: str | list[Part] | None, path: str, limits: HttpConfig) -> Any:
    if not isinstance(content, list):
        return content
    return [_part(part, f"{path}.content.{index}", limits) for index, part in enumerate(content)]


def _part(part: Part, path: str, limits: HttpConfig) -> Any:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, RefusalPart):
        return {"type": "text", "text": part.refusal}
    media_id = part.media_id or part.uuid
    if media_id is not None and len(media_id) > limits.max_media_id_chars:
        raise InvalidRequest(
            f"media_id may have {limits.max_media_id_chars} characters, it has {len(media_id)}",
            param=f"{path}.media_id",
        )
    if isinstance(part, ImageEmbedsPart):
        return EmbedsPart(data=_base64(part.image_embeds, path, EmbeddingsRefused), media_id=media_id, param=path)
    if isinstance(part, InputAudioPart):
        data = part.input_audio.data if part.input_audio else None
        source: str | bytes | None = _base64(data, path, InvalidMedia) if data else None
        return _reference(Modality.AUDIO, source, media_id, path, part.options)
    url, options = _url(part), dict(part.options)
    if isinstance(part, ImagePart) and isinstance(part.image_url, ImageUrl) and part.image_url.detail:
        options.setdefault("detail", part.image_url.detail)
    return _reference(_MODALITIES[type(part)], url, media_id, path, options)


def _url(part: ImagePart | VideoPart | AudioUrlPart) -> str | None:
    value: ImageUrl | MediaUrl | str | None
    if isinstance(part, ImagePart):
        value = part.image_url
    else:
        value = part.video_url if isinstance(part, VideoPart) else part.audio_url
    return value if value is None or isinstance(value, str) else value.url


def _reference(
    modality: Modality, source: str | bytes | None, media_id: str | None, path: str, options: dict[str, Any]
) -> MediaRef:
    if not source and not media_id:
        raise InvalidRequest(f"this {modality} part has neither a source nor a media_id", param=path)
    return MediaRef(modality=modality, source=source or None, media_id=media_id, param=path, options=options)


def _base64(text: str, path: str, kind: type[InvalidRequest]) -> bytes:
    payload = text.partition(",")[2] if text.startswith("data:") else text
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise kind("this part's data is not base64", param=path) from error


def _without_none(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(struct).items() if value is not None}

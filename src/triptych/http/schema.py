"""The bodies that endpoints take, as msgspec structs. Wrong types are refused with the field's path.

Names follow the OpenAI API; what is ours is marked. `ACCEPTED` are OpenAI fields without an effect here: they are
taken, and named in the response header `x-triptych-ignored`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ImageUrl(msgspec.Struct):
    url: str | None
    detail: Literal["auto", "low", "high", "original"] | None = None


class MediaUrl(msgspec.Struct):
    url: str | None


class _MediaPart(msgspec.Struct, kw_only=True):
    """`media_id` (or `uuid`) is ours: a stable id that stands for the content in later requests of the same tenant.
    `options` is ours: min_pixels, max_pixels, fps, num_frames; what the model's layout takes."""

    media_id: str | None = None
    uuid: str | None = None
    options: dict[str, Any] = {}


class ImagePart(_MediaPart, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str | None = None


class VideoPart(_MediaPart, tag_field="type", tag="video_url"):
    video_url: MediaUrl | str | None = None


class AudioUrlPart(_MediaPart, tag_field="type", tag="audio_url"):
    audio_url: MediaUrl | str | None = None


class InputAudio(msgspec.Struct):
    data: str | None
    format: str | None = None


class InputAudioPart(_MediaPart, tag_field="type", tag="input_audio"):
    input_audio: InputAudio | None = None


class ImageEmbedsPart(_MediaPart, tag_field="type", tag="image_embeds"):
    """Ours: a safetensors file in base64 (never pickle); see docs/api.md for what it declares."""

    image_embeds: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """A part of an assistant's earlier turn, as the API gave it."""

    refusal: str


Part = TextPart | ImagePart | VideoPart | AudioUrlPart | InputAudioPart | ImageEmbedsPart | RefusalPart


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str = "{}"


class ToolCallIn(msgspec.Struct):
    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct):
    """`include_stages` is ours: the stage table in the final usage block."""

    include_usage: bool | None = None
    include_stages: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct):
    schema: dict[str, Any] = {}
    name: str = ""
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """`regex` and `lark` (with `grammar`) are ours."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: JsonSchema | None = None
    grammar: str | None = None


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct):
    name: str


class ToolChoice(msgspec.Struct):
    function: FunctionName
    type: Literal["function"] = "function"


class _Sampling(msgspec.Struct, kw_only=True):
    """The second block is ours, with the names that other open servers use."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    include_stages: bool | None = None
    timeout_s: float | None = None


class ChatRequest(_Sampling):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


class CompletionRequest(_Sampling):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    response_format: ResponseFormat | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """`messages` is ours: media to embed."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    messages: list[Message] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    messages: list[Message] | None = None
    prompt: str | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


ACCEPTED = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "reasoning_effort",
        "verbosity",
        "prediction",
        "web_search_options",
        "audio",
        "moderation",
    }
)

RENAMED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "guided_json": "use response_format of type json_schema",
    "guided_regex": "use response_format of type regex",
    "max_new_tokens": "use max_completion_tokens",
    "max_output_tokens": "use max_completion_tokens",
    "num_return_sequences": "use n",
    "do_sample": "use temperature (0 is greedy)",
}

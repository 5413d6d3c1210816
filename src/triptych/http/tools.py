"""Tool calls that the caller insists on: the answer is held to a JSON schema, whatever the model's own form.

Calls that the model chooses to make are parsed by `prompt`'s tool stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from triptych.core.errors import InvalidRequest
from triptych.core.sampling import SamplingParams
from triptych.core.suggest import did_you_mean
from triptych.http.params import json_grammar
from triptych.http.schema import ChatRequest, Function, ToolChoice
from triptych.http.seams import Served, ToolStream


@dataclass(frozen=True, slots=True)
class ForcedCall:
    name: str
    arguments: str


class ForcedCalls:
    """A tool stream over an answer that is JSON: the arguments of `name`, or a list of calls when `name` is None."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._text = ""

    def push(self, text: str) -> str:
        self._text += text
        return ""

    def finish(self) -> tuple[str, list[ForcedCall]]:
        if self._name is not None:
            return "", [ForcedCall(self._name, self._text.strip())]
        try:
            calls = msgspec.json.decode(self._text)
        except msgspec.DecodeError:  # cut off by max_tokens
            return self._text, []
        return "", [ForcedCall(call["name"], msgspec.json.encode(call["arguments"]).decode()) for call in calls]


def is_forced(body: ChatRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, ToolChoice)


def tool_stream(body: ChatRequest, served: Served) -> ToolStream | None:
    """What parts text from calls in one answer; None when there are no tools to call."""
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, ToolChoice):
        return ForcedCalls(body.tool_choice.function.name)
    if body.tool_choice == "required":
        return ForcedCalls(None)
    return served.tool_stream() if served.tool_stream is not None else None


def check_tools(body: ChatRequest, served: Served) -> None:
    """Raises InvalidRequest for tools that this model's template has no form for, and a choice that is not offered."""
    names = [tool.function.name for tool in body.tools or ()]
    if names and served.tool_stream is None and not is_forced(body) and body.tool_choice != "none":
        raise InvalidRequest(f"the chat template of {served.name} has no form for tools", param="tools")
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have the same name", param="tools")
    if body.tool_choice is not None and body.tool_choice != "none" and not names:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    if isinstance(body.tool_choice, ToolChoice) and (name := body.tool_choice.function.name) not in names:
        raise InvalidRequest(
            f"tool_choice names {name!r}, not among tools{did_you_mean(name, names)}", param="tool_choice"
        )


def forced_call(body: ChatRequest, sampling: SamplingParams) -> SamplingParams:
    """`sampling` with the grammar of the calls, where the caller insists on calls."""
    if not is_forced(body):
        return sampling
    if sampling.grammar_kind is not None:
        raise InvalidRequest("response_format and a forced tool_choice exclude each other", param="tool_choice")
    schema = _schema(body, [tool.function for tool in body.tools or ()])
    return msgspec.structs.replace(sampling, **json_grammar(schema))


def _schema(body: ChatRequest, functions: list[Function]) -> dict[str, Any]:
    if isinstance(body.tool_choice, ToolChoice):
        return next(_arguments(function) for function in functions if function.name == body.tool_choice.function.name)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": _arguments(function)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    limit = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit}


def _arguments(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}

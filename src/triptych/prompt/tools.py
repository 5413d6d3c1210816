"""Tool calls in a model's answer: parted from the text as it streams, parsed when the answer ends.

Two forms, as the chat templates teach them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen),
and a bare JSON object `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or not (Llama).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolStyle(StrEnum):
    HERMES = "hermes"
    LLAMA_JSON = "llama_json"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text, as the OpenAI form wants it."""

    name: str
    arguments: str


def tool_style(chat_template: str | None) -> ToolStyle | None:
    """The form that a chat template teaches; None where it has no tools."""
    if not chat_template or "tools" not in chat_template:
        return None
    return ToolStyle.HERMES if OPEN in chat_template else ToolStyle.LLAMA_JSON


class ToolCallStream:
    """One answer. Text before the first call is given out as it comes; what may be a call is held."""

    def __init__(self, style: ToolStyle) -> None:
        self._style = style
        self._held = ""
        self._given = False  # some text was given out
        self._in_call = False

    def push(self, text: str) -> str:
        """Text that is certainly not part of a call."""
        self._held += text
        if self._in_call:
            return ""
        start = self._call_start()
        self._in_call = start is not None and self._is_call(start)
        end = len(self._held) if start is None else start
        out, self._held = self._held[:end], self._held[end:]
        self._given = self._given or bool(out.strip())
        return out

    def finish(self) -> tuple[str, list[ToolCall]]:
        """(text that was held but is no call, the calls). A call cut short or not JSON is text."""
        calls, text = _hermes(self._held) if self._style is ToolStyle.HERMES else _llama(self._held)
        self._held = ""
        return (text, calls) if calls else (text, [])

    def _call_start(self) -> int | None:
        """Where a call begins, or may begin with what comes next."""
        if self._style is ToolStyle.HERMES:
            return _marker_start(self._held, OPEN)
        stripped = self._held.lstrip()
        if not self._given and (not stripped or stripped.startswith("{")):
            return 0
        return _marker_start(self._held, PYTHON_TAG)

    def _is_call(self, start: int) -> bool:
        rest = self._held[start:].lstrip()
        return rest.startswith((OPEN, PYTHON_TAG)) or (self._style is ToolStyle.LLAMA_JSON and rest.startswith("{"))


def _marker_start(text: str, marker: str) -> int | None:
    found = text.find(marker)
    if found >= 0:
        return found
    tail = next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
    return len(text) - tail if tail else None


def _hermes(text: str) -> tuple[list[ToolCall], str]:
    calls: list[ToolCall] = []
    rest: list[str] = []
    while OPEN in text:
        before, _, after = text.partition(OPEN)
        body, closed, text = after.partition(CLOSE)
        call = _call(_loads(body))
        rest.append(before if call else before + OPEN + body + closed)
        calls += [call] if call else []
    rest.append(text)
    joined = "".join(rest)
    return calls, joined.strip() if calls else joined


def _llama(text: str) -> tuple[list[ToolCall], str]:
    body = text.strip().removeprefix(PYTHON_TAG)
    decoder, calls, index = json.JSONDecoder(), [], 0
    while index < len(body):
        try:
            value, index = decoder.raw_decode(body, index)
        except ValueError:
            return [], text
        call = _call(value)
        if call is None:
            return [], text
        calls.append(call)
        while index < len(body) and body[index] in "; \n\t":
            index += 1
    return (calls, "") if calls else ([], text)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str) and _loads(arguments) is not None:
        return ToolCall(value["name"], arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))

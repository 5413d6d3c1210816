"""Messages to token ids through the model's own chat template, with one placeholder for each media part.

Any template works: those that take lists of parts and those that know strings only. Control tokens inside the caller's
strings (an `<image>` in pasted markup, an end-of-turn token) become plain text and never act as control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

from jinja2 import TemplateError
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _CONTROL_TOKEN_START, encode_marked_chat, mark_control_tokens

from triptych.core.errors import PromptRefused, UnsupportedMedia
from triptych.core.media import MediaRef, Modality
from triptych.prompt.parts import EmbedsPart

PROBE = "triptychprobe"
# what the tokenizer itself takes: a caller who could set these could bring a template of his own
RESERVED_OPTIONS = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})


class Placeholders(Protocol):
    """The side of a `models.base.Layout` that a template needs."""

    placeholders: dict[Modality, str]
    surroundings: dict[Modality, str]
    adds_bos: bool

    def placeholder_text(self, modality: Modality) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """`token_ids` hold one placeholder token for each of `parts`."""

    token_ids: list[int]
    parts: tuple[MediaRef | EmbedsPart, ...]


class ChatTemplate:
    """A tokenizer's chat template. Immutable and thread-safe once made; making it renders a few probes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, layout: Placeholders) -> None:
        self._tokenizer = tokenizer
        self._layout = layout
        self._control = _control_pattern(tokenizer, layout)
        self._bos = _tokens_added_in_front(tokenizer) if layout.adds_bos else []
        self.has_template = bool(tokenizer.chat_template)
        self._takes_lists = self.has_template and self._probe_list()
        self._writes = {
            kind for kind in layout.placeholders if self._takes_lists and self._probe_media(kind)
        }  # the kinds that the template itself turns into a placeholder

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        options: dict[str, Any] | None = None,
    ) -> Rendered:
        """Raises PromptRefused: no template, no messages, an unknown role, or what the template itself refuses."""
        if not self.has_template:
            raise PromptRefused("this model has no chat template; ask it through /v1/completions", param="messages")
        if not messages:
            raise PromptRefused("there are no messages", param="messages")
        reserved = sorted(RESERVED_OPTIONS & set(options or {}))
        if reserved:
            raise PromptRefused(f"{reserved[0]!r} is not an option of the chat template", param="chat_template_kwargs")
        try:
            return self._render(messages, tools, add_generation_prompt, options or {})
        except RecursionError as error:
            raise PromptRefused("the messages or tools are nested too deeply", param="messages") from error

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        options: dict[str, Any],
    ) -> Rendered:
        parts: list[MediaRef | EmbedsPart] = []
        plain = [self._message(index, message, parts) for index, message in enumerate(messages)]
        text = self._apply(
            plain,
            tools=mark_control_tokens(list(tools), self._control) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **mark_control_tokens(options, self._control),
        )
        return Rendered(self.encode(text), tuple(parts))

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text: marked control tokens as plain text, the first token as the stock processor."""
        text = self._surround(text)
        bos_text = self._tokenizer.bos_token
        bos = [] if bos_text and text.startswith(bos_text) else self._bos
        return [*bos, *encode_marked_chat(self._tokenizer, text)]

    def _surround(self, text: str) -> str:
        for kind, surrounded in self._layout.surroundings.items():
            own = re.escape(self._layout.placeholders[kind])
            text = surrounded.join(re.split(f"(?<!{_CONTROL_TOKEN_START}){own}", text))
        return text

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        continued = messages[-1]["role"] == "assistant" and not options.get("add_generation_prompt", True)
        try:
            text: Any = self._tokenizer.apply_chat_template(
                messages, tokenize=False, continue_final_message=continued, **options
            )
            return str(text)
        except TemplateError as error:
            raise PromptRefused(f"the chat template refuses these messages: {error}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise PromptRefused(f"the chat template fails on these messages: {error}", param="messages") from error

    def _message(self, index: int, message: dict[str, Any], parts: list[MediaRef | EmbedsPart]) -> dict[str, Any]:
        role = message.get("role")
        if role not in ROLES:
            raise PromptRefused(
                f"role {role!r} is not one of {', '.join(sorted(ROLES))}", param=f"messages.{index}.role"
            )
        rest = {key: value for key, value in message.items() if key != "content"}
        if rest.get("tool_calls"):
            rest["tool_calls"] = [_with_parsed_arguments(call) for call in rest["tool_calls"]]
        plain: dict[str, Any] = mark_control_tokens(rest, self._control)
        content = message.get("content")
        if isinstance(content, list):
            plain["content"] = self._content(content, parts)
        elif self._takes_lists == "only" and content is not None:
            plain["content"] = self._content([{"type": "text", "text": content}], parts)
        else:
            plain["content"] = mark_control_tokens(content, self._control) if content is not None else ""
        return plain

    def _content(self, content: list[Any], parts: list[MediaRef | EmbedsPart]) -> list[dict[str, Any]] | str:
        """The parts as a list, or joined to one string where the template knows strings only."""
        pieces: list[dict[str, Any]] = []
        for part in content:
            if isinstance(part, (MediaRef, EmbedsPart)):
                parts.append(part)
                pieces.append(self._media_piece(part))
            else:
                pieces.append({"type": "text", "text": mark_control_tokens(part["text"], self._control)})
        return pieces if self._takes_lists else "".join(piece["text"] for piece in pieces)

    def _media_piece(self, part: MediaRef | EmbedsPart) -> dict[str, Any]:
        if part.modality not in self._layout.placeholders:
            taken = ", ".join(kind.value for kind in self._layout.placeholders) or "text only"
            raise UnsupportedMedia(f"this model takes {taken}, not {part.modality.value}", param=part.param)
        if part.modality in self._writes:
            return {"type": part.modality.value}
        return {"type": "text", "text": self._layout.placeholder_text(part.modality)}

    # what this template can do, found by trying

    def _probe_list(self) -> str:
        """ "" strings only; "also" lists too; "only" lists alone."""
        as_list = self._probe([{"type": "text", "text": PROBE}])
        if as_list.count(PROBE) != 1 or "'type'" in as_list or '"type"' in as_list:
            return ""
        return "also" if self._probe(PROBE).count(PROBE) == 1 else "only"

    def _probe_media(self, kind: Modality) -> bool:
        text = self._probe([{"type": kind.value}, {"type": "text", "text": PROBE}])
        return text.count(self._layout.placeholders[kind]) == 1

    def _probe(self, content: Any) -> str:
        try:
            return self._apply([{"role": "user", "content": content}], add_generation_prompt=True)
        except PromptRefused:
            return ""


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The OpenAI form has arguments as JSON text; templates write them out again as JSON, so they want the value."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return call | {"function": function | {"arguments": arguments}}


def _control_pattern(tokenizer: PreTrainedTokenizerBase, layout: Placeholders) -> re.Pattern[str]:
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = sorted(special | set(layout.placeholders.values()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _tokens_added_in_front(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    return full[: full.index(bare[0])] if bare and bare[0] in full else []

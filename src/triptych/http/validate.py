"""From body bytes to a request: one JSON parse, errors that name the field, a word on what was not understood.

A field nobody knows is refused when it is near to a known one (a typo would otherwise be silently without effect), or
when it has another name here; any other is ignored and reported.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, TypeVar

import msgspec

from triptych.core.errors import InvalidRequest
from triptych.core.suggest import did_you_mean, nearest
from triptych.http.expected import values_at
from triptych.http.schema import ACCEPTED, RENAMED

T = TypeVar("T", bound=msgspec.Struct)


def decode_body(body: bytes, kind: type[T]) -> tuple[T, list[str]]:
    """The request, and the paths of fields that are ignored. Raises InvalidRequest with `param` set to the field."""
    if not body:
        raise InvalidRequest("the body is empty; a JSON object is expected")
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"the body is not JSON: {problem}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(raw).__name__}")
    refuse_typos(raw, kind)
    try:
        request = msgspec.convert(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from error
    return request, list(_ignored(raw, request, ""))


def learn(*kinds: type[msgspec.Struct]) -> None:
    """Have msgspec resolve these types now: 20 ms for a chat request, which the first caller would wait for."""
    for kind in kinds:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert({}, type=kind)


def refuse_typos(raw: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Before conversion: a mistyped required field is then reported as a typo, and not as missing."""
    known = kind.__struct_encode_fields__
    for name in raw.keys() - set(known) - ACCEPTED:
        _refuse_if_near(name, known, name)


def _refuse_if_near(name: str, known: tuple[str, ...], path: str) -> None:
    if (advice := RENAMED.get(name)) and not path.count("."):
        raise InvalidRequest(f"{path} is not a field here: {advice}", param=path)
    if match := nearest(name, known):
        raise InvalidRequest(f"unknown field {path!r}, did you mean {match!r}?", param=path)


def _ignored(raw: Any, built: Any, path: str) -> Any:
    """Yield the paths of dictionary keys in `raw` that the structs in `built` have no field for."""
    if isinstance(built, list) and isinstance(raw, list):
        for index, (raw_item, item) in enumerate(zip(raw, built, strict=True)):
            if isinstance(item, msgspec.Struct):
                yield from _ignored(raw_item, item, f"{path}{index}.")
    elif isinstance(built, msgspec.Struct) and isinstance(raw, dict):
        tag = built.__struct_config__.tag_field
        for name, value in raw.items():
            if name in built.__struct_encode_fields__:
                yield from _ignored(value, getattr(built, name), f"{path}{name}.")
            elif name != tag:
                if name not in ACCEPTED:
                    _refuse_if_near(name, built.__struct_encode_fields__, path + name)
                yield path + name


def _refusal(message: str, kind: type[msgspec.Struct]) -> InvalidRequest:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`": the path becomes the error's param. Where
    a word is none of those that there are, they are listed."""
    found = re.fullmatch(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?", message, re.DOTALL)
    what = found["what"] if found else message
    path = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", (found["path"] or "") if found else "").strip(".")
    missing = re.search(r"missing required field `([^`]+)`", what)
    if missing:
        return InvalidRequest(what, param=f"{path}.{missing[1]}".strip("."))
    wrong = re.fullmatch(r"Invalid (?:enum )?value '(.*)'", what, re.DOTALL)
    if wrong and (known := values_at(kind, path)):
        word = wrong[1][:100]
        what = f"{word!r} is not known here{did_you_mean(word, known) or '.'} It may be {', '.join(known)}"
    return InvalidRequest(f"{path}: {what}" if path else what, param=path or None)

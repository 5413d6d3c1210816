"""Which values a field of a request may have, by its path: for errors that say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect


def values_at(kind: type[msgspec.Struct], path: str) -> list[str]:
    """The named values that may stand at `path` (`messages.0.role`), or the tags, where `path` ends in a tag field
    (`messages.0.content.0.type`); empty where any value of a type will do, or the path is not known."""
    types = [inspect.type_info(kind)]
    for step in path.split("."):
        types = [found for one in types for found in _step(one, step)]
    return list(dict.fromkeys(value for one in types for value in _values(one)))


def _step(one: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(one, inspect.UnionType):
        for member in one.types:
            yield from _step(member, step)
    elif isinstance(one, inspect.ListType) and (step.isdigit() or step == "..."):
        yield one.item_type
    elif isinstance(one, inspect.StructType):
        if step == one.tag_field:
            yield inspect.LiteralType((one.tag,))
        yield from (field.type for field in one.fields if field.encode_name == step)


def _values(one: inspect.Type) -> Iterator[str]:
    if isinstance(one, inspect.UnionType):
        for member in one.types:
            yield from _values(member)
    elif isinstance(one, inspect.LiteralType):
        values: tuple[Any, ...] = one.values
        yield from (str(value) for value in values)

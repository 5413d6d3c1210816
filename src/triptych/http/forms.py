"""Multipart forms: fields and files of one body, bounded in number and size."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from triptych.core.errors import InvalidRequest

MAX_FILES = 16
MAX_FIELDS = 64
MAX_FIELD_BYTES = 256 * 1024


@dataclass(slots=True)
class Form:
    """Values by name; `files` in the order they came, a name such as `image[]` counting as `image`."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[bytes]] = field(default_factory=dict)


def is_form(headers: Headers) -> bool:
    return headers.get("content-type", "").startswith("multipart/form-data")


async def parse_form(headers: Headers, body: bytes) -> Form:
    """Raises InvalidRequest for a broken form, or one with too many parts."""
    parser = MultiPartParser(
        headers, _once(body), max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
    )
    try:
        data = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise InvalidRequest(f"the form cannot be read: {error}") from error
    form = Form()
    try:
        for name, value in data.multi_items():
            plain = name.removesuffix("[]")
            if isinstance(value, UploadFile):
                form.files.setdefault(plain, []).append(await value.read())
            else:
                form.fields[plain] = value
    finally:
        await data.close()
    return form


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
    yield b""

"""Media that need no network: `data:` URLs, and files under the one folder that the configuration opens."""

from __future__ import annotations

import binascii
import os
import stat
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes

from triptych.core.errors import BudgetExceeded, ForbiddenSource, InvalidMedia, SourceUnavailable


def decode_data_url(url: str, limit: str, max_bytes: int) -> bytes:
    """The bytes of a `data:` URL, whatever type it claims: its content is sniffed. `limit` names `max_bytes` in a
    refusal, which comes before anything is decoded. Raises InvalidMedia, BudgetExceeded."""
    head, comma, _ = url[:512].partition(",")
    if not comma:
        raise InvalidMedia("a data: URL needs a comma before its content")
    payload = url[len(head) + 1 :]
    is_base64 = head.lower().rsplit(";", 1)[-1].strip() == "base64"
    at_least = len(payload) * 3 // 4 - 2 if is_base64 else (len(payload) + 2) // 3
    _check_bytes(at_least, limit, max_bytes)
    data = _decode_base64(payload) if is_base64 else unquote_to_bytes(payload)
    if not data:
        raise InvalidMedia("the data: URL has no content")
    _check_bytes(len(data), limit, max_bytes)
    return data


def _decode_base64(payload: str) -> bytes:
    """Standard or URL-safe alphabet, with or without padding, percent signs and line breaks undone."""
    if "%" in payload:
        payload = unquote(payload)
    try:
        text = payload.encode("ascii").translate(_URL_SAFE, b"\r\n\t ")
        return binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise InvalidMedia("the data: URL's base64 is malformed") from None


_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def read_local(url: str, root: str, limit: str, max_bytes: int) -> bytes:
    """The file of a `file:` URL, if it lies under `root` once links are resolved. Raises ForbiddenSource (does not
    say whether such a file exists elsewhere), SourceUnavailable, BudgetExceeded. Blocking."""
    path = _local_path(url)
    real_root = os.path.realpath(root)
    real_path = os.path.realpath(path)
    if os.path.commonpath([real_root, real_path]) != real_root:
        raise ForbiddenSource("the path is outside the folder that this server may read")
    try:
        descriptor = _open_below(real_root, os.path.relpath(real_path, real_root))
    except OSError:
        raise SourceUnavailable("there is no such file to read") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ForbiddenSource("the path is not a regular file")
        _check_bytes(found.st_size, limit, max_bytes)
        data = file.read(max_bytes + 1)
    _check_bytes(len(data), limit, max_bytes)
    return data


def _local_path(url: str) -> str:
    rest = url.split(":", 1)[1]
    if not rest.startswith("///"):
        raise ForbiddenSource("a file URL has no host: file:///path")
    path = unquote(rest[2:])
    if "\x00" in path:
        raise ForbiddenSource("the path holds a zero byte")
    return path


def _open_below(root: str, relative: str) -> int:
    """Open without following a link that was put there since the path was resolved. Raises OSError."""
    parts = Path(relative).parts
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)


def _check_bytes(num_bytes: int, limit: str, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BudgetExceeded(limit, allowed=max_bytes, requested=num_bytes)

"""Media that need no network: `data:` URLs, and files under the one folder that the configuration opens."""

from __future__ import annotations

import binascii
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from triptych.core.errors import BudgetExceeded, ForbiddenSource, InvalidMedia, SourceUnavailable

SLICE_BYTES = 2**20


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
    data = _decode_base64(payload) if is_base64 else b"".join(_unquoted(payload))
    if not data:
        raise InvalidMedia("the data: URL has no content")
    _check_bytes(len(data), limit, max_bytes)
    return data


def _decode_base64(payload: str) -> bytes:
    """Standard or URL-safe alphabet, with or without padding, percent signs and line breaks undone."""
    try:
        text = b"".join(_unquoted(payload)) if "%" in payload else payload.encode("ascii")
        text = text.translate(_URL_SAFE, b"\r\n\t ")
        return binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise InvalidMedia("the data: URL's base64 is malformed") from None


def _unquoted(payload: str) -> Iterator[bytes]:
    """Percent signs undone, as urllib does it, which makes an object of each: a gigabyte of them for a large file."""
    try:
        text = payload.encode()
    except UnicodeEncodeError:
        raise InvalidMedia("the data: URL is not text") from None
    at = 0
    while at < len(text):
        end = min(len(text), at + SLICE_BYTES)
        if end < len(text) and (last := text.rfind(b"%", end - 2, end)) > at:
            end = last  # an escape stays in one slice
        yield _unquoted_slice(np.frombuffer(text, np.uint8, end - at, at))
        at = end


def _unquoted_slice(text: npt.NDArray[np.uint8]) -> bytes:
    marks = np.flatnonzero(text[: max(0, len(text) - 2)] == ord("%"))
    high, low = _HEX[text[marks + 1]], _HEX[text[marks + 2]]
    is_escape = (high < 16) & (low < 16)
    marks = marks[is_escape]
    decoded, kept = text.copy(), np.ones(len(text), bool)
    decoded[marks] = high[is_escape] * 16 + low[is_escape]
    kept[marks + 1] = kept[marks + 2] = False
    return decoded[kept].tobytes()


_HEX = np.full(256, 255, np.uint8)
for _digit in "0123456789abcdefABCDEF":
    _HEX[ord(_digit)] = int(_digit, 16)
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

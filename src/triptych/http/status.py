"""From error leaf to HTTP status, and the OpenAI error form."""

from __future__ import annotations

import math

import msgspec

from triptych.core.errors import (
    BudgetExceeded,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    ForbiddenSource,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    SourceTimeout,
    SourceUnavailable,
    TriptychError,
    Unauthorized,
    UnknownModel,
    UnsupportedMedia,
    leaves,
)

STATUS: dict[type[TriptychError], int] = {
    InvalidRequest: 400,  # and its leaves, but for:
    UnsupportedMedia: 422,
    UnknownModel: 404,
    NotFound: 404,
    BudgetExceeded: 413,
    ForbiddenSource: 403,
    SourceUnavailable: 424,
    SourceTimeout: 504,
    Unauthorized: 401,
    Forbidden: 403,
    Conflict: 409,
    Overloaded: 503,
    RateLimited: 429,
    DeadlineExceeded: 504,
    Cancelled: 499,
    InternalError: 500,
    TriptychError: 500,
}

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def status_of(error: TriptychError) -> int:
    """The status of the nearest class of the error's line that the table names."""
    return _status_of(type(error))


def _status_of(kind: type[TriptychError]) -> int:
    return next(STATUS[parent] for parent in kind.__mro__ if parent in STATUS)


def error_body(error: TriptychError) -> dict[str, object]:
    """`{"error": {message, type, code, param}}`, with the limit's name and values where a budget refused."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    form: dict[str, object] = {"message": error.message, "type": kind, "code": error.code, "param": error.param}
    if isinstance(error, BudgetExceeded):
        form |= {"limit": error.limit, "allowed": error.allowed, "requested": error.requested}
    return {"error": form}


def error_json(error: TriptychError) -> bytes:
    return msgspec.json.encode(error_body(error))


def error_headers(error: TriptychError) -> dict[str, str]:
    """Retry-After in whole seconds, at least 1, where waiting helps; WWW-Authenticate where a key is asked for."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = 'Bearer realm="triptych"'
    return headers


def as_markdown() -> str:
    """The table of the docs: every leaf with its status."""
    kinds = [kind for kind in leaves() if kind is not TriptychError]
    rows = [f"| `{kind.code}` | {_status_of(kind)} | {'yes' if kind.retryable else ''} |" for kind in kinds]
    return "\n".join(["| code | status | worth a retry |", "| --- | --- | --- |", *dict.fromkeys(rows)])

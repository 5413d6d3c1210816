"""One exception tree: one class for each way to fail that a caller can tell apart.

TriptychError
├── InvalidRequest              the request can never succeed as written
│   ├── InvalidMedia            corrupt bytes, a lying header, an undecodable stream
│   ├── UnsupportedMedia        well-formed, but of a kind this model or server does not take
│   ├── PromptRefused           template, role order, empty or too long a prompt
│   ├── UnknownMediaId          an alias without content that this tenant never sent
│   ├── EmbeddingsRefused       precomputed embeddings of the wrong shape, dtype, count, revision
│   ├── UnknownModel            no such model here
│   └── NotFound                no such job, picture or other thing by this id, for this tenant
├── BudgetExceeded              names the limit, its value and the request's value
├── ForbiddenSource             a URL, path or address that the policy refuses
├── SourceUnavailable           the upstream answered with an error, or not at all
│   └── SourceTimeout
├── Unauthorized                no key, or a wrong one
├── Forbidden                   a good key, without the right to do this
├── Conflict                    same idempotency key, another body
├── Overloaded                  a queue or quota is full: carries retry_after_s
│   └── RateLimited
├── DeadlineExceeded            accepted, then ran out of time
├── Cancelled                   the client left or asked for it
└── InternalError               our mistake
    └── ModelFault              NaN, out of memory or an exception inside the model, for this request alone

The table from leaf to HTTP status is `triptych.http.status`. Messages are safe to show to the caller: no inside
address, no path of this machine, no long URL.
"""

from __future__ import annotations

from typing import ClassVar


class TriptychError(Exception):
    """Base of all. `code` is stable and machine-readable; `param` names the request field at fault, if any."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(TriptychError):
    code = "invalid_request"


class InvalidMedia(InvalidRequest):
    code = "invalid_media"


class UnsupportedMedia(InvalidRequest):
    code = "unsupported_media"


class PromptRefused(InvalidRequest):
    code = "prompt_refused"


class UnknownMediaId(InvalidRequest):
    code = "unknown_media_id"


class EmbeddingsRefused(InvalidRequest):
    code = "embeddings_refused"


class UnknownModel(InvalidRequest):
    code = "model_not_found"


class NotFound(InvalidRequest):
    code = "not_found"


class BudgetExceeded(TriptychError):
    """`limit` is the budget's field name (`max_width_px`), `allowed` its value, `requested` the request's."""

    code = "budget_exceeded"

    def __init__(self, limit: str, *, allowed: float, requested: float, param: str | None = None) -> None:
        super().__init__(f"{limit} is {_shown(allowed)}, the request has {_shown(requested)}", param=param)
        self.limit = limit
        self.allowed = allowed
        self.requested = requested


def _shown(value: float) -> str:
    """Whole numbers in full, so that limit and value can be told apart."""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.9g}"


class ForbiddenSource(TriptychError):
    code = "forbidden_source"


class SourceUnavailable(TriptychError):
    code = "source_unavailable"


class SourceTimeout(SourceUnavailable):
    code = "source_timeout"
    retryable = True


class Unauthorized(TriptychError):
    code = "invalid_api_key"


class Forbidden(TriptychError):
    code = "forbidden"


class Conflict(TriptychError):
    code = "conflict"


class Overloaded(TriptychError):
    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    code = "rate_limited"


class DeadlineExceeded(TriptychError):
    code = "deadline_exceeded"
    retryable = True


class Cancelled(TriptychError):
    code = "cancelled"


class InternalError(TriptychError):
    code = "internal_error"


class ModelFault(InternalError):
    code = "model_fault"


def leaves(root: type[TriptychError] = TriptychError) -> list[type[TriptychError]]:
    """Every class of the tree, `root` first, in the order of definition."""
    return [root] + [leaf for child in root.__subclasses__() for leaf in leaves(child)]


def from_wire(code: str, message: str, param: str | None = None, retry_after_s: float = 1.0) -> TriptychError:
    """Rebuild an error that crossed a process boundary as (code, message, param)."""
    by_code = {leaf.code: leaf for leaf in leaves()}
    kind = by_code.get(code, InternalError)
    error = TriptychError.__new__(kind)
    TriptychError.__init__(error, message, param=param)
    if isinstance(error, Overloaded):
        error.retry_after_s = retry_after_s
    if isinstance(error, BudgetExceeded):
        error.limit, error.allowed, error.requested = param or "", 0.0, 0.0
    return error

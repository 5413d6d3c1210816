"""Idempotency: the same key and body of one tenant joins the running call or replays the finished one; another body is
a conflict. Finished calls are kept for a while, within a byte limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.cache.lru import ByteLru
from triptych.core.errors import Conflict, InvalidRequest
from triptych.generate.run import Run

MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    run: Run
    started_s: float


class SharedRuns:
    """Owned by one event loop; time is a parameter. Running calls are held until they end, whatever their size."""

    def __init__(self, *, capacity_bytes: int = 256 * 2**20, keep_s: float = 600.0) -> None:
        self._keep_s = keep_s
        self._live: dict[tuple[str, str], _Entry] = {}
        self._finished: ByteLru[tuple[str, str], _Entry] = ByteLru(capacity_bytes)

    def join(self, tenant: str, key: str, digest: bytes, start: Callable[[], Run], now_s: float) -> Run:
        """The call of this key, started by `start` where there is none. Raises Conflict, InvalidRequest, and what
        `start` raises. A call that failed or was cancelled is started anew."""
        if not key or len(key) > MAX_KEY_CHARS:
            raise InvalidRequest(f"an idempotency key has 1 to {MAX_KEY_CHARS} characters, got {len(key)}")
        self._settle()
        known = self._live.get((tenant, key)) or self._finished.lookup((tenant, key))
        if known is not None and now_s - known.started_s <= self._keep_s and not known.run.has_failed:
            if known.digest != digest:
                raise Conflict(f"idempotency key {key!r} was used with another body")
            return known.run
        run = start()
        self._live[tenant, key] = _Entry(digest, run, now_s)
        return run

    def _settle(self) -> None:
        """Move what has ended from the live to the finished, oldest first out."""
        for name, entry in list(self._live.items()):
            if entry.run.is_done:
                del self._live[name]
                self._finished.put(name, entry, entry.run.num_bytes)

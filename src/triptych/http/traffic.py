"""How many requests a tenant may have at once and a minute. Pure: the time is a parameter; one event loop owns it."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.config import Tier
from triptych.core.errors import RateLimited


@dataclass(slots=True)
class _Account:
    running: int = 0
    tokens: float = 0.0  # requests that may start now
    filled_s: float | None = None


class Traffic:
    """A bucket a tenant: `requests_per_minute` deep, refilled evenly; and a count of those that run."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def reserve(self, tenant: str, tier: Tier, now_s: float) -> None:
        """Take one place; undone by `release`. Raises RateLimited, naming the limit and when to come again."""
        account = self._accounts.setdefault(tenant, _Account())
        if tier.max_concurrent_requests and account.running >= tier.max_concurrent_requests:
            raise RateLimited(
                f"max_concurrent_requests is {tier.max_concurrent_requests}, and {account.running} are running",
                retry_after_s=1.0,
            )
        if tier.requests_per_minute:
            self._draw(account, tier.requests_per_minute, now_s)
        account.running += 1

    def release(self, tenant: str) -> None:
        account = self._accounts[tenant]
        assert account.running > 0, "released more often than reserved"
        account.running -= 1

    def running(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return account.running if account else 0

    @staticmethod
    def _draw(account: _Account, per_minute: int, now_s: float) -> None:
        per_s = per_minute / 60
        elapsed_s = now_s - account.filled_s if account.filled_s is not None else per_minute / per_s
        account.tokens = min(float(per_minute), account.tokens + elapsed_s * per_s)
        account.filled_s = now_s
        if account.tokens < 1:
            wait_s = (1 - account.tokens) / per_s
            raise RateLimited(f"requests_per_minute is {per_minute}; try again in {wait_s:.1f} s", retry_after_s=wait_s)
        account.tokens -= 1

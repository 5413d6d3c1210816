"""From the key that a caller presents to its tenant. Keys are compared by digest: timing says nothing of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from triptych.core.config import Tenant
from triptych.core.errors import Forbidden, Unauthorized

PUBLIC = Tenant(name="public", key="", tier="default", admin=False)


class Tenants:
    """Without any tenant configured the door is open to `PUBLIC`, of tier `default`, who is no administrator."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._by_digest = {_digest(tenant.key): tenant for tenant in tenants}

    @property
    def is_open(self) -> bool:
        return not self._by_digest

    def of(self, headers: Mapping[str, str]) -> Tenant:
        """Raises Unauthorized."""
        if self.is_open:
            return PUBLIC
        key = _presented(headers)
        if key is None:
            raise Unauthorized("an API key is needed: send 'Authorization: Bearer KEY'")
        tenant = self._by_digest.get(_digest(key))
        if tenant is None:
            raise Unauthorized("this API key is not known")
        return tenant

    def admin(self, headers: Mapping[str, str]) -> Tenant:
        """Raises Unauthorized, Forbidden."""
        if self.is_open:
            raise Forbidden("administration needs a key: configure a tenant with admin = true")
        tenant = self.of(headers)
        if not tenant.admin:
            raise Forbidden(f"tenant {tenant.name!r} is no administrator")
        return tenant


def _presented(headers: Mapping[str, str]) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key") or None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

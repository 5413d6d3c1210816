"""Names of things: requests, generations and content. Random where they must not be guessed."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """A 96-bit random id, such as `chatcmpl-5f0c...`."""
    return f"{prefix}-{secrets.token_hex(12)}"

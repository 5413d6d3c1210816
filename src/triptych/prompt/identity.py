"""The full names of what is cached: a processor's output, an item's embeddings, a tenant's prefix (U8). Pure."""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3

from triptych.core.media import DecodeSpec, MediaBlob


def processed_key(blob: MediaBlob, spec: DecodeSpec, processor_key: bytes) -> bytes:
    """32 bytes: content, how it is decoded, the processor and what the request asks of it. Shared between tenants: the
    content is the caller's own proof of having it."""
    return _digest(blob.digest, spec.key(), processor_key, _options(blob.options))


def embedding_key(processed: bytes, model_revision: bytes, dtype: str, tenant: str) -> bytes:
    """32 bytes: a processed item in a model's embedding space, within a tenant."""
    return _digest(processed, model_revision, dtype.encode(), tenant.encode())


def precomputed_key(content: bytes, model_revision: bytes, dtype: str, tenant: str) -> bytes:
    """32 bytes: embeddings that the caller sent. Never equal to the key of something encoded here."""
    return _digest(b"precomputed", content, model_revision, dtype.encode(), tenant.encode())


def prefix_salt(tenant: str, cache_salt: str) -> bytes:
    """32 bytes that part tenants, and one tenant's salts, in the prefix cache."""
    return _digest(tenant.encode(), cache_salt.encode())


def _options(options: dict[str, Any]) -> bytes:
    return json.dumps(options, sort_keys=True, default=repr).encode()


def _digest(*fields: bytes) -> bytes:
    """Fields are length-prefixed, so that no two lists of them read the same."""
    digest = blake3()
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()

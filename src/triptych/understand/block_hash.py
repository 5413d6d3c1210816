"""Names for full blocks of the language cache: equal name, equal keys and values.

A block's hash chains its predecessor's, its tokens, and for each media span in it the item's identity, where the span
starts relative to the block and which embedding row stands there (U7): the same picture elsewhere is no false hit.
The first block takes in the tenant's salt. Positions need no part of their own: they follow from the chain (an item's
grid follows from its identity).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from triptych.core.prepared import PreparedRequest


def block_hash(previous: bytes, tokens: Sequence[int], media: bytes) -> bytes:
    """32 bytes. `previous` is the salt for the first block."""
    hasher = blake3(len(previous).to_bytes(4, "little"))
    hasher.update(previous)
    hasher.update(np.asarray(tokens, dtype=np.int64).tobytes())
    hasher.update(media)
    return hasher.digest()


def media_part(request: PreparedRequest, start: int, end: int) -> bytes:
    """What of the request's media lies in prompt positions [start, end)."""
    parts = [
        b"%b:%d:%d:%d;" % (request.items[s.item_idx].key, s.start - start, s.length, s.embed_offset)
        for s in request.spans
        if s.start < end and s.end > start
    ]
    return b"".join(parts)


def extend_hashes(hashes: list[bytes], request: PreparedRequest, tokens: Sequence[int], block_size_tokens: int) -> None:
    """Append the hashes of all full blocks of `tokens` that `hashes` does not have yet."""
    for index in range(len(hashes), len(tokens) // block_size_tokens):
        start, end = index * block_size_tokens, (index + 1) * block_size_tokens
        previous = hashes[-1] if hashes else b"salt:" + request.cache_salt
        hashes.append(block_hash(previous, tokens[start:end], media_part(request, start, end)))

"""A caller's own media ids: aliases for content, inside one tenant, bounded in bytes. Pure; owned by the event loop.

An id is never a key of any other cache: it leads to content here, and content names itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.cache.lru import ByteLru
from triptych.core.errors import Conflict, InvalidRequest, UnknownMediaId

MAX_MEDIA_ID_CHARS = 256
_ENTRY_BYTES = 512  # an entry's own cost beside its content


@dataclass(frozen=True, slots=True)
class Content:
    """Encoded bytes and their BLAKE3 digest."""

    data: bytes
    digest: bytes


class MediaAliases:
    """Owner of at most `capacity_bytes` of content that callers may name again."""

    def __init__(self, capacity_bytes: int) -> None:
        self.cache: ByteLru[tuple[str, str], Content] = ByteLru(capacity_bytes)

    def resolve(self, tenant: str, media_id: str) -> Content:
        """What this tenant sent under this id. Raises UnknownMediaId when there is nothing, or no more."""
        check_media_id(media_id)
        content = self.cache.lookup((tenant, media_id))
        if content is None:
            raise UnknownMediaId(f"media_id {media_id[:80]!r} is not known here (any more); send its content with it")
        return content

    def register(self, tenant: str, media_id: str, content: Content) -> None:
        """Remember content under an id. Raises Conflict when the id already stands for other content."""
        check_media_id(media_id)
        known = self.cache.peek((tenant, media_id))
        if known is not None and known.digest != content.digest:
            raise Conflict(f"media_id {media_id[:80]!r} stands for other content; give new content a new id")
        self.cache.put((tenant, media_id), content, len(content.data) + _ENTRY_BYTES)


def check_media_id(media_id: str) -> None:
    if not 1 <= len(media_id) <= MAX_MEDIA_ID_CHARS:
        raise InvalidRequest(f"media_id must have 1 to {MAX_MEDIA_ID_CHARS} characters, got {len(media_id)}")

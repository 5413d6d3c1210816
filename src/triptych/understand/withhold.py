"""What need not be sent again: features whose embeddings the engine holds already.

The front keeps `HeldEmbeddings`, a mirror of the engine's encoder cache: a key is in it from when its features were
sent until the engine says that it dropped the embeddings. The mirror may be wrong for a moment, or for good where a
request ended before its encode; then the engine asks (`FeaturesWanted`), and gets. So it decides what is sent first,
and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from triptych.core.prepared import EncoderItem, PreparedRequest

MAX_KEYS = 65_536


class HeldEmbeddings:
    """Keys in order of last use, at most `MAX_KEYS`."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.num_withheld_bytes = 0
        self.num_asked = 0

    def lighten(self, request: PreparedRequest) -> PreparedRequest:
        """The request as it is to be sent: without the features of items that the engine holds. Notes the others."""
        if not request.items:
            return request
        items = tuple(self._lighten(item) for item in request.items)
        for item in items:
            self._note(item.key)
        return replace(request, items=items)

    def _lighten(self, item: EncoderItem) -> EncoderItem:
        if item.key not in self._keys:
            return item
        self.num_withheld_bytes += item.num_bytes
        return replace(item, features=None, embeds=None, is_withheld=True)

    def _note(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def asked(self, items: Iterable[EncoderItem]) -> None:
        """The engine lacked these, and gets them now."""
        for item in items:
            self.num_asked += 1
            self._note(item.key)

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def stats(self) -> dict[str, float]:
        return {
            "transfer_withheld_bytes": float(self.num_withheld_bytes),
            "transfers_asked_for": float(self.num_asked),
        }

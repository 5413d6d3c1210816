"""Token ids to text as they come: whole characters only, and nothing that may yet turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_CHARACTER_TOKENS = 8  # a character has four bytes at most: after these tokens the bytes are simply not text


class Decoder(Protocol):
    """The one thing asked of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """The text of one answer. `stopped` becomes True at the first stop string; what follows it is dropped.

    A character may be spread over several tokens, and a token's text may depend on the one before it (a leading space),
    so text is the difference of two decodes: of the tokens since the last whole character, without and with the new.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.stopped = False
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._include_stop = include_stop
        self._skip_special = skip_special_tokens
        self._token_ids: list[int] = []
        self._context = 0  # tokens before this one are settled and no longer decoded
        self._settled = 0  # tokens before this one have been given out as text
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is now certain. Empty while a character or a possible stop string is incomplete."""
        if self.stopped:
            return ""
        text = "".join(self._decode_one(token_id) for token_id in token_ids)
        return self._release(self._held + text)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._held + self._pending()
        self._held = ""
        return self._cut(text)

    def _decode_one(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._pending()
        waiting = len(self._token_ids) - self._settled
        if not text or (text.endswith(REPLACEMENT) and waiting < MAX_CHARACTER_TOKENS):
            return ""
        self._context, self._settled = self._settled, len(self._token_ids)
        return text

    def _pending(self) -> str:
        before = self._decode(self._token_ids[self._context : self._settled])
        return self._decode(self._token_ids[self._context :])[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

    def _release(self, text: str) -> str:
        text = self._cut(text)
        if self.stopped:
            return text
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _cut(self, text: str) -> str:
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if not found:
            return text
        start, stop = min(found)
        self.stopped, self.stop_string, self._held = True, stop, ""
        return text[: start + len(stop)] if self._include_stop else text[:start]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)

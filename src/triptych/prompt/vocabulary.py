"""What single tokens stand for: their exact bytes, and how many characters the longest one has."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

SPACE = "\u2581"  # how sentencepiece vocabularies write a space


class Vocabulary:
    """A tokenizer's tokens, one by one. Byte-level and sentencepiece vocabularies, with byte fallback."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}

    @cached_property
    def max_token_chars(self) -> int:
        return max(1, *(len(token) for token in self._tokenizer.get_vocab()))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token in a text; empty for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return b"".join(_BYTES[char] if char in _BYTES else char.encode() for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return bytes(token.replace(SPACE, " ").encode())

    @cached_property
    def _is_byte_level(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is not None and "ByteLevel" in json.dumps(json.loads(backend.to_str()).get("decoder"))


def _byte_level_table() -> dict[str, bytes]:
    """The printable stand-in of each byte, as byte-level BPE writes its vocabulary."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): bytes([byte]) for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return table | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES = _byte_level_table()

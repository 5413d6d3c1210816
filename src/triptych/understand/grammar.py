"""Grammar-constrained decoding: a thin layer over llguidance, which does the work."""

from __future__ import annotations

from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch

from triptych.core.errors import InvalidRequest
from triptych.core.sampling import SamplingParams


class GrammarCompiler:
    """Builds one matcher a request. Owned by the engine's thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
        )

    def compile(self, params: SamplingParams) -> GrammarState | None:
        """Raises InvalidRequest if the grammar is not one."""
        if params.grammar_kind is None:
            return None
        build: Any = {
            "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
            "regex": llguidance.LLMatcher.grammar_from_regex,
            "lark": llguidance.LLMatcher.grammar_from_lark,
        }[params.grammar_kind]
        try:
            matcher = llguidance.LLMatcher(self._tokenizer, build(params.grammar or ""), log_level=0)
        except ValueError as error:
            raise InvalidRequest(f"grammar refused: {error}", param="response_format") from error
        if matcher.is_error():
            raise InvalidRequest(f"grammar refused: {matcher.get_error()}", param="response_format")
        return GrammarState(matcher)


class GrammarState:
    """Where one request is in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask_logits(self, logits: torch.Tensor) -> None:
        """[V] float32, in place: what the grammar forbids becomes -inf."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: logits.shape[0]].astype(bool)
        forbidden = np.ones(logits.shape[0], dtype=bool)
        forbidden[: allowed.size] = ~allowed
        logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), float("-inf"))

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_stopped())

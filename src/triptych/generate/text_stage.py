"""The encode stage: text to embeddings, then latent, scheduler and generator. Its own thread, off the step loop."""

from __future__ import annotations

from triptych.cache.lru import ByteLru
from triptych.core.clock import Clock
from triptych.generate.branch_cache import new_caches
from triptych.generate.flight import Flight, preview_steps
from triptych.generate.kinds.base import Kind
from triptych.generate.kinds.row import Conditioning
from triptych.generate.stages import GenerateStage


class TextStage:
    """Owns the cache of text embeddings: the empty negative prompt of every request is encoded once. One thread."""

    def __init__(self, kind: Kind, clock: Clock, *, cache_bytes: int) -> None:
        self._kind = kind
        self._clock = clock
        self._cache: ByteLru[tuple[str | None, bool], Conditioning] = ByteLru(cache_bytes)

    def run(self, flight: Flight) -> None:
        """Give the flight its row. Raises what the model raises."""
        request = flight.request
        flight.close_stage(GenerateStage.ENCODE_QUEUE)
        branches = [self.encode(request.prompt, is_negative=False)]
        if self._kind.uses_guidance(request):
            branches.append(self.encode(request.negative_prompt, is_negative=True))
        flight.row = self._kind.prepare(request, tuple(branches))
        if request.step_cache in self._kind.step_caches:
            flight.row.caches = new_caches(flight.row, self._kind.step_caches[request.step_cache])
        flight.preview_steps = preview_steps(request.num_previews, flight.row.num_steps)
        latent_tokens = self._kind.branch_tokens(request)
        flight.counters |= {
            "branches": len(branches),
            "text_tokens": self._kind.count_text_tokens(request.prompt),
            "image_tokens": latent_tokens if request.init_image is not None else 0,
            "latent_tokens": latent_tokens,
        }
        flight.close_stage(GenerateStage.TEXT_ENCODE)

    def encode(self, text: str | None, *, is_negative: bool) -> Conditioning:
        key = (text, is_negative)
        known = self._cache.lookup(key)
        if known is not None:
            return known
        started_s = self._clock.now_s()
        encoded = self._kind.encode_text(text, is_negative=is_negative)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in encoded.values())
        self._cache.put(key, encoded, num_bytes, cost_ms=(self._clock.now_s() - started_s) * 1e3)
        return encoded

    def stats(self) -> dict[str, float]:
        return self._cache.stats("text_embedding")

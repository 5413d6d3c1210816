"""What all endpoints share: the models, the tenants, the counters; and whether this server takes requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from triptych.core.clock import Clock, MonotonicClock
from triptych.core.config import Config
from triptych.core.errors import Overloaded, UnknownModel
from triptych.core.suggest import did_you_mean
from triptych.generate.service import GenerateService
from triptych.http.seams import Media, Served
from triptych.http.tenants import Tenants
from triptych.http.traffic import Traffic
from triptych.metrics.cost import Ledger
from triptych.metrics.registry import Metrics

STATS_TIMEOUT_S = 2.0


class Front:
    """Owned by the front process' event loop. `ready` is False until the models are loaded."""

    def __init__(
        self,
        config: Config,
        models: Sequence[Served],
        media: Media,
        *,
        drawing: GenerateService | None = None,
        clock: Clock | None = None,
        ready: bool = True,
    ) -> None:
        self.config = config
        self.media = media
        self.clock = clock or MonotonicClock()
        self.drawing = drawing or GenerateService({}, self.clock)
        self.metrics = Metrics()
        self.ledger = Ledger(self.metrics, log=config.http.access_log)
        self.tenants = Tenants(config.tenants)
        self.traffic = Traffic()
        self.started_s = time.time()
        self.ready = ready
        self.draining = False
        self.num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.models = {served.name: served for served in models}
        self._aliases = {alias: served for served in models for alias in served.aliases}
        self.metrics.set("ttft_slo_ms", config.http.ttft_slo_text_ms, "text")
        self.metrics.set("ttft_slo_ms", config.http.ttft_slo_multimodal_ms, "multimodal")

    def select(self, name: str | None) -> Served:
        """The model a request names; the first where it names none, or `default`. Raises UnknownModel."""
        if name in (None, "", "default") and self.models:
            return next(iter(self.models.values()))
        if not self.models:
            raise UnknownModel("no model that answers is served here", param="model")
        found = self.models.get(name or "") or self._aliases.get(name or "")
        if found is None:
            hint, known = did_you_mean(name or "", sorted(self.models)), ", ".join(sorted(self.models))
            raise UnknownModel(f"no model {name!r} answers here{hint}; those that do: {known}", param="model")
        return found

    def slo_ms(self, kind: str) -> float:
        http = self.config.http
        return http.ttft_slo_multimodal_ms if kind == "multimodal" else http.ttft_slo_text_ms

    def enter(self) -> None:
        """Count a request in; undone by `leave`. Raises Overloaded when this server takes no more."""
        if self.draining:
            raise Overloaded("this server is shutting down", retry_after_s=5)
        if not self.ready:
            raise Overloaded("the model is still loading", retry_after_s=5)
        self.num_in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self.num_in_flight -= 1
        if not self.num_in_flight:
            self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for those that run. False when some still ran at the timeout."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stats(self) -> dict[str, dict[str, float]]:
        """Statistics by model, and those of the media plane under `front`. An engine that does not answer is down."""
        names = list(self.models)
        found = await asyncio.gather(*(_engine_stats(self.models[name]) for name in names))
        drawing = await self.drawing.stats()
        return {"front": self.media.stats(), **dict(zip(names, found, strict=True)), **drawing}


async def _engine_stats(served: Served) -> dict[str, float]:
    own = served.front_stats()
    try:
        return {"engine_up": 1.0, **own, **await asyncio.wait_for(served.engine.stats(), STATS_TIMEOUT_S)}
    except Exception:  # a dead engine must not take /metrics and /ready down with it
        return {"engine_up": 0.0, **own}

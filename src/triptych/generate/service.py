"""What the door needs of this room: engines by model name, and what outlives a call (shared runs, files, jobs)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from triptych.cache.lru import ByteLru
from triptych.core.clock import Clock, MonotonicClock
from triptych.core.errors import NotFound, UnknownModel
from triptych.core.ids import new_id
from triptych.core.suggest import did_you_mean
from triptych.generate.request import GenerateRequest
from triptych.generate.run import GenerateHandle, Run
from triptych.generate.shared_runs import SharedRuns
from triptych.generate.video_jobs import VideoJobs

FILE_STORE_BYTES = 256 * 2**20
STATS_TIMEOUT_S = 2.0


class GenerateService:
    """Owned by the front's event loop."""

    def __init__(self, engines: Mapping[str, GenerateHandle], clock: Clock | None = None) -> None:
        self.engines = dict(engines)
        self.runs = SharedRuns()
        self.jobs = VideoJobs(time.time)
        self._clock = clock or MonotonicClock()
        self._files: ByteLru[str, tuple[str, str, bytes]] = ByteLru(FILE_STORE_BYTES)

    def select(self, name: str | None) -> tuple[str, GenerateHandle]:
        """The engine a request names; the first where it names none, or `default`. Raises UnknownModel."""
        if name in (None, "", "default") and self.engines:
            return next(iter(self.engines.items()))
        if not self.engines:
            raise UnknownModel("no model that draws is served here", param="model")
        if name not in self.engines:
            known = sorted(self.engines)
            hint = did_you_mean(name or "", known)
            raise UnknownModel(f"no model {name!r} draws here{hint}; those that do: {', '.join(known)}", param="model")
        return name, self.engines[name]

    def start(
        self,
        engine: GenerateHandle,
        requests: Sequence[GenerateRequest],
        *,
        tenant: str,
        idempotency_key: str | None = None,
        digest: bytes = b"",
    ) -> Run:
        """A new run, or with a key the one that is running or finished. Raises Overloaded, Conflict."""
        if idempotency_key is None:
            return Run(engine, requests)
        now_s = self._clock.now_s()
        return self.runs.join(tenant, idempotency_key, digest, lambda: Run(engine, requests), now_s)

    def keep_file(self, tenant: str, mime: str, data: bytes) -> str:
        """Hold a file for a later GET; returns its unguessable id."""
        file_id = new_id("img")
        self._files.put(file_id, (tenant, mime, data), len(data))
        return file_id

    def file(self, tenant: str, file_id: str) -> tuple[str, bytes]:
        """MIME type and bytes. Raises NotFound, also for another tenant's file."""
        found = self._files.lookup(file_id)
        if found is None or found[0] != tenant:
            raise NotFound(f"no picture {file_id[:64]!r} here; pictures are kept until room is short")
        return found[1], found[2]

    async def stats(self) -> dict[str, dict[str, float]]:
        """Statistics by model. An engine that does not answer is down."""
        found = await asyncio.gather(*map(_engine_stats, self.engines.values()))
        return dict(zip(self.engines, found, strict=True))

    async def close(self) -> None:
        await self.jobs.close()


async def _engine_stats(engine: GenerateHandle) -> dict[str, float]:
    try:
        return await asyncio.wait_for(engine.stats(), STATS_TIMEOUT_S)
    except Exception:  # a dead engine must not take /metrics and /ready down with it
        return {"engine_up": 0.0}

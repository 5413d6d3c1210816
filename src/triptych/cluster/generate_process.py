"""The process of an engine that draws, as a `GenerateHandle`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from triptych.cluster.kept_process import KeptProcess
from triptych.core.config import ModelConfig
from triptych.generate.events import GenerateEvent
from triptych.generate.remote import RemoteGenerateEngine
from triptych.generate.request import GenerateRequest, ModelTraits


class GenerateProcess(KeptProcess[RemoteGenerateEngine]):
    """While there is no process, `submit` raises Overloaded."""

    traits: ModelTraits

    def __init__(
        self,
        config: ModelConfig,
        *,
        module: str = "triptych.cluster.generate_main",
        quiet: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """`quiet` is awaited between loading and the measuring of step times, which others' loading would make look
        slow."""
        super().__init__(config, module)
        self._quiet = quiet

    def submit(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """Accept at once; raises Overloaded, Conflict. Closing the iterator early cancels the request."""
        return self._running().submit(request)

    def cancel(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.cancel(request_id)

    def _connect(self, address: str) -> tuple[RemoteGenerateEngine, Sequence[int]]:
        return RemoteGenerateEngine(address, max_waiting=self._config.generate.max_waiting), ()

    async def _bring_up(self, engine: RemoteGenerateEngine) -> None:
        await engine.start()
        if self._quiet is not None:
            await self._quiet()
        await engine.begin()
        self.traits = engine.traits

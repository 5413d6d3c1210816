"""The process of an engine that answers, as an `EngineHandle`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from triptych.cluster.kept_process import KeptProcess
from triptych.core.config import ModelConfig
from triptych.core.errors import Overloaded
from triptych.core.events import Event, FinalEvent, FinishReason
from triptych.core.prepared import PreparedRequest
from triptych.models.base import ModelInfo
from triptych.transfer.shared_memory import SharedSender
from triptych.understand.remote import RemoteEngine

LOGGER = logging.getLogger("triptych.cluster")


class EngineProcess(KeptProcess[RemoteEngine]):
    """While there is no process, requests end at once with Overloaded."""

    info: ModelInfo

    def __init__(
        self,
        config: ModelConfig,
        *,
        module: str = "triptych.cluster.engine_main",
        warm_up: Callable[[RemoteEngine], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(config, module)
        self._warm_up = warm_up

    async def submit(self, request: PreparedRequest) -> AsyncGenerator[Event]:
        try:
            engine = self._running()
        except Overloaded as error:
            yield FinalEvent(request.request_id, FinishReason.ERROR, error.code, error.message)
            return
        async with aclosing(engine.submit(request)) as events:
            async for event in events:
                yield event

    def cancel(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.cancel(request_id)

    async def flush(self, cache: str) -> int:
        if self._engine is None:
            return 0  # a new process begins empty
        return await self._engine.flush(cache)

    def _connect(self, address: str) -> tuple[RemoteEngine, Sequence[int]]:
        shared = _shared_memory(self._config.engine.shared_memory_bytes)
        return RemoteEngine(address, shared), () if shared is None else (shared.fd,)

    async def _bring_up(self, engine: RemoteEngine) -> None:
        """Until the model is loaded and has answered once; in this order, so that no user's request comes first."""
        await engine.start()
        if self._warm_up is not None:
            await self._warm_up(engine)
        self.info = engine.info


def _shared_memory(capacity_bytes: int) -> SharedSender | None:
    """One arena a process: what belonged to an earlier one cannot be read by the next."""
    if not capacity_bytes:
        return None
    try:
        return SharedSender(capacity_bytes)
    except OSError as error:
        LOGGER.info("no shared memory, arrays go through the socket: %s", error)
        return None

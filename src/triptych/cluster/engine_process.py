"""The front's side of an engine process: start it, watch it, start it again when it dies. An `EngineHandle`."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import msgspec

from triptych.core.config import ModelConfig
from triptych.core.errors import InternalError, Overloaded, from_wire
from triptych.core.events import Event, FinalEvent, FinishReason
from triptych.core.prepared import PreparedRequest
from triptych.models.base import ModelInfo
from triptych.transfer.shared_memory import SharedSender
from triptych.understand.remote import RemoteEngine

LOGGER = logging.getLogger("triptych.cluster")
STOP_TIMEOUT_S = 10.0
RESTART_DELAYS_S = (0.5, 2.0, 10.0, 30.0)
# Threads that spin at a barrier while another process wants their core make a step ten times slower (docs/log.md).
_THREADS_SLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}


class EngineProcess:
    """One process at a time. While there is none, requests end at once with Overloaded: they may come again."""

    info: ModelInfo

    def __init__(
        self,
        config: ModelConfig,
        *,
        module: str = "triptych.cluster.engine_main",
        warm_up: Callable[[RemoteEngine], Awaitable[None]] | None = None,
    ) -> None:
        self._config = config
        self._warm_up = warm_up
        self._module = module
        self._engine: RemoteEngine | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self.num_restarts = 0

    async def start(self) -> None:
        """Returns when the model is loaded. Raises what the engine said of its failure to load."""
        self._folder = Path(tempfile.mkdtemp(prefix="triptych-"))  # mode 0700: the socket is this user's alone
        try:
            await self._launch()
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Nothing is left running or lying about afterwards. May be called more than once."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()
        await self._end_process()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def submit(self, request: PreparedRequest) -> AsyncGenerator[Event]:
        if self._engine is None:
            error = Overloaded("the engine is starting again")
            yield FinalEvent(request.request_id, FinishReason.ERROR, error.code, error.message)
            return
        async with aclosing(self._engine.submit(request)) as events:
            async for event in events:
                yield event

    def cancel(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.cancel(request_id)

    async def stats(self) -> dict[str, float]:
        if self._engine is None:
            raise InternalError("the engine is starting again")
        return {**await self._engine.stats(), "num_restarts": self.num_restarts}

    async def flush(self, cache: str) -> int:
        if self._engine is None:
            return 0  # a new process begins empty
        return await self._engine.flush(cache)

    async def _launch(self) -> None:
        assert self._folder is not None
        address = f"ipc://{self._folder}/engine-{self.num_restarts}"
        shared = _shared_memory(self._config.engine.shared_memory_bytes)
        engine = RemoteEngine(address, shared)
        fds = () if shared is None else (shared.fd,)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, address, *map(str, fds), pass_fds=fds,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**_THREADS_SLEEP, **os.environ},
        )  # fmt: skip
        self._process = process
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        ended = asyncio.create_task(process.wait())
        ready = asyncio.create_task(self._bring_up(engine))
        await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            engine.lost("the engine ended while loading")
            await asyncio.gather(ready, return_exceptions=True)
            await engine.close()
            raise await _why(process)
        ended.cancel()
        ready.result()
        self._engine, self.info = engine, engine.info

    async def _bring_up(self, engine: RemoteEngine) -> None:
        """Until the model is loaded and has answered once; in this order, so that no user's request comes first."""
        await engine.start()
        if self._warm_up is not None:
            await self._warm_up(engine)

    async def _keep(self) -> None:
        """Whenever the process ends, end its streams and start another; slower each time in a row."""
        failures = 0
        while True:
            assert self._process is not None
            if self._engine is not None:
                started_s = asyncio.get_running_loop().time()
                code = await self._process.wait()
                if asyncio.get_running_loop().time() - started_s > 60:
                    failures = 0
                LOGGER.error("engine of %s ended with code %s", self._config.path, code)
                engine, self._engine = self._engine, None
                engine.lost("the engine stopped")
                await engine.close()
            await asyncio.sleep(RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S) - 1)])
            failures += 1
            self.num_restarts += 1
            try:
                await self._launch()
            except Exception as error:  # logged, and tried again: the next request hears Overloaded
                LOGGER.error("engine of %s did not come up: %s", self._config.path, error)

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _shared_memory(capacity_bytes: int) -> SharedSender | None:
    """One arena a process: what belonged to an earlier one cannot be read by the next."""
    if not capacity_bytes:
        return None
    try:
        return SharedSender(capacity_bytes)
    except OSError as error:
        LOGGER.info("no shared memory, arrays go through the socket: %s", error)
        return None


async def _why(process: asyncio.subprocess.Process) -> Exception:
    assert process.stdout is not None
    line = (await process.stdout.read()).strip().rpartition(b"\n")[2]
    try:
        failure = msgspec.json.decode(line, type=dict[str, str])
        return from_wire(failure["code"], failure["message"])
    except (msgspec.MsgspecError, KeyError):
        return InternalError(f"the engine ended with code {process.returncode} while loading")

"""The front's side of an engine process: start it, watch it, start it again when it dies. What an engine does is the
business of its handle; see `EngineProcess` and `GenerateProcess`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from triptych.core.config import ModelConfig
from triptych.core.errors import InternalError, Overloaded, from_wire

LOGGER = logging.getLogger("triptych.cluster")
STOP_TIMEOUT_S = 10.0
RESTART_DELAYS_S = (0.5, 2.0, 10.0, 30.0)
# Threads that spin at a barrier while another process wants their core make a step ten times slower (docs/log.md).
_THREADS_SLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}


class RemoteHandle(Protocol):
    """An engine in another process, as its keeper sees it. Binds its address when it is made."""

    async def start(self) -> None:
        """Until the model is loaded. Raises InternalError if the process is lost before."""
        ...

    async def close(self) -> None: ...

    def lost(self, why: str) -> None:
        """The process is gone: every open request ends, every question fails."""
        ...

    async def stats(self) -> dict[str, float]: ...


H = TypeVar("H", bound=RemoteHandle)


class KeptProcess(Generic[H]):
    """One process at a time, `python -m MODULE ADDRESS [FD ...]`. While there is none, requests are turned away with
    Overloaded: they may come again."""

    def __init__(self, config: ModelConfig, module: str) -> None:
        self._config = config
        self._module = module
        self._engine: H | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._folder: Path | None = None
        self._loading_s = 1.0  # how long it took the last time
        self.num_restarts = 0

    def _connect(self, address: str) -> tuple[H, Sequence[int]]:
        """A handle on the process that will be started for `address`, and the file descriptors that it inherits."""
        raise NotImplementedError

    async def _bring_up(self, engine: H) -> None:
        """Until users may come."""
        await engine.start()

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

    async def stats(self) -> dict[str, float]:
        return {**await self._running().stats(), "num_restarts": self.num_restarts}

    def _running(self) -> H:
        if self._engine is None:
            raise Overloaded("the engine is starting again", retry_after_s=self._loading_s)
        return self._engine

    async def _launch(self) -> None:
        assert self._folder is not None
        address = f"ipc://{self._folder}/engine-{self.num_restarts}"
        engine, fds = self._connect(address)
        started_s = asyncio.get_running_loop().time()
        try:
            await self._load(engine, address, fds)
        except BaseException:
            engine.lost("the engine did not come up")
            await engine.close()
            await self._end_process(grace_s=0)  # it has nothing yet that it could lose
            raise
        self._loading_s = max(1.0, asyncio.get_running_loop().time() - started_s)
        self._engine = engine

    async def _load(self, engine: H, address: str, fds: Sequence[int]) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, address, *map(str, fds), pass_fds=fds,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**_THREADS_SLEEP, **os.environ},
        )  # fmt: skip
        self._process = process
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        ended = asyncio.create_task(process.wait())
        ready = asyncio.create_task(self._bring_up(engine))
        try:
            await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise await _why(process)
            ready.result()
        finally:
            for task in (ended, ready):
                task.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)

    async def _keep(self) -> None:
        """Whenever the process ends, end its requests and start another; slower each time in a row."""
        failures = 0
        while True:
            if self._engine is not None:
                assert self._process is not None
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

    async def _end_process(self, grace_s: float = STOP_TIMEOUT_S) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode is not None:
            return
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                process.kill()
            await process.wait()


async def _why(process: asyncio.subprocess.Process) -> Exception:
    assert process.stdout is not None
    line = (await process.stdout.read()).strip().rpartition(b"\n")[2]
    try:
        failure = msgspec.json.decode(line, type=dict[str, str])
        return from_wire(failure["code"], failure["message"])
    except (msgspec.MsgspecError, KeyError):
        return InternalError(f"the engine ended with code {process.returncode} while loading")

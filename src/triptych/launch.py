"""From a configuration to running processes: the only file that wires rooms together.

`serve` is the whole life of a server: the front here, one engine process a model, whether it answers or draws, ready
only when all have loaded, drained and cleared away at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import uvicorn
from starlette.applications import Starlette

from triptych import zoo
from triptych.cluster.engine_main import load, load_tokenizer
from triptych.cluster.engine_process import EngineProcess
from triptych.cluster.generate_process import GenerateProcess
from triptych.core.clock import MonotonicClock
from triptych.core.config import Config, ModelConfig, Tier
from triptych.core.errors import InvalidRequest, SourceUnavailable, UnknownModel
from triptych.core.media import DecodedImage, DecodeSpec, MediaRef, Modality
from triptych.core.prepared import PreparedRequest
from triptych.generate.build import build_engine, is_diffusion_folder
from triptych.generate.draw import Drawn, DrawOptions, draw
from triptych.generate.engine import GenerateEngine
from triptych.generate.events import GenerateEvent
from triptych.generate.init_pictures import read_mask
from triptych.generate.run import GenerateHandle
from triptych.generate.service import GenerateService
from triptych.http.app import build_app
from triptych.http.front import Front
from triptych.http.seams import Served
from triptych.media.plane import MediaPlane
from triptych.models.facts import as_text
from triptych.prompt.builder import PromptBuilder, load_prompt_builder
from triptych.understand.engine import EngineHandle, InProcessEngine, embedding_of
from triptych.warm_up import WarmUp
from triptych.zoo.build import BUILDABLE

LOGGER = logging.getLogger("triptych.launch")
EMBEDDED_MODEL = "tiny-vl"
EMBEDDED_DRAWING_MODEL = "tiny-image"


class House:
    """All rooms of one server. Making it fails at once for a bad folder; `start` loads the weights, and lets each
    engine process answer once before users come. In process nothing is warmed: who asks one question should not pay
    for two."""

    def __init__(self, config: Config, *, in_process: bool = False) -> None:
        if not config.models:
            raise InvalidRequest("no model to serve", param="models")
        config = msgspec.structs.replace(config, models=tuple(resolve_model(model) for model in config.models))
        clock = MonotonicClock()
        self.config = config
        self._in_process = in_process
        _check_names(config.models)
        self.media = MediaPlane(config.media, clock)
        self._drawing = [model for model in config.models if is_diffusion_folder(Path(model.path))]
        answering = [model for model in config.models if model not in self._drawing]
        self.builders = [_builder(model, config) for model in answering]
        self._warm_ups = [
            WarmUp(model.name or "", builder, config.media, clock) if model.engine.warm_up and not in_process else None
            for model, builder in zip(answering, self.builders, strict=True)
        ]
        self.engines: list[EngineHandle] = [
            _engine_here(model) if in_process else EngineProcess(model, warm_up=warm_up)
            for model, warm_up in zip(answering, self._warm_ups, strict=True)
        ]
        served = [_served(*parts) for parts in zip(answering, self.builders, self.engines, strict=True)]
        self._answering = served
        self._drawing_engines: list[GenerateEngine | GenerateProcess] = []
        self._answering_started = asyncio.Event()  # or have failed to
        self.service = GenerateService({}, clock)
        self.front = Front(config, served, self.media, drawing=self.service, clock=clock, ready=False)

    async def start(self) -> None:
        """Raises what an engine says of its failure to load."""
        await self.media.start()
        for warm_up in self._warm_ups:
            if warm_up is not None:
                warm_up.start()
        drawing = asyncio.gather(*map(self._start_drawing, self._drawing))
        _, found = await asyncio.gather(self._start_answering(), drawing)
        self.service.engines.update(found)
        self.front.ready = True

    async def _start_answering(self) -> None:
        try:
            await asyncio.gather(*(engine.start() for engine in self.engines))
        finally:
            self._answering_started.set()
        for served, engine in zip(self._answering, self.engines, strict=True):
            served.details.update(engine.info.extra)
            LOGGER.info("%s: %s", served.name, as_text(engine.info.extra))

    async def _start_drawing(self, model: ModelConfig) -> tuple[str, GenerateHandle]:
        """Models load side by side; step times are measured when those that answer have loaded and warmed up."""
        name, quiet = model.name or "", self._answering_started.wait
        engine: GenerateEngine | GenerateProcess
        if self._in_process:
            engine = await asyncio.to_thread(build_engine, Path(model.path), name=name, config=model.generate)
            await quiet()
        else:
            engine = GenerateProcess(model, quiet=quiet)
        self._drawing_engines.append(engine)
        await engine.start()
        return name, engine

    async def close(self) -> None:
        self.front.ready = False
        await asyncio.gather(*(warm_up.close() for warm_up in self._warm_ups if warm_up is not None))
        await self.service.close()
        closing = [engine.close() for engine in self.engines] + [engine.close() for engine in self._drawing_engines]
        await asyncio.gather(*closing, return_exceptions=True)
        for builder in self.builders:
            builder.close()
        await self.media.close()


def _check_names(models: Sequence[ModelConfig]) -> None:
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"two models have the same name among {names}: set models.name", param="models")


def _builder(model: ModelConfig, config: Config) -> PromptBuilder:
    return load_prompt_builder(
        model.path,
        dtype=model.engine.dtype,
        overrides=dict(model.processor),
        max_tokens=model.engine.max_model_tokens,
        processor_cache_bytes=config.media.processor_cache_bytes,
        max_decoded_bytes=config.media.max_decoded_bytes,
    )


def _engine_here(model: ModelConfig) -> EngineHandle:
    return InProcessEngine(load(model), model.engine, load_tokenizer=partial(load_tokenizer, model))


def default_model(path: str | None = None) -> ModelConfig:
    """What answers when nothing is named: the embedded model."""
    return ModelConfig(path=path) if path else _embedded(EMBEDDED_MODEL)


def embedded_models() -> tuple[ModelConfig, ...]:
    """What `serve` serves when nothing is named: the model that answers and the one that draws."""
    return _embedded(EMBEDDED_MODEL), _embedded(EMBEDDED_DRAWING_MODEL)


def _embedded(name: str) -> ModelConfig:
    """By its folder, so that one of the same name in the working directory does not take its place."""
    return ModelConfig(path=str(zoo.folder(name)), name=name)


def resolve_model(model: ModelConfig) -> ModelConfig:
    """With the folder of an embedded model in place of its name, and a name in any case. Raises UnknownModel for one
    that has to be built first."""
    path = model.path
    if not Path(path).is_dir():
        if path in BUILDABLE:
            raise UnknownModel(f"{path} is built first: triptych models build {path}, then serve its folder")
        if path in zoo.names():
            path = str(zoo.folder(path))
    return msgspec.structs.replace(model, path=path, name=model.name or Path(model.path).name)


def _served(model: ModelConfig, builder: PromptBuilder, engine: EngineHandle) -> Served:
    async def flush_processor() -> int:
        return builder.flush()

    async def embed(request: PreparedRequest) -> npt.NDArray[np.float32]:
        return await embedding_of(engine, request)

    name = model.name or ""
    return Served(
        name=name,
        engine=engine,
        prompts=builder,
        max_tokens=builder.max_tokens,
        text_stream=builder.text_stream,
        token_bytes=builder.token_bytes,
        tool_stream=builder.tool_stream if builder.tool_style else None,  # type: ignore[arg-type]
        modalities=builder.modalities,
        aliases=(model.path,),
        created_s=int(time.time()),
        embed=embed,
        front_stats=builder.stats,
        flushers={
            "processor": flush_processor,
            "encoder": partial(engine.flush, "encoder"),
            "prefix": partial(engine.flush, "prefix"),
        },
        details={
            "architecture": builder.info.architecture,
            "num_params": builder.info.num_params,
            "revision": builder.info.revision.hex(),
        },
    )


class _Server(uvicorn.Server):
    """Uvicorn, that says when it drains, and ends with a code of ours in place of the signal."""

    def __init__(self, config: uvicorn.Config, front: Front) -> None:
        super().__init__(config)
        self._front = front

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._front.draining = True
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.handle_exit, number, None)
        except (ValueError, RuntimeError):  # not the main thread: whoever made this server stops it by `should_exit`
            yield
            return
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


class RunningServer:
    """A server on this event loop. `url` is known before the models are loaded; `failure` says why it ended early."""

    def __init__(self, config: Config, *, in_process: bool = False) -> None:
        self.house = House(config, in_process=in_process)
        self.failure: Exception | None = None
        self._listener = _listen(config.http.host, config.http.port)
        host = f"[{config.http.host}]" if ":" in config.http.host else config.http.host
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                build_app(self.house.front, self._lifespan),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(config.http.drain_timeout_s),
            ),
            self.house.front,
        )

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Until a signal, `stop`, or a failure to load; everything is cleared away when it returns."""
        self._on_ready = on_ready
        await self._server.serve([self._listener])

    def stop(self) -> None:
        self._server.should_exit = True

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(self._load())
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await self.house.close()

    async def _load(self) -> None:
        """The door is open meanwhile: /health answers, /ready says that it loads."""
        try:
            await self.house.start()
        except Exception as error:
            self.failure = error
            self.stop()
        else:
            self._on_ready()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {host}:{port}: {error.strerror}", param="http.port") from error


def serve(config: Config, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Run a server until SIGTERM or SIGINT. Raises what kept it from coming up."""

    async def run() -> RunningServer:
        server = RunningServer(config)
        await server.run(lambda: on_ready(server.url))
        return server

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        server = runner.run(run())
    if server.failure is not None:
        raise server.failure


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop  # not there on Windows

    return uvloop.new_event_loop


@contextlib.contextmanager
def background_server(config: Config, *, in_process: bool = False) -> Iterator[str]:
    """A server on a thread of its own; yields its URL when it is ready. Raises what kept it from coming up."""
    ready = threading.Event()
    servers: list[RunningServer] = []
    failures: list[BaseException] = []

    async def run() -> None:
        servers.append(RunningServer(config, in_process=in_process))
        await servers[0].run(ready.set)
        if servers[0].failure is not None:
            raise servers[0].failure

    def live() -> None:
        try:
            asyncio.run(run())
        except Exception as error:  # raised below, in the thread that asked for the server
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=live, name="triptych-server")
    thread.start()
    try:
        ready.wait()
        if failures:
            raise failures[0]
        yield servers[0].url
    finally:
        for server in servers:
            server.stop()
        thread.join()


def diffusion_folder(model: str) -> Path:
    """The folder of a model that draws. Raises UnknownModel."""
    path = Path(resolve_model(default_model(model)).path)
    if not is_diffusion_folder(path):
        raise UnknownModel(f"{model!r} is no diffusers folder: it has no model_index.json")
    return path


def draw_to_file(
    prompt: str,
    output: Path,
    model: str | None,
    options: dict[str, Any],
    on_event: Callable[[GenerateEvent], None] = lambda event: None,
) -> Drawn:
    """One picture or clip by the diffusers model of this folder or embedded name; without one by the embedded one.
    Raises leaves of the error tree."""
    path = diffusion_folder(model) if model else zoo.folder(EMBEDDED_DRAWING_MODEL)
    image, mask = options.pop("image", None), options.pop("mask", None)

    async def run() -> Drawn:
        edit = await _read_edit(image, mask) if image or mask else {}
        return await draw(prompt, output, folder=path, options=DrawOptions(**options, **edit), on_event=on_event)

    return asyncio.run(run())


async def _read_edit(image: Path | None, mask: Path | None) -> dict[str, Any]:
    """The pictures of an edit, read from the caller's own files; the media plane's budgets hold for them too."""
    files = {name: path for name, path in (("image", image), ("mask", mask)) if path is not None}
    async with MediaPlane() as media:
        refs = [MediaRef(Modality.IMAGE, _bytes_of(path), param=name) for name, path in files.items()]
        blobs = await media.open(refs, tier=Tier(), tenant="")
        found: dict[str, Any] = {}
        for name, blob in zip(files, blobs, strict=True):
            if name == "mask":
                found[name] = read_mask(blob.data)
            else:
                decoded = await media.decode(blob, DecodeSpec(), tier=Tier())
                assert isinstance(decoded, DecodedImage)
                found["init_image"] = decoded.pixels
    return found


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceUnavailable(f"cannot read {path}: {error.strerror}") from error

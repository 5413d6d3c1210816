"""`triptych.Engine`: the whole house in this process, without a socket. For scripts, notebooks and evaluation.

    with Engine("tiny-vl") as engine:
        print(engine.ask("How many red circles are there?", "scene.png").text)

The rooms are the server's own (`launch.House`): the same budgets, caches, scheduler and errors.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from triptych.core.clock import MonotonicClock
from triptych.core.config import Config, ModelConfig
from triptych.core.events import FinalEvent, FinishReason, TokenEvent
from triptych.core.ids import new_id
from triptych.core.media import MediaRef, Modality
from triptych.core.sampling import SamplingParams
from triptych.core.stages import Stage, StageClock
from triptych.launch import House

T = TypeVar("T")
Source = str | bytes | Path
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """`stage_ms` are the stages up to the first token; they sum to the time to first token."""

    text: str
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    stage_ms: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


class Engine:
    """One model. Opened by `with`, or by `start` and `close`. Several threads may call it: requests share batches.

    `model` is a Hugging Face folder, a hub name or an embedded model's name. `config` replaces everything else.
    """

    def __init__(self, model: str = "tiny-vl", *, config: Config | None = None) -> None:
        self._config = config or Config(models=(ModelConfig(path=model),))
        self._clock = MonotonicClock()
        self._house: House | None = None

    def start(self) -> Engine:
        """Load the model. Raises UnknownModel, InvalidRequest."""
        self._house = House(self._config, in_process=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="triptych-front", daemon=True)
        self._thread.start()
        try:
            self._run(self._house.start()).result()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Ends what runs and frees the model. May be called more than once."""
        house, self._house = self._house, None
        if house is not None:
            self._run(house.close()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(
        self, question: str, *media: Source, modality: Modality = Modality.IMAGE, sampling: SamplingParams | None = None
    ) -> Reply:
        """One question about media (paths, URLs or bytes), all of one `modality`. Greedy unless `sampling` differs.

        Raises the leaf of `core.errors` that ended the request.
        """
        parts: list[Any] = [_ref(source, modality, index) for index, source in enumerate(media)]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
        return self.chat([message], sampling=sampling)

    def chat(self, messages: list[Message], *, sampling: SamplingParams | None = None) -> Reply:
        """A conversation; the form of `messages` is told in `triptych.prompt`."""
        return self._run(self._chat(messages, sampling or SamplingParams(temperature=0.0))).result()

    def chat_many(
        self, conversations: Sequence[list[Message]], *, sampling: SamplingParams | None = None
    ) -> list[Reply]:
        """All at once, batched; replies in order. The first error is raised when all have ended."""
        params = sampling or SamplingParams(temperature=0.0)
        futures = [self._run(self._chat(messages, params)) for messages in conversations]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    async def _chat(self, messages: list[Message], sampling: SamplingParams) -> Reply:
        assert self._house is not None, "the engine is not started"
        arrival_s = self._clock.now_s()
        clock = StageClock(arrival_s)
        builder, engine = self._house.builders[0], self._house.engines[0]
        request = await builder.prepare_chat(
            messages,
            sampling=sampling,
            media=self._house.media,
            tier=self._config.tier("default"),
            tenant="local",
            request_id=new_id("local"),
            arrival_s=arrival_s,
            clock=clock,
        )
        return await self._collect(engine.submit(request), clock)

    async def _collect(self, events: AsyncIterator[Any], clock: StageClock) -> Reply:
        assert self._house is not None
        stream = self._house.builders[0].text_stream()
        text, token_ids = "", []
        async for event in events:
            if isinstance(event, TokenEvent):
                if event.stage_ms is not None:
                    clock.take(event.stage_ms, event.sent_s, gap=Stage.LLM_QUEUE)
                    clock.close(Stage.FIRST_STREAM, self._clock.now_s())
                token_ids += event.token_ids
                text += stream.push(event.token_ids)
            elif isinstance(event, FinalEvent):
                if event.reason is FinishReason.ERROR:
                    raise event.error()
                text += stream.finish()
                return Reply(
                    text, token_ids, event.reason.value, event.num_prompt_tokens, dict(clock.ms), dict(event.counters)
                )
        raise AssertionError("a stream ended without its final event")

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _ref(source: Source, modality: Modality, index: int) -> MediaRef:
    """A path is read here, by the caller's own rights; the source policy is for what comes over the network."""
    is_url = isinstance(source, str) and source.startswith(("https:", "http:", "data:"))
    if isinstance(source, bytes) or (isinstance(source, str) and is_url):
        return MediaRef(modality, source, param=f"media.{index}")
    return MediaRef(modality, Path(source).read_bytes(), param=f"media.{index}")

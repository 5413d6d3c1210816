"""The load client: streams chat answers over HTTP and notes when each piece came. Open loop and closed loop.

An open loop sends at times that were fixed before (Poisson), whatever the server does, and counts from the intended
time; a closed loop keeps a number of requests in flight. `summary` turns the records into figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from bench.work import poisson_offsets_s

CHAT_PATH = "/v1/chat/completions"


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stages: dict[str, float] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_DECODER = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Record:
    """One request as the client saw it. All `_s` are seconds of the run's clock; `texts_s` has one entry a piece of
    text, in the order of arrival."""

    kind: str
    intended_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    texts_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    stages: dict[str, float] | None = None
    error: str | None = None

    @property
    def lag_s(self) -> float:
        """How late the client itself was."""
        return self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float:
        """From the intended time, so that a client or server that falls behind cannot hide it."""
        return self.texts_s[0] - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        if self.num_output_tokens < 2:
            return None
        return (self.texts_s[-1] - self.texts_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [late - early for early, late in zip(self.texts_s, self.texts_s[1:], strict=False)]


class Client:
    """Sends bodies to one server. An async context manager; its clock is at 0 when it is entered."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._url = url.rstrip("/") + CHAT_PATH
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._clock = clock

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0))
        self._start_s = self._clock()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    def now_s(self) -> float:
        return self._clock() - self._start_s

    async def send(self, kind: str, body: bytes, intended_s: float | None = None) -> Record:
        """One request to its end. What goes wrong is in `Record.error`; nothing is raised."""
        now_s = self.now_s()
        record = Record(kind, now_s if intended_s is None else intended_s, sent_s=now_s)
        try:
            headers = {"content-type": "application/json"}
            async with self._session.post(self._url, data=body, headers=headers) as response:
                if response.status != 200:
                    record.error = f"status {response.status}: {(await response.text())[:300]}"
                else:
                    await self._read(response, record)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.end_s = self.now_s()
        if record.error is None and not record.texts_s:
            record.error = "the answer had no text"
        return record

    async def _read(self, response: aiohttp.ClientResponse, record: Record) -> None:
        rest = b""
        async for data in response.content.iter_any():
            now_s = self.now_s()
            events, rest = split_events(rest + data)
            for event in events:
                _note(_DECODER.decode(event), record, now_s)


def split_events(data: bytes) -> tuple[list[bytes], bytes]:
    """The payloads of the whole server-sent events in `data`, without the last `[DONE]`, and what is left over."""
    *whole, rest = data.replace(b"\r\n", b"\n").split(b"\n\n")
    return list(_payloads(whole)), rest


def _payloads(events: Sequence[bytes]) -> Iterator[bytes]:
    for event in events:
        for line in event.split(b"\n"):
            if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
                yield payload


def _note(chunk: _Chunk, record: Record, now_s: float) -> None:
    if chunk.error is not None:
        record.error = f"in the stream: {chunk.error}"
    if any(choice.delta.content for choice in chunk.choices):
        record.texts_s.append(now_s)
    if chunk.usage is not None:
        record.num_prompt_tokens = chunk.usage.prompt_tokens
        record.num_output_tokens = chunk.usage.completion_tokens
        record.stages = chunk.usage.stages


async def closed_loop(client: Client, kind: str, bodies: Sequence[bytes], concurrency: int) -> list[Record]:
    """All bodies, `concurrency` at a time; the next is sent when one has ended."""
    waiting = iter(bodies)
    records: list[Record] = []

    async def worker() -> None:
        for body in waiting:
            records.append(await client.send(kind, body))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return records


async def open_loop(client: Client, kind: str, bodies: Sequence[bytes], rate_per_s: float, seed: int) -> list[Record]:
    """All bodies at Poisson times of this rate, however many are still in flight."""
    start_s = client.now_s()
    offsets_s = poisson_offsets_s(rate_per_s, len(bodies), seed)

    async def at(offset_s: float, body: bytes) -> Record:
        await asyncio.sleep(start_s + offset_s - client.now_s())
        return await client.send(kind, body, start_s + offset_s)

    return list(await asyncio.gather(*map(at, offsets_s, bodies)))


async def steady_beside(
    client: Client, kind: str, bodies: Sequence[bytes], concurrency: int, main: Sequence[asyncio.Task[list[Record]]]
) -> list[Record]:
    """Keep `concurrency` requests in flight, the bodies over and over, until every task of `main` is done.

    The last ones are read to their end: whoever measures both keeps the records that were sent before `main` ended.
    """
    records: list[Record] = []

    async def worker(offset: int) -> None:
        number = offset
        while not all(task.done() for task in main):
            records.append(await client.send(kind, bodies[number % len(bodies)]))
            number += concurrency

    await asyncio.gather(*(worker(offset) for offset in range(concurrency)))
    return records

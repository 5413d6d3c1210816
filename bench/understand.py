"""The suite for Understand: the same seven pieces of work against any server that speaks OpenAI chat.

python -m bench.understand URL MODEL [--quick] [--stages]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bench.load import Client, Record, closed_loop, open_loop, steady_beside
from bench.summary import Slo, percentiles_ms, summarise
from bench.work import WorkSpec, bodies

SEEDS_APART = 10_000  # between two works, so that no picture comes twice
WARM_UP_SEED = 900_000


@dataclass(frozen=True, slots=True)
class Suite:
    """How much of each work. `rates_per_s` are the open loop's; `mixed_rate_per_s` are pictures beside text."""

    seed: int = 0
    num_output_tokens: int = 64
    size_px: int = 512
    num_single: int = 8
    concurrency: int = 8
    num_pictures: int = 24
    num_texts: int = 48
    rates_per_s: tuple[float, ...] = (1.0,)
    num_open: int = 24
    mixed_rate_per_s: float = 0.8
    num_mixed: int = 20
    num_text_streams: int = 2
    stages: bool = False
    slo: Slo = field(default_factory=Slo)

    def quick(self) -> Suite:
        """A third of it: for a look, not for the record. Pictures in two rounds: one alone would be a burst."""
        return replace(
            self,
            num_single=3,
            num_pictures=2 * self.concurrency,
            num_texts=16,
            rates_per_s=(0.8,),
            num_open=8,
            num_mixed=8,
        )


class SuiteRun:
    """One suite against one server."""

    def __init__(self, client: Client, model: str, suite: Suite) -> None:
        self._client = client
        self._model = model
        self._suite = suite
        self._num_works = 0

    def works(self) -> dict[str, Callable[[], Awaitable[dict[str, Any]]]]:
        suite = self._suite
        works: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "single_unique": lambda: self._closed("unique", suite.num_single, 1),
            "single_same": lambda: self._closed("same", suite.num_single, 1, skip_first=True),
            "single_text": lambda: self._closed("text", suite.num_single, 1),
            "eight_unique": lambda: self._closed("unique", suite.num_pictures, suite.concurrency),
            "eight_text": lambda: self._closed("text", suite.num_texts, suite.concurrency),
            "mixed": self._mixed,
        }
        for rate_per_s in suite.rates_per_s:
            works[f"open_unique_{rate_per_s:g}"] = partial(self._open, rate_per_s)
        return works

    async def warm_up(self) -> None:
        """Code paths, thread pools and allocators; with pictures that no work sends."""
        for kind, count, concurrency in (("unique", 2, 1), ("text", 8, 8), ("unique", 8, 8)):
            made = bodies(self._model, self._spec(kind, WARM_UP_SEED), count)
            for record in await closed_loop(self._client, kind, made, concurrency):
                if record.error:
                    raise RuntimeError(f"the warm-up failed: {record.error}")

    def _spec(self, kind: str, seed: int) -> WorkSpec:
        suite = self._suite
        return WorkSpec(kind, suite.num_output_tokens, suite.size_px, seed, suite.stages)

    def _bodies(self, kind: str, count: int) -> Sequence[bytes]:
        self._num_works += 1
        return bodies(self._model, self._spec(kind, self._suite.seed + self._num_works * SEEDS_APART), count)

    async def _closed(self, kind: str, count: int, concurrency: int, *, skip_first: bool = False) -> dict[str, Any]:
        made = self._bodies(kind, count + skip_first)
        if skip_first:
            await self._client.send(kind, made[0])
            made = made[1:]
        return summarise(await closed_loop(self._client, kind, made, concurrency), slo=self._suite.slo)

    async def _open(self, rate_per_s: float) -> dict[str, Any]:
        suite = self._suite
        made = self._bodies("unique", suite.num_open)
        records = await open_loop(self._client, "unique", made, rate_per_s, suite.seed)
        return {"rate_per_s": rate_per_s} | summarise(records, slo=suite.slo, open_loop=True)

    async def _mixed(self) -> dict[str, Any]:
        """Text streams all the while that pictures arrive; the text's gaps are those between the first picture's
        sending and the last one's end."""
        suite = self._suite
        pictures, texts = self._bodies("unique", suite.num_mixed), self._bodies("text", 4096)
        start_s = self._client.now_s()
        arriving = asyncio.create_task(open_loop(self._client, "unique", pictures, suite.mixed_rate_per_s, suite.seed))
        text_records = await steady_beside(self._client, "text", texts, suite.num_text_streams, [arriving])
        picture_records = await arriving
        end_s = max(record.end_s for record in picture_records)
        return {
            "rate_per_s": suite.mixed_rate_per_s,
            "text_itl_ms": percentiles_ms(gaps_between(text_records, start_s, end_s)),
            "text": summarise(text_records, slo=suite.slo),
            "pictures": summarise(picture_records, slo=suite.slo, open_loop=True),
        }


def gaps_between(records: Sequence[Record], start_s: float, end_s: float) -> list[float]:
    """Inter-token gaps that lie in a window."""
    pairs = (pair for record in records for pair in zip(record.texts_s, record.texts_s[1:], strict=False))
    return [late - early for early, late in pairs if early >= start_s and late <= end_s]


async def run_suite(
    url: str, model: str, suite: Suite, say: Callable[[str], None] = lambda line: None, only: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """All works, or those named in `only`; one after another. Raises RuntimeError when the warm-up fails."""
    async with Client(url) as client:
        run = SuiteRun(client, model, suite)
        await run.warm_up()
        figures = {}
        for name, work in run.works().items():
            if only and name not in only:
                continue
            figures[name] = await work()
            say(f"  {name}: {line(figures[name])}")
    return figures


def line(figures: dict[str, Any]) -> str:
    """One work in one line."""
    if "text_itl_ms" in figures:
        itl = figures["text_itl_ms"] or {}
        return f"text inter-token p50 {itl.get('p50')} p99 {itl.get('p99')} ms; pictures {line(figures['pictures'])}"
    ttft, tpot = figures["ttft_ms"] or {}, figures["tpot_ms"] or {}
    parts = [
        f"TTFT p50 {ttft.get('p50')} p99 {ttft.get('p99')} ms",
        f"TPOT p50 {tpot.get('p50')} ms",
        f"{figures['requests_per_s']} req/s",
        f"{figures['tokens_per_s']} tokens/s",
    ]
    if figures["num_failed"]:
        parts.append(f"{figures['num_failed']} FAILED: {figures['errors']}")
    if figures.get("void"):
        parts.append(f"VOID: dispatch lag p99 {figures['dispatch_lag_ms']['p99']} ms")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--stages", action="store_true", help="ask triptych for the stage table, print its means")
    parser.add_argument("--only", nargs="*", default=(), help="names of works")
    args = parser.parse_args()
    suite = Suite(stages=args.stages)
    figures = asyncio.run(
        run_suite(args.url, args.model, suite.quick() if args.quick else suite, lambda text: print(text), args.only)
    )
    if args.stages:
        print(json.dumps({name: work.get("stages_ms") for name, work in figures.items()}, indent=1))


if __name__ == "__main__":
    main()

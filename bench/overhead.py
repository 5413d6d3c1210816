"""What the server itself costs, per request and per streamed token, in milliseconds.

    python -m bench.overhead [--out FILE.json]

`door`: the toy engine behind the real HTTP door, one process. `server`: `triptych serve` on a two-layer model with
random weights and one thread: front process, tokenizer, wire, scheduler and engine are real. Wall time is what one
caller sees; CPU time is that of the server's processes, all together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench import peers, toy_server
from bench.load import Client, Record, closed_loop
from bench.servers import free_port, started
from bench.work import WorkSpec, bodies

FEW_TOKENS, MANY_TOKENS = 1, 129
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{{ message['content'][0]['text'] }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds. `request` is a whole answer of one token; `token` is one more token of a stream."""

    request_wall_ms: float
    request_cpu_ms: float
    token_wall_ms: float
    token_cpu_ms: float


async def measure(url: str, model: str, pid: int, *, concurrency: int, count: int) -> Cost:
    """Short answers give the cost of a request, long ones less short ones the cost of a token.

    Wall time per token is of one stream of `concurrency`; CPU time per token is of each token there was.
    """
    async with Client(url) as client:
        few, few_cpu_s = await _loop(client, model, pid, FEW_TOKENS, concurrency, count)
        many, many_cpu_s = await _loop(client, model, pid, MANY_TOKENS, concurrency, max(concurrency, count // 8))
    extra = MANY_TOKENS - FEW_TOKENS
    request_cpu_s = few_cpu_s / len(few)
    return Cost(
        request_wall_ms=_e2e_ms(few),
        request_cpu_ms=request_cpu_s * 1e3,
        token_wall_ms=(_e2e_ms(many) - _e2e_ms(few)) / extra,
        token_cpu_ms=(many_cpu_s / len(many) - request_cpu_s) / extra * 1e3,
    )


async def _loop(
    client: Client, model: str, pid: int, num_tokens: int, concurrency: int, count: int
) -> tuple[Sequence[Record], float]:
    spec = WorkSpec("text", num_tokens)
    await closed_loop(client, "text", bodies(model, spec, concurrency), concurrency)
    before_s = cpu_s(pid)
    records = await closed_loop(client, "text", bodies(model, spec, count), concurrency)
    spent_s = cpu_s(pid) - before_s
    if failed := [record.error for record in records if record.error]:
        raise RuntimeError(f"{len(failed)} of {count} requests failed: {failed[0]}")
    return records, spent_s


def _e2e_ms(records: Sequence[Record]) -> float:
    return median(record.e2e_s for record in records) * 1e3


def cpu_s(pid: int) -> float:
    """User and system time of a process and all below it."""
    top = psutil.Process(pid)
    times = [process.cpu_times() for process in (top, *top.children(recursive=True))]
    return sum(each.user + each.system for each in times)


@contextmanager
def door(folder: Path) -> Iterator[tuple[str, str, int]]:
    port = free_port()
    command = [sys.executable, "-m", "bench.toy_server", str(port)]
    url = f"http://127.0.0.1:{port}"
    with started(command, f"{url}/health", peers.environment(), folder / "door.log", timeout_s=60):
        yield url, toy_server.MODEL_NAME, _child()


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, str, int]]:
    model = folder / "model"
    tiny_folder(model)
    with peers.triptych(peers.Options(model, takes_pictures=False, num_threads=1), folder / "server.log") as running:
        yield running.url, peers.MODEL_NAME, _child()


def _child() -> int:
    """The one process started from here."""
    (child,) = psutil.Process().children()
    return child.pid


def tiny_folder(out: Path) -> None:
    """A Llama of two layers of width 64, random, with bytes for tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")
    wrapped.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(wrapped),
        max_position_embeddings=1024,
        eos_token_id=wrapped.eos_token_id,
        bos_token_id=wrapped.bos_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    wrapped.save_pretrained(out)


def bare_step_ms(folder: Path, num_steps: int = 200) -> float:
    """One step of the same model by itself, without cache: what of a token's time is the model's and not ours."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    times_s = []
    with torch.inference_mode():
        for _ in range(num_steps):
            begin_s = time.perf_counter()
            model(torch.zeros((1, 1), dtype=torch.long), use_cache=False)
            times_s.append(time.perf_counter() - begin_s)
    return median(times_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=200)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, start in (("door", door), ("server", server)):
            with start(folder) as (url, model, pid):
                for concurrency in (1, 8):
                    cost = asyncio.run(measure(url, model, pid, concurrency=concurrency, count=args.count))
                    found[f"{what}, {concurrency} at a time"] = {
                        field: round(getattr(cost, field), 4) for field in Cost.__dataclass_fields__
                    }
        found["bare_step_ms"] = round(bare_step_ms(folder / "model"), 4)
    show(found)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def show(found: dict[str, Any]) -> None:
    table = Table(title="server overhead, ms")
    columns = list(Cost.__dataclass_fields__)
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for what, cost in found.items():
        if isinstance(cost, dict):
            table.add_row(what, *(f"{cost[column]:.3f}" for column in columns))
    Console().print(table)
    print(f"one step of the bare two-layer model: {found['bare_step_ms']:.3f} ms")


if __name__ == "__main__":
    main()

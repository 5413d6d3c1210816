"""What it costs to hand one large array from the front to an engine process: shared memory beside frames, same run.

    python -m bench.handover [--mebibytes 30] [--rounds 30]

The clock runs from the front's `submit` until the engine process has the request and has read a byte of every page;
both processes read CLOCK_MONOTONIC. The two ways alternate, each over a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from triptych.core.clock import MonotonicClock
from triptych.core.events import FinalEvent, FinishReason
from triptych.core.media import Modality
from triptych.core.prepared import EncoderItem, PreparedRequest, Span
from triptych.core.sampling import SamplingParams
from triptych.models.base import ModelInfo
from triptych.transfer.shared_memory import SharedSender
from triptych.understand.remote import RemoteEngine, SocketMailbox, info_to_wire
from triptych.understand.wire import Ready, pack

PAGE_BYTES = 4096
INFO = ModelInfo("handover", b"", 1, 1, 1, 1, ())


class _Reader:
    """Stands for an engine core: reads what it is given, says when it has."""

    def __init__(self) -> None:
        self.finals: list[Any] = []

    def submit(self, request: PreparedRequest) -> None:
        for item in request.items:
            for array in (item.features or {}).values():
                array.reshape(-1).view(np.uint8)[::PAGE_BYTES].sum()
        self.finals.append(FinalEvent(request.request_id, FinishReason.STOP, sent_s=MonotonicClock().now_s()))


def child(address: str, shared_fd: int | None) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    stopped: list[bool] = []
    mailbox = SocketMailbox(socket, lambda: stopped.append(True), shared_fd)
    socket.send(pack(Ready(info_to_wire(INFO))))
    core: Any = _Reader()
    while not stopped:
        _serve(mailbox, core)
        if core.finals:
            mailbox.send(core.finals)
            core.finals = []
    socket.close(linger=1000)
    context.term()


def _serve(mailbox: SocketMailbox, core: Any) -> None:
    for command in mailbox.receive(wait=True):
        command(core)


def request_of(index: int, num_bytes: int) -> PreparedRequest:
    pixels = np.random.default_rng(index).random(num_bytes // 4, dtype=np.float32)
    item = EncoderItem(str(index).encode(), Modality.IMAGE, 1, {"pixel_values": pixels})
    return PreparedRequest(str(index), [0], SamplingParams(), (Span(0, 1, 0),), (item,))


async def handover_ms(engine: RemoteEngine, request: PreparedRequest) -> float:
    started_s = MonotonicClock().now_s()
    async for event in engine.submit(request):
        if isinstance(event, FinalEvent):
            return (event.sent_s - started_s) * 1e3
    raise AssertionError("no final event")


async def measure(num_bytes: int, rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return await _measure(folder, num_bytes, rounds)


async def _measure(folder: str, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    engines, processes = {}, []
    for name in ("frames", "shared"):
        address, shared = f"ipc://{folder}/{name}", SharedSender(4 * num_bytes) if name == "shared" else None
        fds = [] if shared is None else [shared.fd]
        engines[name] = RemoteEngine(address, shared)
        command = [sys.executable, "-m", "bench.handover", "--child", address, *map(str, fds)]
        root = Path(__file__).parent.parent
        processes.append(await asyncio.create_subprocess_exec(*command, pass_fds=fds, cwd=root))
    found: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        await engine.start()
    for index in range(rounds + 2):
        for name, engine in engines.items():
            found[name].append(await handover_ms(engine, request_of(index, num_bytes)))
            await asyncio.sleep(0.05)
    for engine in engines.values():
        await engine.close()
    for process in processes:
        process.kill()
        await process.wait()
    return {name: times[2:] for name, times in found.items()}  # the first two touch fresh pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], int(args.child[1]) if len(args.child) > 1 else None)
        return
    found = asyncio.run(measure(int(args.mebibytes * 2**20), args.rounds))
    table = {
        name: {"p50_ms": statistics.median(times), "min_ms": min(times), "p90_ms": sorted(times)[int(len(times) * 0.9)]}
        for name, times in found.items()
    }
    ratio = table["shared"]["p50_ms"] / table["frames"]["p50_ms"]
    print(json.dumps({"mebibytes": args.mebibytes, "rounds": args.rounds, **table, "ratio_p50": ratio}, indent=1))


if __name__ == "__main__":
    main()

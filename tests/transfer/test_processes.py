"""Shared memory between real processes: the same tokens, every slot comes back, nothing left when a side is killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.understand.conftest import SMALL, collect, reference, request_of, run_on
from tests.understand.test_engine import workload
from triptych.core.events import FinishReason
from triptych.testing.toy_model import toy_item
from triptych.transfer.shared_memory import SharedSender
from triptych.understand import remote
from triptych.understand.remote import RemoteEngine

__all__ = ["reference"]


@pytest.fixture(autouse=True)
def every_array_is_large(monkeypatch):
    monkeypatch.setattr(remote, "MIN_SHARED_BYTES", 1)


@pytest.fixture
def connect(tmp_path):
    """An engine process on the toy model and the front's handle on it; killed at the end whatever happened."""
    processes = []

    def start(capacity_bytes=2**20, name="triptych-test"):
        address = f"ipc://{tmp_path}/engine-{len(processes)}"
        shared = SharedSender(capacity_bytes, name=name)
        command = [sys.executable, "-m", "triptych.testing.toy_engine_process", address]
        command += [msgspec.json.encode(SMALL).decode(), str(shared.fd)]
        processes.append(subprocess.Popen(command, pass_fds=(shared.fd,), stdin=subprocess.PIPE))
        return RemoteEngine(address, shared), shared, processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdin.close()


def open_arenas(name):
    """Open files and mappings of memory files of this name, in all processes that can be looked at."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            found += [line for line in (folder / "maps").read_text().splitlines() if f"memfd:{name}" in line]
            links = os.listdir(folder / "fd")
            found += [f"{folder}/{link}" for link in links if f"memfd:{name}" in _target(folder / "fd" / link)]
    return found


def _target(link):
    with contextlib.suppress(OSError):  # this very listing was one of the files
        return os.readlink(link)
    return ""


async def all_given_back(engine, shared):
    """The slots' return is a message behind the last event: questions and answers go the same way."""
    for _ in range(20):
        await engine.stats()
        if not shared.stats()["transfer_shared_bytes"]:
            break
        await asyncio.sleep(0.01)
    shared.check_integrity()
    return shared.stats()["transfer_shared_bytes"]


async def test_tokens_are_the_same_and_every_slot_comes_back(connect, reference):
    """Requests with media, one cancelled in mid-stream and one with a faulty item: then the arena is empty."""
    engine, shared, _ = connect()
    await engine.start()
    results = await asyncio.gather(*(collect(engine, request) for request in workload()))
    _, bad = await collect(engine, request_of("bad", [1, toy_item(b"bad", 5, fill=float("inf")), 2]))
    stream = engine.submit(request_of("gone", [1, toy_item(b"gone", 9), 2], max_tokens=400))
    await anext(stream)
    await stream.aclose()
    left = await all_given_back(engine, shared)
    stats = await engine.stats()
    await engine.close()

    assert [reference(request) for request in workload()] == [tokens for tokens, _ in results]
    assert bad.reason is FinishReason.ERROR
    assert left == 0
    pictures = {item.key for request in workload() for item in request.items}  # a known one is not sent again
    assert stats["transfers_shared"] >= len(pictures) + 2
    assert stats["transfers_refused"] == 0


async def test_a_full_arena_sends_frames(connect, reference):
    """No request waits for room or fails for it."""
    engine, _, _ = connect(capacity_bytes=512)
    results, stats = await run_on(engine, workload())

    assert [reference(r) for r in workload()] == [results[r.request_id][0] for r in workload()]
    assert stats["transfers_refused"] > 0


async def test_a_slot_that_is_not_the_requests_ends_it_alone(connect, reference):
    """A descriptor of an earlier generation: that request gets its final event, the next is answered."""
    engine, shared, _ = connect()
    await engine.start()
    place = shared.place

    def place_and_lose(array):
        placed = place(array)
        shared.release(placed.slot_id)
        return placed

    shared.place = place_and_lose
    good = request_of("good", [1, toy_item(b"x", 5), 2])
    tokens, final = await collect(engine, replace(good, request_id="late"))
    shared.place = place
    answer, _ = await collect(engine, good)
    await engine.close()

    assert (tokens, final.reason) == ([], FinishReason.ERROR)
    assert "generation" in final.error_message
    assert answer == reference(good)


async def test_a_caller_who_goes_while_it_copies_leaves_no_slot(connect):
    """Cancelled before the message is sent: what was placed is taken back."""
    engine, shared, _ = connect()
    await engine.start()
    place = shared.place

    def slowly(array):
        time.sleep(0.2)
        return place(array)

    shared.place = slowly
    asking = asyncio.create_task(collect(engine, request_of("r", [1, toy_item(b"x", 5), 2])))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(0.4)
    assert shared.num_placed == 1
    assert shared.stats()["transfer_shared_bytes"] == 0
    await engine.close()


async def test_a_killed_engine_leaves_nothing(connect):
    """Killed while it holds slots: the front lets go of the arena, and no process has it open."""
    engine, _, process = connect(name="triptych-engine-killed")
    await engine.start()
    stream = engine.submit(request_of("r", [1, toy_item(b"x", 9), 2], max_tokens=400))
    await anext(stream)
    mapped = [entry for entry in open_arenas("triptych-engine-killed") if "rw-s" in entry]
    assert len(mapped) == 2, "the front and the engine see it"
    process.kill()
    await asyncio.to_thread(process.wait)
    engine.lost("the engine process ended")
    events = [event async for event in stream]
    await engine.close()

    assert events[-1].reason is FinishReason.ERROR
    assert open_arenas("triptych-engine-killed") == []


FRONT = """
import asyncio, subprocess, sys
from tests.understand.conftest import SMALL, request_of
from triptych.testing.toy_model import toy_item
from triptych.transfer.shared_memory import SharedSender
from triptych.understand import remote
import msgspec

async def main():
    remote.MIN_SHARED_BYTES = 1
    shared = SharedSender(2**20, name="triptych-front-killed")
    command = [sys.executable, "-m", "triptych.testing.toy_engine_process", sys.argv[1]]
    command += [msgspec.json.encode(SMALL).decode(), str(shared.fd)]
    process = subprocess.Popen(command, pass_fds=(shared.fd,), stdin=subprocess.PIPE)
    engine = remote.RemoteEngine(sys.argv[1], shared)
    await engine.start()
    stream = engine.submit(request_of("r", [1, toy_item(b"x", 9), 2], max_tokens=400))
    await anext(stream)
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_killed_front_leaves_nothing(tmp_path):
    """Killed while the engine reads: the engine ends by itself, and the kernel has freed the arena."""
    before = set(os.listdir("/dev/shm"))
    front = subprocess.Popen(
        [sys.executable, "-c", FRONT, f"ipc://{tmp_path}/engine"],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    engine_pid = int(front.stdout.readline())
    assert open_arenas("triptych-front-killed")

    front.send_signal(signal.SIGKILL)
    front.wait()
    front.stdout.close()
    end_s = time.monotonic() + 30
    while open_arenas("triptych-front-killed") and time.monotonic() < end_s:
        time.sleep(0.1)

    assert open_arenas("triptych-front-killed") == []
    assert not Path(f"/proc/{engine_pid}/maps").exists() or not Path(f"/proc/{engine_pid}/maps").read_text()
    assert set(os.listdir("/dev/shm")) <= before

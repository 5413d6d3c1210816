"""An engine in another process: the same answers over the wire, and a clear end when the process is lost."""

import asyncio
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import zmq

from tests.understand.conftest import SMALL, collect, request_of, run_on
from tests.understand.test_engine import workload
from triptych.core.errors import InternalError, InvalidRequest
from triptych.core.events import FinishReason
from triptych.testing.toy_model import ToyModel, toy_item
from triptych.understand.remote import RemoteEngine
from triptych.understand.wire import pack_request, read_to_engine, unpack_request


@pytest.fixture
def start_process(tmp_path):
    """Starts an engine process for an address; killed at the end whatever happened."""
    processes = []

    def start(address):
        command = [sys.executable, "-m", "triptych.testing.toy_engine_process", address]
        processes.append(subprocess.Popen([*command, msgspec.json.encode(SMALL).decode()]))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


async def test_tokens_cross_the_wire_unchanged(tmp_path, start_process, reference):
    """Requests with media give the same tokens through a process boundary; it ends by itself when closed."""
    address = f"ipc://{tmp_path}/engine"
    engine = RemoteEngine(address)
    process = start_process(address)

    results, stats = await run_on(engine, workload())

    assert [reference(r) for r in workload()] == [results[r.request_id][0] for r in workload()]
    assert stats["num_running"] == 0
    assert await asyncio.to_thread(process.wait, 20) == 0
    assert engine.info == ToyModel().info


async def test_a_lost_process_ends_its_streams(tmp_path, start_process):
    """Kill the engine in mid-stream: the stream gets one final event, later requests get one too."""
    address = f"ipc://{tmp_path}/engine"
    engine = RemoteEngine(address)
    process = start_process(address)
    await engine.start()
    stream = engine.submit(request_of("r", [1, 2], max_tokens=400))
    await anext(stream)
    process.kill()
    await asyncio.to_thread(process.wait)
    engine.lost("the engine process ended")
    events = [event async for event in stream]
    _, late = await collect(engine, request_of("late", [1]))
    with pytest.raises(InternalError, match="ended"):
        await engine.stats()
    await engine.close()

    assert (events[-1].reason, events[-1].error_message) == (FinishReason.ERROR, "the engine process ended")
    assert late.reason is FinishReason.ERROR


async def test_errors_of_questions_come_back_as_themselves(tmp_path, start_process):
    """An unknown cache is the caller's error, on this side of the wire too."""
    address = f"ipc://{tmp_path}/engine"
    engine = RemoteEngine(address)
    start_process(address)
    await engine.start()

    with pytest.raises(InvalidRequest, match="there are: encoder, prefix"):
        await engine.flush("kv")
    assert await engine.flush("encoder") == 0
    await engine.close()


def test_a_header_that_lies_about_its_frames_is_refused():
    """A shape that is not the frame's, or a frame that is not there, raises; nothing is read past the end."""
    header, *frames = pack_request(request_of("r", [1, toy_item(b"x", 3), 2]))
    message = read_to_engine(header)

    with pytest.raises(InternalError, match="bytes for an array"):
        unpack_request(message, [header, bytes(frames[0])[:-4]])
    with pytest.raises(InternalError, match="in frame 1 of 1"):
        unpack_request(message, [header])


def test_request_survives_the_wire():
    """Every field comes back equal, arrays to the bit."""
    request = request_of("r", [1, toy_item(b"x", 3), 2], top_p=0.5, seed=3)

    header, *frames = pack_request(request)
    back = unpack_request(read_to_engine(header), [header, *(zmq.Frame(f).buffer for f in frames)])

    assert np.array_equal(request.items[0].features["patches"], back.items[0].features["patches"])
    assert (request.token_ids, request.spans, request.sampling) == (back.token_ids, back.spans, back.sampling)
    assert (request.items[0].key, request.items[0].batch_key) == (back.items[0].key, back.items[0].batch_key)

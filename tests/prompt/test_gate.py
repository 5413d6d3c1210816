"""The room between decoder and processor: never over its bytes, nobody left behind, small items never behind a film."""

import asyncio
import random
import time

import numpy as np
import pytest

from triptych.core.clock import MonotonicClock
from triptych.core.errors import BudgetExceeded, InvalidMedia, Overloaded
from triptych.core.media import DecodedImage, DecodeSpec, MediaBlob, MediaHeader, Modality
from triptych.models.base import ItemSize, ProcessedItem
from triptych.prompt.gate import ByteGate
from triptych.prompt.processing import ItemProcessor


async def test_room_is_never_exceeded_and_always_given_back():
    """Four hundred items of all sizes, a third of them cancelled at any moment: within bounds, and empty at the end."""
    chance, gate, most, served = random.Random(1), ByteGate(1600), 0, 0

    async def item(num_bytes):
        nonlocal most, served
        async with gate.inside(num_bytes):
            most = max(most, gate.num_bytes)
            await asyncio.sleep(chance.random() * 0.002)
            served += 1

    tasks = [asyncio.create_task(item(chance.choice([1, 50, 100, 101, 700, 1200, 5000]))) for _ in range(400)]
    for task in chance.sample(tasks, 130):
        await asyncio.sleep(chance.random() * 0.002)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert served >= 270
    assert 1000 < most <= 1600
    assert (gate.num_bytes, gate.num_waiting) == (0, 0)


async def test_order_is_kept_and_small_items_pass():
    """Large items enter in their order; small ones have room of their own while a film fills the rest."""
    gate, log, release = ByteGate(1600), [], asyncio.Event()

    async def film():
        async with gate.inside(10_000):
            await release.wait()

    async def item(name, num_bytes):
        async with gate.inside(num_bytes):
            log.append(name)

    held = asyncio.create_task(film())
    await asyncio.sleep(0)
    large = [asyncio.create_task(item(name, size)) for name, size in (("a", 1200), ("b", 200), ("c", 1100))]
    await asyncio.gather(*(item("small", 100) for _ in range(20)))
    assert log == ["small"] * 20
    assert gate.num_waiting == 3
    release.set()
    await asyncio.gather(held, *large)
    assert log[20:] == ["a", "b", "c"]


async def test_cancelled_head_lets_the_next_one_in():
    """A large item that gives up does not keep those behind it waiting."""
    gate, done = ByteGate(1600), asyncio.Event()

    async def item(num_bytes, until):
        async with gate.inside(num_bytes):
            await until.wait()

    first = asyncio.create_task(item(700, done))
    await asyncio.sleep(0)
    head = asyncio.create_task(item(1200, done))
    await asyncio.sleep(0)
    behind = asyncio.create_task(item(200, done))
    await asyncio.sleep(0)
    assert gate.num_waiting == 2
    head.cancel()
    await asyncio.sleep(0.01)
    assert (gate.num_waiting, gate.num_bytes) == (0, 900)
    done.set()
    await asyncio.gather(first, behind)


class SlowLayout:
    """A processor that takes its time."""

    processor_key = b"slow"

    def decode_spec(self, header, options):
        return DecodeSpec()

    def process(self, decoded, options):
        time.sleep(0.01)
        return ProcessedItem(ItemSize(1, 1), {"pixels": np.zeros(1)}, "image")


async def test_decoding_waits_for_a_slow_processor():
    """Forty pictures of 30 MB at once: never more of them decoded than the room holds, and all are served."""
    most = 0
    made = ItemProcessor(SlowLayout(), 10_000, 2, MonotonicClock(), max_decoded_bytes=120_000_000)

    async def decode(blob, spec):
        nonlocal most
        most = max(most, made.stats()["media_decoded_bytes"])
        return DecodedImage(np.zeros((1, 1, 3), np.uint8))

    header = MediaHeader(Modality.IMAGE, "image/png", 1, 4000, 2500)
    blobs = [MediaBlob(header, b"x", bytes([i]) * 32) for i in range(40)]
    done = await asyncio.gather(*(made.process(blob, decode) for blob in blobs))
    made.close()

    assert len(done) == 40
    assert 60_000_000 <= most <= 90_000_000
    assert made.stats()["media_decoded_bytes"] == 0


@pytest.mark.parametrize(
    "error",
    [
        BudgetExceeded("max_decode_s", allowed=1, requested=2, param="first"),
        Overloaded("decode_queue of 2 items is full", retry_after_s=7.0, param="first"),
        InvalidMedia("corrupt", param="first"),
    ],
)
async def test_shared_failure_is_whole_for_each(error):
    """Two requests wait for one item that fails: each is told of its own field, with all that the error holds."""
    made = ItemProcessor(SlowLayout(), 10_000, 2, MonotonicClock())

    async def decode(blob, spec):
        await asyncio.sleep(0.01)
        raise error

    header = MediaHeader(Modality.IMAGE, "image/png", 1, 4, 4)
    jobs = [made.process(MediaBlob(header, b"x", bytes(32), param), decode) for param in ("first", "second")]
    found = await asyncio.gather(*jobs, return_exceptions=True)
    made.close()

    assert [each.param for each in found] == ["first", "second"]
    for each in found:
        assert type(each) is type(error)
        assert {**vars(each), "param": None} == {**vars(error), "param": None}


def test_room_has_a_least_size():
    """A room that no item could enter is a mistake of the configuration."""
    with pytest.raises(ValueError, match="at least 16"):
        ByteGate(3)

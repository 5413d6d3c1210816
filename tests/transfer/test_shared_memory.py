"""Arrays through the arena, both sides in one process; the processes are in `test_processes.py`."""

import gc
import os
import threading

import numpy as np
import pytest

from triptych.core.errors import InternalError
from triptych.transfer.shared_memory import Placed, SharedReceiver, SharedSender, Shipment


@pytest.fixture
def pair():
    sender = SharedSender(2**20)
    released = []

    def release(slot_id):
        released.append(slot_id)
        sender.release(slot_id)

    yield sender, SharedReceiver(os.dup(sender.fd), release), released
    sender.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64", "uint8", "bool"])
def test_an_array_arrives_to_the_bit(pair, dtype):
    """Every dtype of the wire, and one that is not contiguous where it was made."""
    sender, receiver, _ = pair
    array = (np.arange(3 * 5 * 7).reshape(3, 5, 7) % 120).astype(dtype).swapaxes(0, 2)

    back = receiver.open(sender.place(array), dtype, array.shape)

    assert back.dtype == array.dtype
    assert np.array_equal(array, back)


def test_the_last_view_gives_the_slot_back(pair):
    """Not before: a view of a view keeps it, and the bytes with it; the release comes once."""
    sender, receiver, released = pair
    placed = sender.place(np.arange(1000, dtype=np.float32))
    array = receiver.open(placed, "float32", (1000,))
    row = array.reshape(10, 100)[3]
    del array
    gc.collect()
    assert released == []
    assert row[0] == 300.0

    del row
    gc.collect()
    assert released == [placed.slot_id]
    assert sender.stats()["transfer_shared_bytes"] == 0
    assert not sender.release(placed.slot_id)


def test_torch_keeps_it_too(pair):
    """A tensor over the array is a view like any other."""
    torch = pytest.importorskip("torch")
    sender, receiver, released = pair
    tensor = torch.from_numpy(receiver.open(sender.place(np.ones(500, np.float32)), "float32", (500,)))
    gc.collect()
    assert released == []
    assert float(tensor.sum()) == 500.0
    del tensor
    gc.collect()
    assert len(released) == 1


def test_a_wrong_descriptor_reads_nothing(pair):
    """An old generation, another size, a place outside: refused; nothing is given back for them."""
    sender, receiver, released = pair
    old = sender.place(np.zeros(100, np.uint8))
    sender.release(old.slot_id)
    new = sender.place(np.ones(100, np.uint8))
    assert new.offset == old.offset

    for placed, shape in (
        (old, (100,)),
        (new, (99,)),
        (Placed(new.slot_id, new.offset, 200), (200,)),
        (Placed(new.slot_id, 2**20, 100), (100,)),
        (Placed(new.slot_id, -64, 100), (100,)),
    ):
        with pytest.raises(InternalError):
            receiver.open(placed, "uint8", shape)
    with pytest.raises(InternalError):
        receiver.open(new, "object", (100,))
    assert released == []


def test_bytes_are_bounded_and_a_closed_arena_takes_none(pair):
    """What does not fit is refused, and works again when there is room; after `close` nothing is placed."""
    sender, receiver, _ = pair
    big = np.zeros(700_000, np.uint8)
    held = receiver.open(sender.place(big), "uint8", big.shape)
    assert sender.place(big) is None
    del held
    gc.collect()
    placed = sender.place(big)
    assert placed is not None

    sender.close()
    sender.close()
    assert sender.place(big) is None
    assert sender.release(placed.slot_id)
    assert not sender.release(placed.slot_id)


def test_a_message_that_is_not_sent_is_taken_back(pair):
    """All of its slots; small arrays never had one."""
    sender, _, _ = pair
    shipment = Shipment(sender, min_bytes=1000)
    assert shipment.place(np.zeros(999, np.uint8)) is None
    assert shipment.place(np.zeros(2000, np.uint8)) is not None
    assert shipment.place(np.zeros(3000, np.uint8)) is not None

    shipment.undo()
    shipment.undo()
    assert sender.stats()["transfer_shared_bytes"] == 0


def test_threads_share_it(pair):
    """Eight threads place, read and drop a thousand arrays: each reads its own, nothing is left."""
    sender, receiver, released = pair
    wrong = []

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(125):
            array = random.integers(0, 255, int(random.integers(1, 60_000)), dtype=np.uint8)
            placed = sender.place(array)
            if placed is not None and not np.array_equal(receiver.open(placed, "uint8", array.shape), array):
                wrong.append(placed)
        sender.check_integrity()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()

    assert wrong == []
    assert len(released) == len(set(released)) == sender.num_placed
    assert sender.stats()["transfer_shared_bytes"] == 0

"""The bookkeeping of the arena: apart, bounded, given back once."""

from hypothesis import given
from hypothesis import strategies as st

from triptych.transfer.slots import ALIGN_BYTES, Slots


def test_a_slot_is_given_back_once():
    """A second release, and one of an id that never was, change nothing and are counted."""
    slots = Slots(1024)
    slot = slots.reserve(100)
    slots.mark_ready(slot.slot_id)

    assert slots.release(slot.slot_id) == slot
    assert slots.release(slot.slot_id) is None
    assert slots.release(77) is None
    assert (slots.num_reserved_bytes, slots.num_late_releases) == (0, 2)


def test_no_room_is_said_at_once():
    """A full arena gives None, and room again after a release; the same place is another generation."""
    slots = Slots(1024)
    first = slots.reserve(1000)

    assert slots.reserve(64) is None
    slots.release(first.slot_id)
    again = slots.reserve(1000)
    assert again.offset == first.offset
    assert again.slot_id != first.slot_id


@given(st.lists(st.one_of(st.integers(1, 700), st.sampled_from(["oldest", "newest"])), max_size=60))
def test_slots_never_meet(steps):
    """Whatever is reserved and released in whatever order: slots are apart, inside, aligned, and add up."""
    slots, held = Slots(2048), []
    for step in steps:
        if isinstance(step, int):
            slot = slots.reserve(step)
            if slot is not None:
                assert slot.offset % ALIGN_BYTES == 0
                held.append(slot)
        elif held:
            slots.release(held.pop(0 if step == "oldest" else -1).slot_id)
        slots.check_integrity()
    for slot in held:
        slots.release(slot.slot_id)
    assert (len(slots), slots.num_reserved_bytes) == (0, 0)
    assert slots.reserve(2048) is not None

"""The byte-counted LRU: order, pins, generations, and books that add up after any sequence of calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from triptych.cache import ByteLru


def test_oldest_unpinned_goes_first():
    """A lookup renews an entry, so the one not looked up is evicted."""
    cache = ByteLru[str, int](30)
    for key in "abc":
        cache.put(key, 1, 10)
    cache.lookup("a")

    cache.put("d", 1, 10)

    assert list(cache.keys()) == ["c", "a", "d"]
    assert cache.evictions == 1


def test_pinned_entry_outlives_pressure():
    """What is pinned is not evicted; once unpinned it is."""
    cache = ByteLru[str, int](20)
    pin = cache.put_pinned("a", 7, 15)

    assert not cache.put("b", 1, 10)
    cache.unpin(pin)
    assert cache.put("b", 1, 10)
    assert "a" not in cache


def test_refused_put_evicts_nothing():
    """A value that cannot fit costs nobody their entry."""
    cache = ByteLru[str, int](20)
    cache.put("a", 1, 20)

    assert not cache.put("huge", 1, 21)
    assert "a" in cache
    assert cache.evictions == 0


def test_flush_hides_pinned_values_but_counts_their_bytes():
    """After a flush a pinned value can be read through its pin only, and is counted until the pin is gone."""
    cache = ByteLru[str, str](100)
    pin = cache.put_pinned("a", "old", 60)

    assert cache.flush() == 1
    assert cache.lookup("a") is None
    assert pin.value == "old"
    assert cache.num_bytes == 60
    assert not cache.put("a", "new", 50)
    cache.unpin(pin)
    assert cache.num_bytes == 0


def test_value_from_before_a_flush_does_not_enter():
    """Work begun before a flush may not fill the cache after it."""
    cache = ByteLru[str, str](100)
    generation = cache.generation
    cache.flush()

    assert not cache.put("a", "stale", 1, generation=generation)
    assert cache.put("a", "fresh", 1, generation=cache.generation)


def test_hits_count_the_work_they_saved():
    """Each hit adds what the miss had cost."""
    cache = ByteLru[str, int](10)
    cache.lookup("a")
    cache.put("a", 1, 1, cost_ms=12.5)
    cache.lookup("a")
    cache.pin("a")

    assert (cache.hits, cache.misses, cache.saved_ms) == (2, 1, 25.0)
    assert cache.stats("processor")["processor_cache_saved_ms"] == 25.0


def test_peek_leaves_no_trace():
    """Looking at a value without use changes neither order nor counters."""
    cache = ByteLru[str, int](20)
    cache.put("a", 1, 10)
    cache.put("b", 2, 10)

    assert cache.peek("a") == 1
    assert (cache.hits, cache.misses) == (0, 0)
    cache.put("c", 3, 10)
    assert "a" not in cache


def test_double_unpin_is_an_error():
    """A pin is given back once."""
    cache = ByteLru[str, int](10)
    pin = cache.put_pinned("a", 1, 1)
    cache.unpin(pin)

    with pytest.raises(ValueError, match="without a pin"):
        cache.unpin(pin)


@given(st.integers(max_value=-1))
def test_negative_capacity_is_refused(capacity):
    """There is no cache of less than nothing."""
    with pytest.raises(ValueError, match="capacity_bytes"):
        ByteLru(capacity)


class LruMachine(RuleBasedStateMachine):
    """Any sequence of calls keeps the books, the capacity, and every pinned value."""

    @initialize(capacity=st.integers(0, 50))
    def start(self, capacity):
        self.cache = ByteLru[int, object](capacity)
        self.pins = []

    @rule(key=st.integers(0, 6), num_bytes=st.integers(0, 30), pinned=st.booleans())
    def put(self, key, num_bytes, pinned):
        value = object()
        if pinned:
            pin = self.cache.put_pinned(key, value, num_bytes)
            if pin:
                self.pins.append((pin, value))
        elif self.cache.put(key, value, num_bytes):
            assert self.cache.peek(key) is value

    @rule(key=st.integers(0, 6))
    def pin(self, key):
        value = self.cache.peek(key)
        pin = self.cache.pin(key)
        assert (pin is None) == (value is None)
        if pin:
            self.pins.append((pin, value))

    @rule(data=st.data())
    def unpin(self, data):
        if self.pins:
            pin, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
            self.cache.unpin(pin)

    @rule(key=st.integers(0, 6))
    def discard(self, key):
        self.cache.discard(key)

    @rule()
    def flush(self):
        self.cache.flush()
        assert self.cache.num_entries == 0

    @invariant()
    def books_add_up(self):
        self.cache.check_integrity()
        assert all(pin.value is value for pin, value in self.pins)
        if not self.pins:
            assert self.cache._num_pinned_bytes() == 0


TestLruMachine = LruMachine.TestCase

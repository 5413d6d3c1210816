"""Shelves: a byte-counted LRU and single flight. No tensors, no sockets, no clock: the owners bring keys and sizes.

Rule at the door: a miss is never fatal. Whoever finds nothing here computes it again.
"""

from triptych.cache.lru import ByteLru, Pin
from triptych.cache.single_flight import SingleFlight

__all__ = ["ByteLru", "Pin", "SingleFlight"]

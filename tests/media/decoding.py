"""Inspect and decode in one call, as the plane does it, without pool or loop."""

from triptych.core.config import Tier
from triptych.core.media import DecodeSpec, Modality
from triptych.media import decode as decoders
from triptych.media.budget import DecodeGuard, check_decode, check_header


def inspect(data, modality=Modality.IMAGE, tier=None):
    tier = tier or Tier()
    header = decoders.inspect(data, modality, DecodeGuard(tier))
    check_header(header, tier)
    return header


def decode(data, modality=Modality.IMAGE, spec=None, tier=None):
    """The decoded value; generators are run to their end."""
    tier, spec = tier or Tier(), spec or DecodeSpec()
    header = inspect(data, modality, tier)
    check_decode(header, spec, tier)
    steps = decoders.decode(data, header, spec, DecodeGuard(tier))
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def pixels(data, spec=None, tier=None):
    return decode(data, Modality.IMAGE, spec, tier).pixels

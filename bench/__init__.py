"""Measurements, not part of the package: load, peers and the figures they give. Run as `python -m bench.run`."""

"""Understand: image, audio and video in, text out. One engine a model; `engine.py` is the way in.

`schedule/`, `blocks.py`, `block_hash.py`, `encoder_cache.py` and `sequence.py` are pure: no tensor, clock or socket.
"""

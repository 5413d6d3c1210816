"""The scheduler, one file a phase: admit, encode, rows. Pure: values in, values out; the clock is a parameter.

No file here imports torch, reads a clock or opens a socket, so that the simulator runs the real thing.
"""

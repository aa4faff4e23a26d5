"""Benchmarks: ``gpuq bench io``, ``gil``, ``memory``, ``start``, ``idle``.

Each is a function that measures and returns plain figures, and a table of them. What is compared
is interleaved in one run, so that a slow minute of the machine hits all contestants alike.
"""

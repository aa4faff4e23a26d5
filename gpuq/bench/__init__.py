"""Benchmarks: what ``gpuq bench`` measures, each in the module of its name.

Each is a function that measures and returns plain figures, and a table of them. What is compared
is interleaved in one run, so that a slow minute of the machine hits all contestants alike.
"""

"""A program for `gpuq.bench.start`: reads a page of the file named, and prints what that took.

The first completion is asked for by the protocol's plain Python functions, so that it says what
gpuq itself takes; a kernel of the user's own, compiled anew, comes after it.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import gpuq

_PAGE = 4096


def main() -> None:
    """Print seconds: `Loader()`, that and a first completion, then a kernel's first call."""
    began = time.perf_counter()
    with gpuq.Loader(target="cpu") as loader:
        made = time.perf_counter()
        source = loader.open(sys.argv[1])
        destination = loader.register(np.zeros(_PAGE, dtype=np.uint8))
        status = gpuq.pull(loader.queue, source.handle, destination.handle, 0, _PAGE, 0)
        completed = time.perf_counter()
        if status != gpuq.Status.OK:
            raise RuntimeError(f"{sys.argv[1]}: {gpuq.Status(status).name}")
        kernel_seconds = _kernel_seconds(loader, source.handle, destination.handle)
    print(
        json.dumps(
            {
                "loader": made - began,
                "first_completion": completed - began,
                "kernel": kernel_seconds,
            }
        )
    )


def _kernel_seconds(loader: gpuq.Loader, source: int, destination: int) -> float:
    from numba import njit

    kernel = njit(nogil=True)(lambda q, s, d: gpuq.pull(q, s, d, 0, _PAGE, 0))
    began = time.perf_counter()
    status = kernel(loader.queue, source, destination)
    ended = time.perf_counter()
    if status != gpuq.Status.OK:
        raise RuntimeError(gpuq.Status(status).name)
    return ended - began


if __name__ == "__main__":
    main()

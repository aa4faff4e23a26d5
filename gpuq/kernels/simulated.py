"""`gpuq.kernels.cooperation` in Numba's simulator, by the simulator's own barrier and atomics.

The simulator gives a thread its own `cuda` only inside functions that it has wrapped, hence the
decorators. A shared array is known by the line that asks for it, so one line serves one purpose.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda


@cuda.jit(device=True)
def rank() -> Any:
    """Return the number of this thread in its block."""
    index, shape = cuda.threadIdx, cuda.blockDim
    return index.x + shape.x * (index.y + shape.y * index.z)


@cuda.jit(device=True)
def size() -> Any:
    """Return how many threads the block has."""
    return cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z


@cuda.jit(device=True)
def block_index() -> Any:
    """Return the number of this block in the grid."""
    index, shape = cuda.blockIdx, cuda.gridDim
    return index.x + shape.x * (index.y + shape.y * index.z)


@cuda.jit(device=True)
def grid_size() -> Any:
    """Return how many blocks the grid has."""
    return cuda.gridDim.x * cuda.gridDim.y * cuda.gridDim.z


@cuda.jit(device=True)
def barrier() -> None:
    """Wait for all threads of the block."""
    cuda.syncthreads()


@cuda.jit(device=True)
def broadcast(value: Any) -> Any:
    """Return rank 0's value to all threads of the block."""
    shared = cuda.shared.array(1, np.int64)
    if rank() == 0:
        shared[0] = value
    cuda.syncthreads()
    value = int(shared[0])
    cuda.syncthreads()
    return value


@cuda.jit(device=True)
def minimum(value: Any) -> Any:
    """Return the least value of the block's threads to all of them."""
    shared = cuda.shared.array(1, np.int64)
    if rank() == 0:
        shared[0] = value
    cuda.syncthreads()
    cuda.atomic.min(shared, 0, value)
    cuda.syncthreads()
    least = int(shared[0])
    cuda.syncthreads()
    return least

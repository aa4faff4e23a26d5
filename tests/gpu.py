"""What the tests on a GPU share: why they are skipped, kernel bodies, and arrays.

They need a GPU and the cuda12 or cuda13 extra, nothing else: ``python -m pytest -m gpu``. With
GPUQ_REHEARSE=1 those run on the CPU target that use no CUDA of their own, to find the tests' own
mistakes where there is no GPU.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest

import gpuq
from gpuq.compiling import SIMULATED
from gpuq.ordering import as_word, clock_ns, load_acquire, store_release

IS_REHEARSAL = os.environ.get("GPUQ_REHEARSE") == "1"
TARGET = "cpu" if IS_REHEARSAL else "cuda"
LONG_NS = 30_000_000_000
"""Bound of what a kernel of a test waits for, in nanoseconds."""

TIMED_OUT = int(gpuq.Status.TIMED_OUT)


@functools.cache
def refusal() -> str:
    """Say why the tests on a GPU cannot run here; empty where they can."""
    if SIMULATED:
        return "NUMBA_ENABLE_CUDASIM=1 replaces CUDA by the simulator"
    from gpuq.host.cuda_device import CudaDevice

    try:
        CudaDevice().close()
    except gpuq.TargetUnavailableError as error:
        return f"no usable GPU: {error}"
    return ""


def needs_gpu() -> list[Any]:
    """Return the marks of a module that needs a GPU."""
    reason = "" if IS_REHEARSAL else refusal()
    return [pytest.mark.gpu, pytest.mark.skipif(bool(reason), reason=reason)]


def open_loader(**given: Any) -> gpuq.Loader:
    """Make a loader for the target of these tests."""
    return gpuq.Loader(target=TARGET, **given)


def put(loader: gpuq.Loader, content: Any) -> Any:
    """Return a copy of an array where kernels reach it."""
    host = np.ascontiguousarray(content)
    array = loader.empty(host.shape, host.dtype)
    if hasattr(array, "set"):
        array.set(host)
    else:
        array[...] = host
    return array


def get(array: Any) -> Any:
    """Return a NumPy array with the content of one on the GPU."""
    for name in ("copy_to_host", "get"):  # Numba, CuPy
        if hasattr(array, name) and not isinstance(array, np.ndarray):
            return np.asarray(getattr(array, name)())
    if hasattr(array, "cpu"):  # torch
        import torch

        return array.contiguous().view(torch.uint8).cpu().numpy()
    return np.asarray(array)


def mapped(loader: gpuq.Loader, count: int) -> tuple[Any, Any]:
    """Return zeroed words that the host and kernels reach: (host's view, kernels')."""
    return loader._service.device.mapped_words(count)


# --- kernel bodies, for `Loader.launch` --------------------------------------------------------


def pull_rows(index, size, q, source, destination, rows, statuses):
    """Pull rows of (start, end, offset), each worker every `size`-th."""
    for row in range(index, len(rows), size):
        statuses[row] = gpuq.pull_at(
            q, source, destination, rows[row, 2], rows[row, 0], rows[row, 1], row
        )


def pull_again(index, size, q, source, destination, times, statuses):
    """Pull the same 8 bytes again and again; the last status, or the first that is not OK."""
    status = 0
    for turn in range(times):
        if status == 0:
            status = gpuq.pull_at(q, source, destination, 8 * index, 8 * index, 8 * index + 8, turn)
    statuses[index] = status


RUNNING, STOP = 0, 8  # on lines of their own


def pull_until_told(index, size, q, source, destination, words, answers):
    """Pull until the host says stop; answers: status, how many pulls."""
    store_release(words, RUNNING, as_word(1))
    deadline = clock_ns() + LONG_NS
    status = 0
    pulls = 0
    while status == 0 and load_acquire(words, STOP) == as_word(0):
        status = gpuq.pull(q, source, destination, 0, 4096, pulls)
        pulls += 1
        if clock_ns() >= deadline:
            status = TIMED_OUT
    answers[1] = pulls
    answers[0] = status


def pull_until_refused(index, size, q, source, destination, words, statuses):
    """Pull until a status is not OK; the host aborts the queue to end it."""
    status = 0
    turn = 0
    while status == 0:
        status = gpuq.pull_at(q, source, destination, 8 * index, 0, 8, turn)
        turn += 1
        if index == 0:
            store_release(words, RUNNING, as_word(turn))
    statuses[index] = status


def wait_in_steps(index, size, q, source, destination, words, statuses):
    """Wait in short steps; say how many were too short while that goes on."""
    ticket = gpuq.post(q, source, destination, 0, 4096, 0)
    steps = 0
    status = TIMED_OUT
    while status == TIMED_OUT:
        status = gpuq.wait_for(q, ticket, 100_000)
        steps += 1
        store_release(words, RUNNING, as_word(steps))
    statuses[0] = status


def time_round_trips(index, size, q, source, destination, nbytes, times_ns, statuses):
    """Pull `nbytes` again and again, one at a time, and note how long each took."""
    for turn in range(len(times_ns)):
        begin = clock_ns()
        status = gpuq.pull(q, source, destination, 0, nbytes, turn)
        times_ns[turn] = clock_ns() - begin
        if status != 0:
            statuses[0] = status


# --- scopes: `tile` is the destination, and the threads of a block add up its bytes --------------


SLICE = 4096


def by_block(index, size, q, source, destination, tile, sums, statuses):
    """`pull_block_at`."""
    rank, width, start = gpuq.block_rank(), gpuq.block_size(), index * SLICE
    statuses[index, rank] = gpuq.pull_block_at(
        q, source, destination, start, start, start + SLICE, index
    )
    total = 0
    for position in range(rank, SLICE, width):
        total += tile[start + position]
    sums[index, rank] = total


def by_ticket(index, size, q, source, destination, tile, sums, statuses):
    """`post_block_at` and `wait_block`."""
    rank, width, start = gpuq.block_rank(), gpuq.block_size(), index * SLICE
    ticket = gpuq.post_block_at(q, source, destination, start, start, start + SLICE, index)
    statuses[index, rank] = gpuq.wait_block(q, ticket)
    total = 0
    for position in range(rank, SLICE, width):
        total += tile[start + position]
    sums[index, rank] = total


def by_counter(index, size, q, source, destination, tile, sums, statuses):
    """`post_counted_at` by each thread, and one `wait_counter_block`; counter = block."""
    rank, width, start = gpuq.block_rank(), gpuq.block_size(), index * SLICE
    share = SLICE // width
    first = start + rank * share
    last = start + SLICE if rank == width - 1 else first + share
    gpuq.post_counted_at(q, index, source, destination, first, first, last, rank)
    gpuq.block_barrier()
    statuses[index, rank] = gpuq.wait_counter_block(q, index, width)
    total = 0
    for position in range(rank, SLICE, width):
        total += tile[start + position]
    sums[index, rank] = total


def by_warp(index, size, q, source, destination, tile, sums, statuses):
    """`pull_warp_at`: each warp one half of its slice, even lanes apart from odd ones.

    All lanes of a warp add up what their own set of lanes pulled.
    """
    rank, width = gpuq.block_rank(), gpuq.block_size()
    warps = (width + 31) // 32
    half = SLICE // 2
    start = (index * warps + rank // 32) * SLICE
    if rank % 2 == 0:
        status = gpuq.pull_warp_at(q, source, destination, start, start, start + half, rank)
    else:
        start += half
        status = gpuq.pull_warp_at(q, source, destination, start, start, start + half, rank)
    statuses[index, rank] = status
    total = 0
    for position in range(half):
        total += tile[start + position]
    sums[index, rank] = total

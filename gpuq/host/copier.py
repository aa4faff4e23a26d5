"""The contract of a copier, what moves staging to a destination, and its two implementations.

A copier is a NamedTuple, and these two functions are implemented for its type. They are compiled
and called by the poller alone, once to start a lease's copy and then until it was seen complete.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from gpuq.compiling import contract, implements
from gpuq.host.driver import (
    EVENT_QUERY,
    EVENT_RECORD,
    INVALID_VALUE,
    MEMCPY_HTOD_ASYNC,
    NOT_READY,
    OUT_OF_MEMORY,
    SUCCESS,
    DriverTable,
    call_driver,
)
from gpuq.host.libc import copy_memory

# Where a destination is.
HOST_MEMORY = 0
DEVICE_MEMORY = 1

# How a copy stands.
COPY_DONE = 1
COPY_UNDER_WAY = 0
COPY_FAILED = -1
"""Nothing was started, or what was started is known to be over; the buffer may be used again."""
COPY_UNCERTAIN = -2
"""The copy may still read the buffer; it must not be used again and the queue must end."""


# Positions in a CUDA copier's words.
_REFUSED = 0
_FATAL = 1


@contract
def start_copy(
    copier: Any, lease: Any, kind: Any, destination: Any, source: Any, nbytes: Any
) -> Any:
    """Start the copy of a lease's bytes between two addresses; return one of the COPY codes.

    `kind` says where the destination is: HOST_MEMORY or DEVICE_MEMORY.
    """
    raise NotImplementedError


@contract
def look_at_copy(copier: Any, lease: Any) -> Any:
    """Say how the copy that a lease started stands; return one of the COPY codes."""
    raise NotImplementedError


class MemcpyCopier(NamedTuple):
    """Copies in host memory, at once.

    Attributes
    ----------
    unused : int
        A NamedTuple without a field is no Numba type.
    """

    unused: int = 0


@implements(start_copy, MemcpyCopier)
def _start_memcpy(
    copier: Any, lease: Any, kind: Any, destination: Any, source: Any, nbytes: Any
) -> Any:
    copy_memory(destination, source, nbytes)
    return COPY_DONE


@implements(look_at_copy, MemcpyCopier)
def _look_at_memcpy(copier: Any, lease: Any) -> Any:
    return COPY_DONE


class CudaCopier(NamedTuple):
    """Copies to device memory on one non-blocking stream, with an event for each lease.

    An event is recorded behind its own lease's copy and recorded again only after it was
    observed complete, which the lease's phases enforce. None of the calls can block on a running
    kernel: the staging memory is pinned and the stream non-blocking (CUDA Driver API, "API
    synchronization behavior"; cuEventQuery never waits).

    Attributes
    ----------
    addresses : array of int64
        Of the driver's functions, by the positions in `gpuq.host.driver`.
    events : array of int64
        A CUevent for each lease.
    words : array of int64, shape (2,)
        The last CUresult that refused a copy, and the one that ended the queue; 0 for none.
    stream : int
        A CUstream.
    """

    addresses: Any
    events: Any
    words: Any
    stream: int


def make_cuda_copier(table: DriverTable, stream: int, events: list[int]) -> CudaCopier:
    """Build a copier over a driver table, a stream and an event for each lease."""
    return CudaCopier(
        addresses=np.array(table, dtype=np.int64),
        events=np.array(events, dtype=np.int64),
        words=np.zeros(2, dtype=np.int64),
        stream=stream,
    )


def describe_failure(copier: Any, number: int) -> str:
    """Say why a poller ended with an errno: by its copier, else by its reader."""
    if isinstance(copier, CudaCopier) and copier.words[_FATAL] != SUCCESS:
        return f"the CUDA driver failed under a copy: CUresult {int(copier.words[_FATAL])}"
    return f"the reader failed: {os.strerror(number)}"


@implements(start_copy, CudaCopier)
def _start_cuda(
    copier: Any, lease: Any, kind: Any, destination: Any, source: Any, nbytes: Any
) -> Any:
    if kind == HOST_MEMORY:
        copy_memory(destination, source, nbytes)
        return COPY_DONE
    stream = copier.stream
    address = copier.addresses[MEMCPY_HTOD_ASYNC]
    result = call_driver(address, destination, source, nbytes, stream)
    if result == INVALID_VALUE or result == OUT_OF_MEMORY:
        # Said of the arguments, before anything starts.
        copier.words[_REFUSED] = result
        return COPY_FAILED
    if result != SUCCESS:
        # It may be an earlier error of the context, and then nobody knows what the copy engine
        # still does.
        copier.words[_FATAL] = result
        return COPY_UNCERTAIN
    result = call_driver(copier.addresses[EVENT_RECORD], copier.events[lease], stream, 0, 0)
    if result != SUCCESS:
        copier.words[_FATAL] = result
        return COPY_UNCERTAIN
    return COPY_UNDER_WAY


@implements(look_at_copy, CudaCopier)
def _look_at_cuda(copier: Any, lease: Any) -> Any:
    result = call_driver(copier.addresses[EVENT_QUERY], copier.events[lease], 0, 0, 0)
    if result == SUCCESS:
        return COPY_DONE
    if result == NOT_READY:
        return COPY_UNDER_WAY
    copier.words[_FATAL] = result
    return COPY_UNCERTAIN

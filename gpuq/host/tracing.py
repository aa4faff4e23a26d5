"""One record for each request: when it was admitted, read, copied and completed, and how.

The ring has one writer, the poller, and one reader at a time, whoever calls `take_records`. What
finds no room is counted and dropped, so what was not taken yet is never overwritten. Without a
ring nothing is stamped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuq.compiling import inlined
from gpuq.host.records import (
    ADMITTED_NS,
    ASKED_END,
    ASKED_START,
    COPY_NS,
    DESTINATION_HANDLE,
    ERRNO,
    FIRST_READ_NS,
    LAST_READ_NS,
    PATH,
    READ_COUNT,
    REQUEST_TAG,
    SOURCE_HANDLE,
    STATISTICS_TRACE_LOST,
    STATISTICS_TRACED,
    STATUS,
    TICKET,
    Poller,
    count,
)
from gpuq.layout import TRACE_TAKEN, Status
from gpuq.ordering import as_signed, as_word, clock_ns, load_acquire, store_release

# How a request's bytes came; a request of many pieces, or one that was read again, has more.
BY_DIRECT_READ = 1
BY_BUFFERED_READ = 2
BY_NEIGHBOURS_READ = 4
READ_ON = 8  # after a short read, an interruption, or a failed read for neighbours
FELL_BACK = 16  # from O_DIRECT, which was refused
WENT_STRAIGHT = 32  # some were read straight into the destination, without staging

FIELDS = (
    "ticket",
    "tag",
    "source",
    "destination",
    "start",
    "end",
    "admitted_ns",
    "first_read_ns",
    "last_read_ns",
    "copy_ns",
    "completed_ns",
    "bytes",
    "reads",
    "status",
    "errno",
    "path",
)
TRACE_DTYPE = np.dtype([(name, np.int64) for name in FIELDS])
"""A record. Times are of one monotonic clock, in nanoseconds; 0 where a step did not happen.

``first_read_ns`` is the submission of its first read, ``last_read_ns`` the arrival of its last,
``copy_ns`` the start of its last copy. ``bytes`` reached the destination. ``path`` is made of
BY_DIRECT_READ and its kind.
"""

_OK = int(Status.OK)


@inlined
def trace_admission(p: Any, request: Any) -> None:
    """Stamp a request that was taken from its slot."""
    if len(p.trace) > 0:
        request[ADMITTED_NS] = clock_ns()
        request[FIRST_READ_NS] = 0
        request[LAST_READ_NS] = 0
        request[COPY_NS] = 0
        request[READ_COUNT] = 0
        request[PATH] = 0


@inlined
def trace_question(
    p: Any, request: Any, tag: Any, source: Any, destination: Any, start: Any, end: Any
) -> None:
    """Note what a submission says, good or bad."""
    if len(p.trace) > 0:
        request[REQUEST_TAG] = tag
        request[SOURCE_HANDLE] = source
        request[DESTINATION_HANDLE] = destination
        request[ASKED_START] = start
        request[ASKED_END] = end


@inlined
def trace_read(p: Any, request: Any, is_direct: Any, is_straight: Any) -> None:
    """Stamp the submission of a read."""
    if len(p.trace) > 0:
        if request[FIRST_READ_NS] == 0:
            request[FIRST_READ_NS] = clock_ns()
        request[READ_COUNT] += 1
        request[PATH] |= BY_DIRECT_READ if is_direct == 1 else BY_BUFFERED_READ
        request[PATH] |= WENT_STRAIGHT if is_straight == 1 else 0


@inlined
def trace_loan(p: Any, request: Any) -> None:
    """Stamp that a neighbour's read will bring a request's bytes, too."""
    if len(p.trace) > 0:
        request[FIRST_READ_NS] = clock_ns()
        request[PATH] |= BY_NEIGHBOURS_READ


@inlined
def trace_arrival(p: Any, request: Any) -> None:
    """Stamp the end of a read."""
    if len(p.trace) > 0:
        request[LAST_READ_NS] = clock_ns()


@inlined
def trace_copy(p: Any, request: Any) -> None:
    """Stamp the start of a copy."""
    if len(p.trace) > 0:
        request[COPY_NS] = clock_ns()


@inlined
def trace_turn(p: Any, request: Any, flag: Any) -> None:
    """Note READ_ON or FELL_BACK, or take back that a neighbour's read brings the bytes."""
    if len(p.trace) > 0:
        request[PATH] = (request[PATH] & ~BY_NEIGHBOURS_READ) | flag


@inlined
def trace_completion(p: Any, request: Any) -> None:
    """Write the record of a request that is about to be answered."""
    size = len(p.trace)
    if size == 0:
        return
    number = p.statistics[STATISTICS_TRACED]
    # Pairs with the release in `take_records`: what stands there was taken.
    if number - as_signed(load_acquire(p.control, TRACE_TAKEN)) == size:
        count(p, STATISTICS_TRACE_LOST, 1)
        return
    record = p.trace[number % size]
    is_ok = request[STATUS] == _OK
    record[0] = request[TICKET]
    record[1] = request[REQUEST_TAG]
    record[2] = request[SOURCE_HANDLE]
    record[3] = request[DESTINATION_HANDLE]
    record[4] = request[ASKED_START]
    record[5] = request[ASKED_END]
    record[6] = request[ADMITTED_NS]
    record[7] = request[FIRST_READ_NS]
    record[8] = request[LAST_READ_NS]
    record[9] = request[COPY_NS]
    record[10] = clock_ns()
    record[11] = request[ASKED_END] - request[ASKED_START] if is_ok else 0
    record[12] = request[READ_COUNT]
    record[13] = request[STATUS]
    record[14] = request[ERRNO]
    record[15] = request[PATH]
    # `count` releases: whoever acquires the number sees the record.
    count(p, STATISTICS_TRACED, 1)


def take_records(p: Poller) -> Any:
    """Take all records that are in the ring; one caller at a time.

    Returns
    -------
    array of TRACE_DTYPE
    """
    size = len(p.trace)
    last = int(load_acquire(p.statistics, STATISTICS_TRACED))
    first = as_signed(load_acquire(p.control, TRACE_TAKEN))
    taken = p.trace[np.arange(first, last) % size] if last > first else p.trace[:0].copy()
    store_release(p.control, TRACE_TAKEN, as_word(last))
    return taken.view(TRACE_DTYPE).reshape(-1)

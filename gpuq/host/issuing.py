"""From a request to reads: its pieces, a lease for each, in turn with all other requests."""

from __future__ import annotations

from typing import Any

from gpuq.compiling import inlined
from gpuq.host.completion import complete_if_over
from gpuq.host.direct_file import span_bytes, span_start
from gpuq.host.reader import flush_reads, submit_read
from gpuq.host.records import (
    BEGIN,
    DESTINATION_BASE,
    FAILURE,
    FINISH,
    NEXT,
    PIECES,
    QUEUE_COUNT,
    QUEUE_HEAD,
    QUEUED,
    READS,
    SOURCE_BASE,
    STATISTICS_READS,
    STATUS,
    TARGET_ADDRESS,
    access,
    count,
    end_queue,
)
from gpuq.host.staging import (
    DESCRIPTOR,
    FILLED,
    INTERRUPTIONS,
    LEASE_ALIGNMENT,
    LEASE_IS_DIRECT,
    LEASE_SLOT,
    RESUMED,
    SKIP,
    SPAN_BYTES,
    SPAN_START,
    TO,
    TO_KIND,
    WANTED,
    buffer_address,
    take,
)
from gpuq.host.tables import IS_DIRECT, KIND
from gpuq.layout import State, Status

_OK = int(Status.OK)
_ABORTED = int(State.ABORTED)


@inlined
def enqueue(p: Any, slot: Any) -> None:
    """Put a request behind all others that have pieces left to issue."""
    cursor = p.cursor
    p.queue[(cursor[QUEUE_HEAD] + cursor[QUEUE_COUNT]) & (p.capacity - 1)] = slot
    cursor[QUEUE_COUNT] += 1
    p.requests[slot, QUEUED] = 1


@inlined
def issue(p: Any) -> Any:
    """Start a piece of each request in turn, while leases are free; return how many."""
    cursor = p.cursor
    issued = 0
    while cursor[QUEUE_COUNT] > 0:
        slot = p.queue[cursor[QUEUE_HEAD]]
        request = p.requests[slot]
        if request[STATUS] == _OK:
            lease = take(p.staging)
            if lease < 0:
                break
            issue_piece(p, slot, lease)
            issued += 1
            if issued & (issued - 1) == 0:
                # The 1st, 2nd, 4th, 8th, ...: the storage starts on the first while the rest are
                # prepared. One hand-over of all would leave it idle meanwhile.
                hand_over(p)
        cursor[QUEUE_HEAD] = (cursor[QUEUE_HEAD] + 1) & (p.capacity - 1)
        cursor[QUEUE_COUNT] -= 1
        request[QUEUED] = 0
        if request[STATUS] == _OK and request[NEXT] < request[FINISH]:
            enqueue(p, slot)
        else:
            # Failed meanwhile with no piece left in flight; else its last piece completes it.
            complete_if_over(p, slot)
    return issued


@inlined
def hand_over(p: Any) -> None:
    """Hand the submitted reads to the reader; one that refuses ends the queue."""
    failure = flush_reads(p.reader)
    if failure != 0:
        p.cursor[FAILURE] = failure
        end_queue(p, _ABORTED)


@inlined
def issue_piece(p: Any, slot: Any, lease: Any) -> None:
    """Read the next piece of a request into a lease's buffer."""
    request = p.requests[slot]
    source_base = request[SOURCE_BASE]
    alignment, descriptor = access(p, source_base)
    start = request[NEXT]
    begin = span_start(start, alignment)
    length = span_bytes(start, request[FINISH], alignment, p.staging.buffer_bytes)
    stop = min(begin + length, request[FINISH])

    record = p.staging.leases[lease]
    record[LEASE_SLOT] = slot
    record[DESCRIPTOR] = descriptor
    record[LEASE_IS_DIRECT] = p.sources[source_base + IS_DIRECT]
    record[LEASE_ALIGNMENT] = alignment
    record[SPAN_START] = begin
    record[SPAN_BYTES] = length
    record[SKIP] = start - begin
    record[WANTED] = stop - start
    record[FILLED] = 0
    record[INTERRUPTIONS] = 0
    record[TO] = request[TARGET_ADDRESS] + (start - request[BEGIN])
    record[TO_KIND] = p.destinations[request[DESTINATION_BASE] + KIND]
    request[NEXT] = stop
    request[PIECES] += 1
    read_from(p, lease, 0)


@inlined
def read_from(p: Any, lease: Any, resumed: Any) -> None:
    """Submit the read of a lease's span from `resumed` bytes behind its begin."""
    record = p.staging.leases[lease]
    record[RESUMED] = resumed
    submit_read(
        p.reader,
        lease,
        record[DESCRIPTOR],
        record[SPAN_START] + resumed,
        buffer_address(p.staging, lease) + resumed,
        record[SPAN_BYTES] - resumed,
    )
    p.cursor[READS] += 1
    count(p, STATISTICS_READS, 1)

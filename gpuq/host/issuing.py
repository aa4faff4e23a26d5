"""From a request to reads: its pieces, a lease for each, in turn with all other requests."""

from __future__ import annotations

from typing import Any

from gpuq.compiling import inlined
from gpuq.host.completion import complete_if_over
from gpuq.host.direct_file import span_bytes, span_start, straight_bytes
from gpuq.host.reader import flush_reads, submit_read
from gpuq.host.records import (
    BEGIN,
    DESTINATION_BASE,
    FAILURE,
    FINISH,
    LOT,
    MAY_GO_STRAIGHT,
    NEXT,
    PIECES,
    QUEUE_COUNT,
    QUEUE_HEAD,
    QUEUED,
    READ_BYTES,
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
    BORROWERS,
    DESCRIPTOR,
    FILLED,
    INTERRUPTIONS,
    INTO,
    IS_STRAIGHT,
    LEASE_ALIGNMENT,
    LEASE_IS_DIRECT,
    LEASE_SLOT,
    NEEDED,
    RESUMED,
    SKIP,
    SPAN_BYTES,
    SPAN_START,
    TO,
    TO_KIND,
    WANTED,
    borrow,
    buffer_address,
    take,
)
from gpuq.host.tables import IS_DIRECT, KIND
from gpuq.host.tracing import trace_loan, trace_read
from gpuq.layout import State, Status

_OK = int(Status.OK)
_ABORTED = int(State.ABORTED)

_MOST_PIECES = 16
_MOST_BYTES = 8 << 20
_LOOK_AHEAD = 8
"""Requests behind the first that may be none of its neighbours, until no more are looked at."""
_MOST_BORROWERS = 63


@inlined
def enqueue(p: Any, slot: Any) -> None:
    """Put a request behind all others that have pieces left to issue."""
    cursor = p.cursor
    p.queue[(cursor[QUEUE_HEAD] + cursor[QUEUE_COUNT]) & (p.capacity - 1)] = slot
    cursor[QUEUE_COUNT] += 1
    p.requests[slot, QUEUED] = 1


@inlined
def issue(p: Any) -> Any:
    """Start a piece of each request in turn, while leases are free; return how many.

    A request has only so many pieces in flight as keep the storage busy. One that took all
    leases would have a small one wait for a lease, and behind all its reads.
    """
    cursor = p.cursor
    most = most_pieces(p)
    issued = 0
    at_most = 0
    while cursor[QUEUE_COUNT] > at_most:
        slot = p.queue[cursor[QUEUE_HEAD]]
        request = p.requests[slot]
        if request[STATUS] == _OK and has_enough(p, request, most):
            move_to_back(p)
            at_most += 1
            continue
        if request[STATUS] == _OK:
            lease = take(p.staging)
            if lease < 0:
                break
            issue_piece(p, slot, lease)
            issued += 1
            cursor[LOT] += 1
            if cursor[LOT] & (cursor[LOT] - 1) == 0:
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
def most_pieces(p: Any) -> Any:
    """Return how many pieces of one request may be in flight: never all that there can be."""
    buffers = len(p.staging.free)
    most = max(_MOST_PIECES, _MOST_BYTES // p.staging.buffer_bytes)
    return min(most, buffers - 1 if buffers > 2 else buffers)


@inlined
def has_enough(p: Any, request: Any, most: Any) -> Any:
    """Say whether so much is in flight that a request with more pieces waits for some of it.

    Staged pieces are bounded by the buffers. What goes straight needs a lease but none of their
    memory, so its bytes are: those of one request, and those of all together. A request that has
    nothing in flight only waits for a lease, in its turn.
    """
    if request[PIECES] >= most:
        return True
    if request[MAY_GO_STRAIGHT] == 0 or request[PIECES] == 0:
        return False
    if p.sources[request[SOURCE_BASE] + IS_DIRECT] == 0:
        return True  # the system reads less far ahead of two pieces at once than of one
    return request[PIECES] * p.longest_straight >= max(
        _MOST_BYTES, 2 * p.longest_straight
    ) or is_much_in_flight(p)


@inlined
def is_much_in_flight(p: Any) -> Any:
    """Say whether reads in flight bring as much as all staging buffers hold."""
    return p.cursor[READ_BYTES] >= len(p.staging.free) * p.staging.buffer_bytes


@inlined
def move_to_back(p: Any) -> None:
    """Move the request at the head of the ring behind all others."""
    cursor = p.cursor
    head = cursor[QUEUE_HEAD]
    back = (head + cursor[QUEUE_COUNT]) & (p.capacity - 1)
    p.queue[back] = p.queue[head]
    cursor[QUEUE_HEAD] = (head + 1) & (p.capacity - 1)


@inlined
def hand_over(p: Any) -> None:
    """Hand the submitted reads to the reader; one that refuses ends the queue."""
    failure = flush_reads(p.reader)
    if failure != 0:
        p.cursor[FAILURE] = failure
        end_queue(p, _ABORTED)


@inlined
def issue_piece(p: Any, slot: Any, lease: Any) -> None:
    """Read the next piece of a request into a lease's buffer, and what neighbours want with it."""
    request, record = p.requests[slot], p.staging.leases[lease]
    assign_piece(p, slot, lease, straight_from(p, request))
    if record[IS_STRAIGHT] == 0 and record[WANTED] == request[FINISH] - request[BEGIN]:
        join_neighbours(p, lease)
    read_from(p, lease, 0)


@inlined
def join_neighbours(p: Any, lease: Any) -> None:
    """Let requests that stand just behind in the ring borrow from a lease's read.

    One read that brings what many want spares the others. Only whole requests are joined, and
    only where the read covers no byte that their own reads would not.
    """
    cursor, record = p.cursor, p.staging.leases[lease]
    most = min(p.merge_bytes, p.staging.buffer_bytes)
    if most == 0:
        return
    place = 1
    passed_over = 0
    while (
        place < cursor[QUEUE_COUNT]
        and passed_over < _LOOK_AHEAD
        and record[BORROWERS] < _MOST_BORROWERS
    ):
        slot = p.queue[(cursor[QUEUE_HEAD] + place) & (p.capacity - 1)]
        if not is_neighbour(p, record, slot, most):
            place += 1
            passed_over += 1
            continue
        borrower = take(p.staging)
        if borrower < 0:
            return
        assign_piece(p, slot, borrower, 0)
        borrow(p.staging, borrower, lease)
        joined = p.staging.leases[borrower]
        ahead = joined[SPAN_START] - record[SPAN_START]
        record[SPAN_BYTES] = max(record[SPAN_BYTES], ahead + joined[SPAN_BYTES])
        record[NEEDED] = max(record[NEEDED], ahead + joined[NEEDED])
        trace_loan(p, p.requests[slot])
        take_out(p, place)


@inlined
def is_neighbour(p: Any, record: Any, slot: Any, most: Any) -> Any:
    """Say whether a request begins in or just behind a lease's span and fits in `most` bytes."""
    request = p.requests[slot]
    if (
        request[STATUS] != _OK
        or request[NEXT] != request[BEGIN]
        or request[SOURCE_BASE] != p.requests[record[LEASE_SLOT], SOURCE_BASE]
    ):
        return False
    alignment = record[LEASE_ALIGNMENT]
    ahead = span_start(request[BEGIN], alignment) - record[SPAN_START]
    if ahead < 0 or ahead > record[SPAN_BYTES] or ahead >= most:
        return False
    # Asked for one block more than there may be, it tells whether the request ends within them.
    room = most - ahead + alignment
    return ahead + span_bytes(request[BEGIN], request[FINISH], alignment, room) <= most


@inlined
def take_out(p: Any, place: Any) -> None:
    """Take the request at a place behind the first one out of the ring."""
    cursor = p.cursor
    head, mask = cursor[QUEUE_HEAD], p.capacity - 1
    p.requests[p.queue[(head + place) & mask], QUEUED] = 0
    for i in range(place, 0, -1):
        p.queue[(head + i) & mask] = p.queue[(head + i - 1) & mask]
    cursor[QUEUE_HEAD] = (head + 1) & mask
    cursor[QUEUE_COUNT] -= 1


@inlined
def straight_from(p: Any, request: Any) -> Any:
    """Return how many bytes of a request, from NEXT on, are read straight into the destination.

    0: what is left is staged; less than 0: so many bytes are staged before some go straight.
    Only whole blocks go straight, so no byte beside the request's own is ever written.
    """
    if request[MAY_GO_STRAIGHT] == 0:
        return 0
    alignment, _ = access(p, request[SOURCE_BASE])
    most = p.staging.buffer_bytes if is_much_in_flight(p) else longest(p, request[SOURCE_BASE])
    return straight_bytes(
        request[NEXT],
        request[FINISH],
        request[TARGET_ADDRESS] + request[NEXT] - request[BEGIN],
        alignment,
        p.straight_bytes,
        most,
    )


@inlined
def longest(p: Any, source_base: Any) -> Any:
    """Return how much of a source is read straight at once."""
    if p.sources[source_base + IS_DIRECT] != 0:
        return p.longest_straight
    return p.longest_buffered


@inlined
def assign_piece(p: Any, slot: Any, lease: Any, straight: Any) -> None:
    """Write the next piece of a request, as `straight_from` says, into a lease's record."""
    request = p.requests[slot]
    source_base = request[SOURCE_BASE]
    alignment, descriptor = access(p, source_base)
    start = request[NEXT]
    begin = span_start(start, alignment)
    # Before a piece that goes straight, a staged one ends at the next block.
    finish = request[FINISH] if straight == 0 else start + abs(straight)
    # What goes straight is whole blocks, and no more than `straight_from` allows.
    length = (
        straight if straight > 0 else span_bytes(start, finish, alignment, p.staging.buffer_bytes)
    )
    stop = min(begin + length, finish)

    record = p.staging.leases[lease]
    record[LEASE_SLOT] = slot
    record[DESCRIPTOR] = descriptor
    record[LEASE_IS_DIRECT] = p.sources[source_base + IS_DIRECT]
    record[LEASE_ALIGNMENT] = alignment
    record[SPAN_START] = begin
    record[SPAN_BYTES] = length
    record[SKIP] = start - begin
    record[WANTED] = stop - start
    record[NEEDED] = record[SKIP] + record[WANTED]
    record[FILLED] = 0
    record[INTERRUPTIONS] = 0
    record[TO] = request[TARGET_ADDRESS] + (start - request[BEGIN])
    record[IS_STRAIGHT] = 1 if straight > 0 else 0
    record[INTO] = record[TO] if straight > 0 else buffer_address(p.staging, lease)
    record[TO_KIND] = p.destinations[request[DESTINATION_BASE] + KIND]
    request[NEXT] = stop
    request[PIECES] += 1


@inlined
def read_from(p: Any, lease: Any, resumed: Any) -> None:
    """Submit the read of a lease's span from `resumed` bytes behind its begin."""
    record = p.staging.leases[lease]
    record[RESUMED] = resumed
    request = p.requests[record[LEASE_SLOT]]
    trace_read(p, request, record[LEASE_IS_DIRECT], record[IS_STRAIGHT])
    submit_read(
        p.reader,
        lease,
        record[DESCRIPTOR],
        record[SPAN_START] + resumed,
        record[INTO] + resumed,
        record[SPAN_BYTES] - resumed,
    )
    p.cursor[READS] += 1
    p.cursor[READ_BYTES] += record[SPAN_BYTES] - resumed
    count(p, STATISTICS_READS, 1)

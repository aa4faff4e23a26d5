"""The end of a request: its pieces given back, its answer counted, its completion flag stored."""

from __future__ import annotations

from typing import Any

from gpuq.compiling import inlined
from gpuq.host.records import (
    ACTIVE,
    COUNTER,
    DESTINATION_BASE,
    ERRNO,
    PIECES,
    QUEUED,
    SOURCE_BASE,
    STATUS,
    TICKET,
    count,
    count_outstanding,
)
from gpuq.host.staging import LEASE_SLOT, give_back
from gpuq.host.tables import add_in_flight
from gpuq.host.tracing import trace_completion
from gpuq.layout import (
    COUNTER_WORDS,
    COUNTS,
    COUNTS_FAILED_MASK,
    COUNTS_SHIFT,
    FLAG_ERRNO_MASK,
    FLAG_ERRNO_SHIFT,
    FLAG_SEQUENCE_SHIFT,
    FLAG_WORDS,
    HISTORY,
    HISTORY_WORDS,
    Status,
)
from gpuq.ordering import as_signed, as_word, load_relaxed, store_relaxed, store_release

_OK = int(Status.OK)


@inlined
def fail_piece(p: Any, lease: Any, status: Any, number: Any) -> None:
    """Fail a piece's request, keeping the first failure, and give the lease back."""
    request = p.requests[p.staging.leases[lease, LEASE_SLOT]]
    if request[STATUS] == _OK:
        request[STATUS] = status
        request[ERRNO] = number
    drop_piece(p, lease)


@inlined
def drop_piece(p: Any, lease: Any) -> None:
    """Give a lease back whose read and copy are over; complete its request if it was the last."""
    slot = p.staging.leases[lease, LEASE_SLOT]
    give_back(p.staging, lease)
    p.requests[slot, PIECES] -= 1
    complete_if_over(p, slot)


@inlined
def complete_if_over(p: Any, slot: Any) -> None:
    """Complete a request with no piece in flight and none left to issue.

    A failed one that still stands in the ring is completed when its turn comes there, so that
    the ring never holds a slot that a new request may have taken.
    """
    if p.requests[slot, PIECES] == 0 and p.requests[slot, QUEUED] == 0:
        complete(p, slot)


@inlined
def complete(p: Any, slot: Any) -> None:
    """Answer a request: the last thing that happens to it."""
    request = p.requests[slot]
    if request[SOURCE_BASE] >= 0:
        add_in_flight(p.sources, request[SOURCE_BASE], -1)
        add_in_flight(p.destinations, request[DESTINATION_BASE], -1)
    request[ACTIVE] = 0
    count_outstanding(p, -1)
    count(p, request[STATUS], 1)
    if request[COUNTER] >= 0:
        count_answer(p, request[COUNTER], request[STATUS])
    trace_completion(p, request)
    flag = (
        (request[TICKET] + 1) << FLAG_SEQUENCE_SHIFT
        | (request[ERRNO] & FLAG_ERRNO_MASK) << FLAG_ERRNO_SHIFT
        | request[STATUS]
    )
    # Pairs with the waiter's acquire in `flag_of`: every byte is in the destination.
    store_release(p.flags, slot * FLAG_WORDS, as_word(flag))


@inlined
def count_answer(p: Any, counter: Any, status: Any) -> None:
    """Count an answer, and note the status of a failed one."""
    base = counter * COUNTER_WORDS
    counts = as_signed(load_relaxed(p.counters, base + COUNTS))
    failed = counts & COUNTS_FAILED_MASK
    answered = (counts >> COUNTS_SHIFT) + 1
    if status != _OK:
        store_relaxed(p.counters, base + HISTORY + failed % HISTORY_WORDS, as_word(status))
        failed = (failed + 1) & COUNTS_FAILED_MASK
    # Pairs with the waiter's acquire in `take_counts`: the bytes and the history are visible.
    store_release(p.counters, base + COUNTS, as_word(answered << COUNTS_SHIFT | failed))

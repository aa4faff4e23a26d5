"""What becomes of a finished read: a copy, a read of what is missing, or a failure."""

from __future__ import annotations

import errno
from typing import Any

from gpuq.compiling import inlined
from gpuq.host.completion import drop_piece, fail_piece
from gpuq.host.copying import copy_piece
from gpuq.host.direct_file import ENOUGH, RESUME, judge_read, span_bytes, span_start
from gpuq.host.issuing import read_from
from gpuq.host.reader import reap_read
from gpuq.host.records import (
    LOT,
    MOST_REAPED,
    READ_BYTES,
    READS,
    SOURCE_BASE,
    STATISTICS_BYTES,
    STATISTICS_FALLBACKS,
    STATISTICS_LAST_ERRNO,
    STATISTICS_MERGED,
    STATISTICS_RETRIES,
    STATISTICS_SHORT_READS,
    STATUS,
    are_large,
    count,
)
from gpuq.host.staging import (
    BORROWERS,
    DESCRIPTOR,
    FILLED,
    INTERRUPTIONS,
    LEASE_ALIGNMENT,
    LEASE_IS_DIRECT,
    LEASE_SLOT,
    NEEDED,
    NEXT_BORROWER,
    RESUMED,
    SKIP,
    SPAN_BYTES,
    SPAN_START,
    WANTED,
    part,
)
from gpuq.host.tables import (
    BUFFERED_DESCRIPTOR,
    FALLBACK_ERRNO,
    IS_DIRECT,
    IS_PROVEN,
    MUST_BE_DIRECT,
)
from gpuq.host.tracing import FELL_BACK, READ_ON, trace_arrival, trace_turn
from gpuq.layout import STATE, State, Status
from gpuq.ordering import as_signed, load_acquire, store_release

_OK = int(Status.OK)
_END_OF_FILE = int(Status.END_OF_FILE)
_READ_FAILED = int(Status.READ_FAILED)
_STATUS_ABORTED = int(Status.ABORTED)
_ABORTED = int(State.ABORTED)
_EINTR = errno.EINTR
_EAGAIN = errno.EAGAIN
_EINVAL = errno.EINVAL
_REAP_BATCH = 64
_REAP_BYTES = 256 << 10
_MOST_INTERRUPTIONS = 1000


@inlined
def reap(p: Any) -> Any:
    """Take finished reads, up to a batch of them and of bytes copied; return how many.

    Reads come back in lots, and the storage idles until the next is issued: the first pass over
    a lot takes one read, the next two, then four. Of large ones each takes all that its bytes
    allow, for the system joins neighbours that are handed over together.
    """
    most = max(p.cursor[MOST_REAPED], 1)
    enough = p.statistics[STATISTICS_BYTES] + _REAP_BYTES
    reaped = 0
    while reaped < most and p.statistics[STATISTICS_BYTES] < enough:
        lease, result = reap_read(p.reader)
        if lease < 0:
            break
        reaped += 1
        p.cursor[READS] -= 1
        record = p.staging.leases[lease]
        p.cursor[READ_BYTES] -= record[SPAN_BYTES] - record[RESUMED]
        arrive(p, lease, result)
    if reaped > 0:
        p.cursor[MOST_REAPED] = min(2 * most, _REAP_BATCH)
    else:
        p.cursor[MOST_REAPED] = _REAP_BATCH if are_large(p) else 1
        p.cursor[LOT] = 0
    return reaped


@inlined
def arrive(p: Any, lease: Any, result: Any) -> None:
    """Judge one finished read alone: copy, read on, or fail its request."""
    record = p.staging.leases[lease]
    request = p.requests[record[LEASE_SLOT]]
    trace_arrival(p, request)
    if record[BORROWERS] > 0 and share(p, lease, result):
        return
    if request[STATUS] != _OK:
        # The request failed by another piece: the bytes are not wanted.
        drop_piece(p, lease)
    elif as_signed(load_acquire(p.control, STATE)) == _ABORTED:
        fail_piece(p, lease, _STATUS_ABORTED, 0)
    elif result < 0:
        arrive_failed(p, lease, -result)
    else:
        record[INTERRUPTIONS] = 0
        if record[LEASE_IS_DIRECT] == 1 and result > 0:
            p.sources[request[SOURCE_BASE] + IS_PROVEN] = 1
        reached = record[RESUMED] + result
        verdict = judge_read(record[RESUMED], result, record[FILLED], record[NEEDED])
        if verdict == ENOUGH:
            copy_piece(p, lease)
            return
        count(p, STATISTICS_SHORT_READS, 1)
        if verdict == RESUME:
            record[FILLED] = reached
            count(p, STATISTICS_RETRIES, 1)
            trace_turn(p, request, READ_ON)
            read_from(p, lease, span_start(reached, record[LEASE_ALIGNMENT]))
        else:
            fail_piece(p, lease, _END_OF_FILE, 0)


@inlined
def share(p: Any, lease: Any, result: Any) -> Any:
    """Give a finished read's borrowers their bytes; return whether the lender is read again.

    A read that does not bring what all want says nothing of the single ones: one may want no
    byte that is missing or broken, so each is read and judged by itself, the lender too.
    """
    leases = p.staging.leases
    brings_all = result >= leases[lease, NEEDED]
    borrower = leases[lease, NEXT_BORROWER]
    while borrower >= 0:
        following = leases[borrower, NEXT_BORROWER]
        if as_signed(load_acquire(p.control, STATE)) == _ABORTED:
            fail_piece(p, borrower, _STATUS_ABORTED, 0)
        elif brings_all:
            count(p, STATISTICS_MERGED, 1)
            trace_arrival(p, p.requests[leases[borrower, LEASE_SLOT]])
            copy_piece(p, borrower)
        else:
            part(p.staging, borrower)
            trace_turn(p, p.requests[leases[borrower, LEASE_SLOT]], READ_ON)
            read_from(p, borrower, 0)
        borrower = following
    leases[lease, NEXT_BORROWER] = -1
    if brings_all:
        return False
    if result >= 0:
        count(p, STATISTICS_SHORT_READS, 1)
    record = leases[lease]
    record[NEEDED] = record[SKIP] + record[WANTED]
    begin, most = record[SPAN_START], record[SPAN_BYTES]
    record[SPAN_BYTES] = span_bytes(begin, begin + record[NEEDED], record[LEASE_ALIGNMENT], most)
    if result >= record[NEEDED] or as_signed(load_acquire(p.control, STATE)) == _ABORTED:
        return False
    count(p, STATISTICS_RETRIES, 1)
    trace_turn(p, p.requests[record[LEASE_SLOT]], READ_ON)
    read_from(p, lease, 0)
    return True


@inlined
def arrive_failed(p: Any, lease: Any, number: Any) -> None:
    """Handle a read that returned an errno."""
    record = p.staging.leases[lease]
    source_base = p.requests[record[LEASE_SLOT], SOURCE_BASE]
    if number == _EINTR or number == _EAGAIN:
        record[INTERRUPTIONS] += 1
        if record[INTERRUPTIONS] < _MOST_INTERRUPTIONS:
            count(p, STATISTICS_RETRIES, 1)
            trace_turn(p, p.requests[record[LEASE_SLOT]], READ_ON)
            read_from(p, lease, record[RESUMED])
            return
    elif (
        number == _EINVAL
        and record[LEASE_IS_DIRECT] == 1
        and p.sources[source_base + MUST_BE_DIRECT] == 0
    ):
        # The file system refuses O_DIRECT at the read. If it never took one, it never will.
        if p.sources[source_base + IS_PROVEN] == 0:
            store_release(p.sources, source_base + IS_DIRECT, 0)
        store_release(p.sources, source_base + FALLBACK_ERRNO, number)
        count(p, STATISTICS_FALLBACKS, 1)
        trace_turn(p, p.requests[record[LEASE_SLOT]], FELL_BACK)
        count(p, STATISTICS_RETRIES, 1)
        record[DESCRIPTOR] = p.sources[source_base + BUFFERED_DESCRIPTOR]
        record[LEASE_IS_DIRECT] = 0
        record[LEASE_ALIGNMENT] = 1
        record[FILLED] = 0
        read_from(p, lease, 0)
        return
    store_release(p.statistics, STATISTICS_LAST_ERRNO, number)
    fail_piece(p, lease, _READ_FAILED, number)

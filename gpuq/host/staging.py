"""Staging buffers and leases: the right to one buffer, from read to the end of its own copy.

A lease goes FREE → READING → COPYING → FREE. It leaves COPYING only when its own copy was seen
complete; there is no shared event, no batch, and no list from which a second party infers that a
buffer is free. A lease whose state is not certain is QUARANTINED and never given out again.

A lease may *borrow*: its bytes come with another lease's read, and its copy takes them from that
one's buffer. Each still has its own copy, and its own event for it. A *lender* whose own copy is
over is LENDING until its last borrower's is.

Only the poller touches this state, so it needs no order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpuq.compiling import inlined

# Phases of a lease.
FREE = 0
READING = 1
COPYING = 2
QUARANTINED = 3
LENDING = 4  # its own copy is over, and others' still read its buffer

# Columns of a lease's record: the piece that it carries.
PHASE = 0
LEASE_SLOT = 1  # of the request
DESCRIPTOR = 2
LEASE_IS_DIRECT = 3
LEASE_ALIGNMENT = 4
SPAN_START = 5  # file offset of the buffer's first byte
SPAN_BYTES = 6  # bytes to read
SKIP = 7  # bytes before the wanted ones
WANTED = 8  # bytes that the request wants
FILLED = 9  # bytes known to be in the buffer, from its begin
RESUMED = 10  # where the read in flight began, from the buffer's begin
INTERRUPTIONS = 11  # EINTR and EAGAIN in a row
TO = 12  # destination address
TO_KIND = 13  # where that is
NEEDED = 14  # bytes of the span that this piece needs, and its borrowers with it
LENDER = 15  # the lease whose buffer has its bytes: itself, unless it borrows
BORROWERS = 16  # how many borrow from it
NEXT_BORROWER = 17  # of a lender the first, of a borrower the next; -1 for none
INTO = 18  # address that the span's first byte is read to
IS_STRAIGHT = 19  # 1: that is in the destination, and nothing is left to copy
LEASE_WORDS = 24

# Counts.
FREE_COUNT = 0
HIGH_WATER = 1  # most leases out at once
QUARANTINED_COUNT = 2
COUNT_WORDS = 8


class Staging(NamedTuple):
    """The pool: `leases` are records, `free` is a stack of lease numbers.

    Attributes
    ----------
    leases : array of int64, shape (buffers, LEASE_WORDS)
    free : array of int64, shape (buffers,)
    counts : array of int64, shape (COUNT_WORDS,)
    address : int
        Of buffer 0; the buffers follow one another.
    buffer_bytes : int
    """

    leases: Any
    free: Any
    counts: Any
    address: int
    buffer_bytes: int


def make_staging(buffers: int, buffer_bytes: int, address: int) -> Staging:
    """Build the pool over ``buffers * buffer_bytes`` bytes from `address`; the caller owns them."""
    counts = np.zeros(COUNT_WORDS, dtype=np.int64)
    counts[FREE_COUNT] = buffers
    return Staging(
        leases=np.zeros((buffers, LEASE_WORDS), dtype=np.int64),
        free=np.arange(buffers - 1, -1, -1, dtype=np.int64),
        counts=counts,
        address=address,
        buffer_bytes=buffer_bytes,
    )


@inlined
def take(staging: Any) -> Any:
    """Move a lease from FREE to READING and return it; -1 where none is free."""
    left = staging.counts[FREE_COUNT]
    if left == 0:
        return -1
    lease = staging.free[left - 1]
    staging.counts[FREE_COUNT] = left - 1
    record = staging.leases[lease]
    record[PHASE] = READING
    record[LENDER] = lease
    record[BORROWERS] = 0
    record[NEXT_BORROWER] = -1
    out = len(staging.free) - (left - 1) - staging.counts[QUARANTINED_COUNT]
    staging.counts[HIGH_WATER] = max(staging.counts[HIGH_WATER], out)
    return lease


@inlined
def borrow(staging: Any, lease: Any, lender: Any) -> None:
    """Have a lease's bytes come with another's read, which has not begun."""
    record, lending = staging.leases[lease], staging.leases[lender]
    assert record[PHASE] == READING
    assert lending[PHASE] == READING
    record[LENDER] = lender
    record[NEXT_BORROWER] = lending[NEXT_BORROWER]
    lending[NEXT_BORROWER] = lease
    lending[BORROWERS] += 1


@inlined
def part(staging: Any, lease: Any) -> None:
    """Let a lease borrow no more: it is back at its own buffer."""
    staging.leases[staging.leases[lease, LENDER], BORROWERS] -= 1
    staging.leases[lease, LENDER] = lease


@inlined
def begin_copy(staging: Any, lease: Any) -> None:
    """Move a lease from READING to COPYING."""
    assert staging.leases[lease, PHASE] == READING
    staging.leases[lease, PHASE] = COPYING


@inlined
def give_back(staging: Any, lease: Any) -> None:
    """Move a lease to FREE: its read is over and its copy, if it had one, was seen complete."""
    phase = staging.leases[lease, PHASE]
    assert phase == READING or phase == COPYING
    lender = staging.leases[lease, LENDER]
    if lender != lease:
        part(staging, lease)
        if staging.leases[lender, PHASE] == LENDING and staging.leases[lender, BORROWERS] == 0:
            set_free(staging, lender)
    if staging.leases[lease, BORROWERS] > 0:
        staging.leases[lease, PHASE] = LENDING
    else:
        set_free(staging, lease)


@inlined
def set_free(staging: Any, lease: Any) -> None:
    """Put a lease on the stack of free ones."""
    staging.leases[lease, PHASE] = FREE
    staging.free[staging.counts[FREE_COUNT]] = lease
    staging.counts[FREE_COUNT] += 1


@inlined
def quarantine(staging: Any, lease: Any) -> None:
    """Never use this buffer again: something may still read or write it."""
    staging.leases[lease, PHASE] = QUARANTINED
    staging.counts[QUARANTINED_COUNT] += 1


@inlined
def buffer_address(staging: Any, lease: Any) -> Any:
    """Return the address of a lease's buffer."""
    return staging.address + lease * staging.buffer_bytes


@inlined
def wanted_address(staging: Any, lease: Any) -> Any:
    """Return where the bytes that a lease's piece wants lie, in its own buffer or its lender's."""
    record = staging.leases[lease]
    lender = record[LENDER]
    ahead = record[SPAN_START] - staging.leases[lender, SPAN_START]
    return buffer_address(staging, lender) + ahead + record[SKIP]

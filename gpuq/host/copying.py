"""From a staging buffer to the destination: start a piece's copy, look at it, account for it."""

from __future__ import annotations

import errno
from typing import Any

from gpuq.compiling import inlined
from gpuq.host.completion import drop_piece, fail_piece
from gpuq.host.copier import COPY_DONE, COPY_UNCERTAIN, COPY_UNDER_WAY, look_at_copy, start_copy
from gpuq.host.records import (
    COPIES,
    FAILURE,
    STATISTICS_BYTES,
    STATISTICS_QUARANTINED,
    STATISTICS_STRAIGHT,
    count,
    end_queue,
)
from gpuq.host.staging import (
    IS_STRAIGHT,
    LEASE_SLOT,
    TO,
    TO_KIND,
    WANTED,
    begin_copy,
    quarantine,
    wanted_address,
)
from gpuq.host.tracing import trace_copy
from gpuq.layout import State, Status

_COPY_FAILED = int(Status.COPY_FAILED)
_ABORTED = int(State.ABORTED)
_EIO = errno.EIO


@inlined
def copy_piece(p: Any, lease: Any) -> None:
    """Start the copy of a piece whose bytes are all there; one that went straight needs none."""
    record = p.staging.leases[lease]
    if record[IS_STRAIGHT] == 1:
        count(p, STATISTICS_STRAIGHT, record[WANTED])
        end_copy(p, lease, COPY_DONE)
        return
    begin_copy(p.staging, lease)
    trace_copy(p, p.requests[record[LEASE_SLOT]])
    origin = wanted_address(p.staging, lease)
    outcome = start_copy(p.copier, lease, record[TO_KIND], record[TO], origin, record[WANTED])
    if outcome == COPY_UNDER_WAY:
        p.copying[p.cursor[COPIES]] = lease
        p.cursor[COPIES] += 1
    else:
        end_copy(p, lease, outcome)


@inlined
def retire(p: Any) -> Any:
    """Look at every copy under way; return how many are over."""
    over = 0
    position = 0
    while position < p.cursor[COPIES]:
        lease = p.copying[position]
        outcome = look_at_copy(p.copier, lease)
        if outcome == COPY_UNDER_WAY:
            position += 1
            continue
        over += 1
        p.cursor[COPIES] -= 1
        p.copying[position] = p.copying[p.cursor[COPIES]]
        end_copy(p, lease, outcome)
    return over


@inlined
def end_copy(p: Any, lease: Any, outcome: Any) -> None:
    """Account for a copy that is over, or whose state nobody can know."""
    record = p.staging.leases[lease]
    if outcome == COPY_DONE:
        count(p, STATISTICS_BYTES, record[WANTED])
        drop_piece(p, lease)
    elif outcome == COPY_UNCERTAIN:
        # Neither the buffer nor the destination may be touched by anyone again: no completion.
        quarantine(p.staging, lease)
        count(p, STATISTICS_QUARANTINED, 1)
        p.cursor[FAILURE] = _EIO
        end_queue(p, _ABORTED)
    else:
        fail_piece(p, lease, _COPY_FAILED, 0)

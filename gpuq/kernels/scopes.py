"""Block and warp forms: one lane talks to the queue, all of the scope may read the bytes.

Divergence rules. A block form is a barrier: every thread of the block must call it, in the same
order, none may have returned before, and none may skip it in a branch. A warp form is for the
lanes that are active together where it is called; lanes that come there separately act
separately, each set with a request of its own. In the simulator a warp form is its per-thread
form. On the CPU a block is one thread, and every form is the plain one.

Why all may read: the lane that waits acquires at system scope, and the barrier behind it orders
that before what the others do (PTX ISA, "Causality order": ``bar.sync`` and ``bar.warp.sync``
synchronize, and causality is transitive).
"""

from __future__ import annotations

from typing import Any

from gpuq.compiling import protocol
from gpuq.kernels.cooperation import (
    block_broadcast,
    block_combine,
    block_rank,
    block_size,
    is_warp_leader,
    warp_broadcast,
    warp_combine,
    warp_lanes,
)
from gpuq.kernels.counters import wait_counter
from gpuq.kernels.queue import post_at, pull_at, wait
from gpuq.layout import NO_TICKET, WORD_BYTES
from gpuq.ordering import as_signed

_MOST_BYTES = 1 << 62
"""What can be divided without overflow; no file has so many."""


@protocol
def pull_block_at(
    q: Any, source: Any, destination: Any, offset: Any, start: Any, end: Any, tag: Any
) -> Any:
    """Pull ``[start, end)`` once for a block; all its threads get the status and may read.

    Every thread of the block must call it; only rank 0's arguments count.

    Returns
    -------
    int
        A `Status`, the same in every thread.
    """
    status = 0
    if block_rank() == 0:
        status = pull_at(q, source, destination, offset, start, end, tag)
    return block_broadcast(status)


@protocol
def pull_block(q: Any, source: Any, destination: Any, start: Any, end: Any, tag: Any) -> Any:
    """Pull for a block to the begin of a destination; see `pull_block_at`."""
    return pull_block_at(q, source, destination, 0, start, end, tag)


@protocol
def pull_warp_at(
    q: Any, source: Any, destination: Any, offset: Any, start: Any, end: Any, tag: Any
) -> Any:
    """Pull ``[start, end)`` once for the lanes active together; all get the status and may read.

    Only the lowest lane's arguments count.

    Returns
    -------
    int
        A `Status`, the same in each of these lanes.
    """
    lanes = warp_lanes()
    status = 0
    if is_warp_leader(lanes):
        status = pull_at(q, source, destination, offset, start, end, tag)
    return warp_broadcast(lanes, status)


@protocol
def pull_warp(q: Any, source: Any, destination: Any, start: Any, end: Any, tag: Any) -> Any:
    """Pull for the lanes active together to the begin of a destination; see `pull_warp_at`."""
    return pull_warp_at(q, source, destination, 0, start, end, tag)


@protocol
def post_block_at(
    q: Any, source: Any, destination: Any, offset: Any, start: Any, end: Any, tag: Any
) -> Any:
    """Post ``[start, end)`` as one slice for each thread of the block, in the order of ranks.

    All slices but the last are of one size, a multiple of 8 bytes. Rank 0 posts a range that
    cannot be divided, an empty one included, as it is. No barrier: a thread may skip it, and then
    its slice is not read.

    Returns
    -------
    int
        This thread's ticket for `wait_block` (or `wait`); ``NO_TICKET`` where no slice was left
        for it; negative as from `post_at`.
    """
    begin, rank = as_signed(start), block_rank()
    nbytes = as_signed(end) - begin
    first, last = 0, nbytes
    if 0 < nbytes <= _MOST_BYTES:
        words = (nbytes + WORD_BYTES - 1) // WORD_BYTES
        slice_bytes = (words + block_size() - 1) // block_size() * WORD_BYTES
        first = rank * slice_bytes
        last = min(first + slice_bytes, nbytes)
        if first >= last:
            return NO_TICKET
    elif rank != 0:
        return NO_TICKET
    return post_at(
        q, source, destination, as_signed(offset) + first, begin + first, begin + last, tag
    )


@protocol
def post_block(q: Any, source: Any, destination: Any, start: Any, end: Any, tag: Any) -> Any:
    """Post one slice for each thread to the begin of a destination; see `post_block_at`."""
    return post_block_at(q, source, destination, 0, start, end, tag)


@protocol
def wait_block(q: Any, ticket: Any) -> Any:
    """Wait for the tickets of a block's threads; all get one status and may read all the bytes.

    Every thread of the block must call it, each with the ticket that it posted itself, or with
    ``NO_TICKET``. A ticket is consumed once: to pass one ticket from several threads is `STALE`.

    Returns
    -------
    int
        ``Status.OK``, or the failure of the thread with the lowest rank; the same in every
        thread.
    """
    return block_combine(wait(q, ticket))


@protocol
def wait_warp(q: Any, ticket: Any) -> Any:
    """Wait for the tickets of the lanes active together; all get one status and may read.

    Each lane passes the ticket that it posted itself, or ``NO_TICKET``.
    """
    lanes = warp_lanes()
    return warp_combine(lanes, wait(q, ticket))


@protocol
def wait_counter_block(q: Any, counter: Any, count: Any) -> Any:
    """Take `count` answers once for a block, like `wait_counter`; all its threads may read.

    Every thread of the block must call it; only rank 0's arguments count.
    """
    status = 0
    if block_rank() == 0:
        status = wait_counter(q, counter, count)
    return block_broadcast(status)

"""How the threads of a block or a warp act as one: rank, size, barrier, broadcast, combine.

Each operation has three bodies: the plain ones below, which the simulator runs, the CPU's, and
CUDA's in `gpuq.kernels.lowering`. On the CPU a block is one thread. In the simulator a warp is
one thread, since warp intrinsics are missing there. On CUDA a warp is the set of lanes that
`warp_lanes` found active together; each set acts for itself, whatever it is, so the warp forms
are right for partial and for divergent warps.

======================  ==================  ======================  ===========================
operation               CPU                 simulator               CUDA
======================  ==================  ======================  ===========================
`block_rank`            0                   thread of the block     thread of the block
`block_size`            1                   threads of the block    threads of the block
`block_barrier`         nothing             ``syncthreads``         ``bar.sync``
`block_broadcast`       the value           rank 0's value          rank 0's value
`block_combine`         the status          lowest rank's failure   lowest rank's failure
`warp_lanes`            1                   1                       mask of active lanes
`is_warp_leader`        True                True                    lowest of the lanes
`warp_broadcast`        the value           the value               the leader's value
`warp_combine`          the status          the status              lowest lane's failure
======================  ==================  ======================  ===========================
"""

from __future__ import annotations

from typing import Any

from numba.extending import overload as cpu_overload

from gpuq.compiling import SIMULATED
from gpuq.layout import FLAG_STATUS_MASK

if SIMULATED:
    from gpuq.kernels import simulated

STATUS_BITS = FLAG_STATUS_MASK.bit_length()
NO_FAILURE = 1 << 40
"""Greater than ``rank << STATUS_BITS | status`` of any thread."""


def block_rank() -> Any:
    """Return the number of this thread in its block, from 0; x runs fastest."""
    return simulated.rank() if SIMULATED else 0


def block_size() -> Any:
    """Return how many threads the block has."""
    return simulated.size() if SIMULATED else 1


def block_barrier() -> None:
    """Wait for all threads of the block; what they wrote before is visible to all after it."""
    if SIMULATED:
        simulated.barrier()


def block_broadcast(value: Any) -> Any:
    """Return the 64-bit integer that rank 0 passed; every thread of the block must call it."""
    return simulated.broadcast(value) if SIMULATED else value


def block_combine(status: Any) -> Any:
    """Return the failure of the lowest rank, OK where none failed.

    A barrier: every thread of the block must call it.
    """
    if not SIMULATED:
        return status
    least = simulated.minimum(simulated.rank() << STATUS_BITS | status if status else NO_FAILURE)
    return 0 if least == NO_FAILURE else least & FLAG_STATUS_MASK


def warp_lanes() -> Any:
    """Return a mask of the lanes that are active together here."""
    return 1


def is_warp_leader(lanes: Any) -> Any:
    """Whether this lane is the lowest of `lanes`."""
    return True


def warp_broadcast(lanes: Any, value: Any) -> Any:
    """Return the 64-bit integer that the lowest of `lanes` passed; a barrier for these lanes."""
    return value


def warp_combine(lanes: Any, status: Any) -> Any:
    """Return the failure of the lowest of `lanes`, OK where none failed; a barrier for them."""
    return status


OPERATIONS = (
    block_rank,
    block_size,
    block_barrier,
    block_broadcast,
    block_combine,
    warp_lanes,
    is_warp_leader,
    warp_broadcast,
    warp_combine,
)
"""Everything that a lowering must provide."""

for _operation, _cpu_body in (
    (block_rank, lambda: 0),
    (block_size, lambda: 1),
    (block_barrier, lambda: None),
    (block_broadcast, lambda value: value),
    (block_combine, lambda status: status),
    (warp_lanes, lambda: 1),
    (is_warp_leader, lambda lanes: True),
    (warp_broadcast, lambda lanes, value: value),
    (warp_combine, lambda lanes, status: status),
):
    cpu_overload(_operation, strict=False)(lambda *types, _body=_cpu_body: _body)

"""The race of NVIDIA DALI issue 6623, run in a forced order against three pools of buffers.

Two readers A and B fill staging buffers, 64 of 2 MiB, and one stream copies them out. In the
pools `original` and `event-recheck` (`gpuq.race.shared_event`) more than 32 filled buffers make
a batch, and one event, recorded behind each batch, speaks for all of them. The third pool is
gpuq's own, poller, leases, reader and CUDA copier being the product's (`gpuq.race.product`).
Nothing of the product imports this package.

The schedule, the same for all three
------------------------------------
Gate 1 holds the first 33 copies, gate 2 all behind them. Block ``i`` is to hold ``i + 1`` in
each of its words; block 66 comes from another file and is to hold 999.

1. A and B in turn fill blocks 0 to 63. All buffers are in use, and 33 copies submitted. A asks
   for a buffer for block 66. None is free: A sleeps on the event, outside the lock.
2. Gate 1 opens and the first 33 copies end. A's sleep is over; A is stopped before it has the
   lock again.
3. B asks for buffers for blocks 64 and 65, and the pool takes back the 33 whose copies ended.
   With block 65 a second batch of 33 copies is submitted, and the event recorded anew.
4. A goes on, gets a buffer and reads 999 into it.
5. Gate 2 opens and all copies end.

gpuq has neither batches nor a sleep on an event: each copy is submitted at once, and the poller
alone looks at each lease's own event. The place where A can be overtaken there is inside its
post, when its ticket is claimed and what it asks for not yet published; A is stopped there.

Where the figures come from
---------------------------
wait_hook_calls
    The hook stands where a waiter's sleep is over and the lock not yet taken. A passes it in
    step 2 and B in step 3: 2. gpuq has no such place.
ready_after_a, scheduled_after_a
    Buffers ready and buffers scheduled once A has its own. Before A goes on, 31 are ready (33
    taken back, 2 used by B) and 33 scheduled. `original` recycles all that is scheduled now:
    64 ready, and A's taken, 63 and 0. `event-recheck` sees that the event is not complete and
    recycles nothing: 30 and 33. In gpuq these are leases that are free and leases whose copies
    are under way.
first_lease_still_pending
    Whether a copy from the very buffer that A got is still to come. `original` gives out what
    was recycled last, the buffer of block 65: true.
premature_ready_buffers
    Ready buffers with a copy still to come: in `original` the other 32 of the second batch.
bad_samples, bad_uint64_values
    A's 999 replaced block 65 in the buffer before its copy ran: 1 block, 262144 words.
watchdog_fired
    Whether the gates had to be opened by the watchdog. A run in which that happens proves
    nothing and counts as failed.

Sources: NVIDIA DALI, ``dali/operators/reader/gds_mem.cc``, and issue 6623.
"""

from gpuq.race.board import Figures, Run
from gpuq.race.schedule import BLOCK_BYTES, PUBLISHED, run_pool, run_race

__all__ = ["BLOCK_BYTES", "PUBLISHED", "Figures", "Run", "run_pool", "run_race"]

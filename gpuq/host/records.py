"""What a poller works on: the records of its requests, its own words, its statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpuq.compiling import compiled, inlined
from gpuq.host.staging import Staging
from gpuq.host.tables import ALIGNMENT, BUFFERED_DESCRIPTOR, DIRECT_DESCRIPTOR, IS_DIRECT
from gpuq.layout import STATE, STATUS_COUNT
from gpuq.ordering import as_signed, as_word, compare_exchange, load_acquire, store_release

# Columns of a request's record; what every request needs stands in its first two lines.
ACTIVE = 0  # 1 from admission to completion
TICKET = 1
SOURCE_BASE = 2  # first word of its source's entry
DESTINATION_BASE = 3
BEGIN = 4  # byte range in the source
FINISH = 5
NEXT = 6  # first byte that no piece covers yet
TARGET_ADDRESS = 7  # where byte BEGIN goes
PIECES = 8  # pieces read or copied now
STATUS = 9
ERRNO = 10
QUEUED = 11  # 1 while it stands in the ring of requests with pieces left to issue
COUNTER = 12  # number of the counter that counts the answer, -1 for none
MAY_GO_STRAIGHT = 13  # 1: some of it may be read straight into the destination
REQUEST_TAG = 16  # the rest is for the trace, and written only for it
SOURCE_HANDLE = 17  # what the submission says, good or bad
DESTINATION_HANDLE = 18
ASKED_START = 19
ASKED_END = 20
ADMITTED_NS = 21
FIRST_READ_NS = 22
LAST_READ_NS = 23
COPY_NS = 24
READ_COUNT = 25
PATH = 26
REQUEST_WORDS = 32

TRACE_WORDS = 16

_LARGE_READ = 64 << 10

# The poller's own words.
HEAD = 0  # next ticket to admit
SWEEP = 1  # next slot to look at out of turn
QUEUE_HEAD = 2  # of the ring of requests with pieces left to issue
QUEUE_COUNT = 3
READS = 4  # in flight
COPIES = 5  # under way
REQUESTS = 6  # admitted and not completed
FAILURE = 7  # errno that ended the queue; 0 while none
IS_SEALED = 8  # 1 once a closing queue has admitted the last of what was posted
READ_BYTES = 9  # that the reads in flight ask for
LOT = 10  # reads submitted since the poller last found none to be over
MOST_REAPED = 11  # reads that the next pass takes at most
IDLE_SINCE_NS = 12  # when the poller last had nothing to do while reads were in flight, or 0
SILENCE_NS = 13  # how long that lasts, of late
IDLE_CPU_NS = 14  # processor time of the poller's thread when it last looked what idling costs
IDLE_SLEEP_NS = 15  # how long it sleeps at a time where nothing was to do for long
CURSOR_WORDS = 16

# Statistics; the poller is the only writer. Completions by status come first.
STATISTICS_BYTES = STATUS_COUNT
STATISTICS_READS = STATUS_COUNT + 1
STATISTICS_SHORT_READS = STATUS_COUNT + 2
STATISTICS_RETRIES = STATUS_COUNT + 3
STATISTICS_FALLBACKS = STATUS_COUNT + 4
STATISTICS_HIGH_WATER = STATUS_COUNT + 5
STATISTICS_LAST_ERRNO = STATUS_COUNT + 6
STATISTICS_QUARANTINED = STATUS_COUNT + 7
STATISTICS_OUTSTANDING = STATUS_COUNT + 8
STATISTICS_MERGED = STATUS_COUNT + 9
STATISTICS_TRACED = STATUS_COUNT + 10
STATISTICS_TRACE_LOST = STATUS_COUNT + 11
STATISTICS_STRAIGHT = STATUS_COUNT + 12
STATISTICS_WORDS = STATUS_COUNT + 13


class Poller(NamedTuple):
    """All that the poller works on. Shared words are marked with who else touches them.

    Attributes
    ----------
    submissions, flags, counters : array of uint64
        The queue's mapped memory (kernels).
    control : array of uint64
        The control words that the host goes by (host).
    shown : array of uint64
        STATE and HEARTBEAT for kernels, in mapped memory; nothing follows from what stands there,
        for a kernel may write it.
    sources, destinations : array of int64
        The capability tables (host).
    statistics : array of int64, shape (STATISTICS_WORDS,)
        (host reads)
    trace : array of int64, shape (records, words of a record)
        A ring, see `gpuq.host.tracing` (host reads).
    requests : array of int64, shape (capacity, REQUEST_WORDS)
    expected : array of int64, shape (capacity,)
        Per slot, the ticket to be admitted next.
    queue : array of int64, shape (capacity,)
        Ring of slots whose requests have pieces left to issue.
    copying : array of int64, shape (buffers,)
        Leases whose copies are under way.
    cursor : array of int64, shape (CURSOR_WORDS,)
    capacity : int
    merge_bytes : int
        The most that neighbouring requests are read in together.
    straight_bytes : int
        The least that is read straight into host memory; 0: everything is staged.
    longest_straight : int
        The most that is read straight at once; a multiple of the staging buffers' length.
    longest_buffered : int
        The same where a file is read through the page cache.
    staging : Staging
    reader, copier : NamedTuple
        Implementations of the contracts in `gpuq.host.reader` and `gpuq.host.copier`.
    """

    submissions: Any
    flags: Any
    counters: Any
    control: Any
    shown: Any
    sources: Any
    destinations: Any
    statistics: Any
    trace: Any
    requests: Any
    expected: Any
    queue: Any
    copying: Any
    cursor: Any
    capacity: int
    merge_bytes: int
    straight_bytes: int
    longest_straight: int
    longest_buffered: int
    staging: Staging
    reader: Any
    copier: Any


def make_poller(
    *,
    submissions: Any,
    flags: Any,
    counters: Any,
    control: Any,
    sources: Any,
    destinations: Any,
    capacity: int,
    staging: Staging,
    reader: Any,
    copier: Any,
    shown: Any = None,
    merge_bytes: int = 0,
    straight_bytes: int = 0,
    longest_straight: int | None = None,
    longest_buffered: int | None = None,
    trace: int = 0,
) -> Poller:
    """Build a poller's state over a queue's memory, the tables, a pool, a reader and a copier.

    Without `shown`, kernels are shown `control` itself; without `longest_straight` and
    `longest_buffered` a read that needs no buffer is as long as one. `trace` records are kept of
    requests.
    """
    return Poller(
        submissions=submissions,
        flags=flags,
        counters=counters,
        control=control,
        shown=control if shown is None else shown,
        sources=sources,
        destinations=destinations,
        statistics=np.zeros(STATISTICS_WORDS, dtype=np.int64),
        trace=np.zeros((trace, TRACE_WORDS), dtype=np.int64),
        requests=np.zeros((capacity, REQUEST_WORDS), dtype=np.int64),
        expected=np.arange(capacity, dtype=np.int64),
        queue=np.zeros(capacity, dtype=np.int64),
        copying=np.zeros(len(staging.free), dtype=np.int64),
        cursor=np.zeros(CURSOR_WORDS, dtype=np.int64),
        capacity=capacity,
        merge_bytes=merge_bytes,
        straight_bytes=straight_bytes,
        longest_straight=longest_straight or staging.buffer_bytes,
        longest_buffered=longest_buffered or staging.buffer_bytes,
        staging=staging,
        reader=reader,
        copier=copier,
    )


@compiled
def raise_state(control: Any, state: Any) -> None:
    """Raise a queue's STATE to `state`; a state beyond it stays.

    Host threads do it by compare-and-swap, since more than one may end a queue; kernels read.
    """
    before = load_acquire(control, STATE)
    while as_signed(before) < state:
        seen = compare_exchange(control, STATE, before, as_word(state))
        if seen == before:
            return
        before = seen


@inlined
def end_queue(p: Any, state: Any) -> None:
    """Raise STATE for the host, and then for kernels."""
    raise_state(p.control, state)
    raise_state(p.shown, state)


@inlined
def count(p: Any, position: Any, amount: Any) -> None:
    """Add to a statistic; a host thread may read it at any time."""
    store_release(p.statistics, position, p.statistics[position] + amount)


@inlined
def count_outstanding(p: Any, change: Any) -> None:
    """Count a request in or out."""
    p.cursor[REQUESTS] += change
    store_release(p.statistics, STATISTICS_OUTSTANDING, p.cursor[REQUESTS])


@inlined
def are_large(p: Any) -> Any:
    """Say whether the reads in flight are large, taken together; without any they are not."""
    reads = p.cursor[READS]
    return reads > 0 and p.cursor[READ_BYTES] >= reads * _LARGE_READ


@inlined
def access(p: Any, source_base: Any) -> Any:
    """Return (alignment, descriptor) of how a source is read now."""
    if p.sources[source_base + IS_DIRECT] == 1:
        return p.sources[source_base + ALIGNMENT], p.sources[source_base + DIRECT_DESCRIPTOR]
    return 1, p.sources[source_base + BUFFERED_DESCRIPTOR]

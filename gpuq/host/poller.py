"""The host's half of the protocol: admit, issue, reap, copy, retire.

`poll_once` is one bounded step and `serve` a loop around it. Both are compiled and hold no
interpreter lock. A request's record is its slot, a piece's record is its lease; nothing
allocates while serving.

A kernel is not trusted. Each word of a submission is loaded once, into the poller's own record,
and that copy is judged and used; what a kernel rewrites afterwards changes nothing. A slot takes
another submission only when its last one was answered, whatever stands in its SEQUENCE. A
producer that claimed a ticket and never publishes it holds up its own slot only: besides the
slot at the head, every pass looks at a few others in turn.
"""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

import numpy as np

from gpuq.compiling import compiled, inlined
from gpuq.host.copier import COPY_DONE, COPY_UNCERTAIN, COPY_UNDER_WAY, look_at_copy, start_copy
from gpuq.host.direct_file import ENOUGH, RESUME, judge_read, span_bytes, span_start
from gpuq.host.libc import cached_size_of, size_of, sleep_ns
from gpuq.host.reader import await_read, flush_reads, reap_read, submit_read
from gpuq.host.staging import (
    DESCRIPTOR,
    FILLED,
    HIGH_WATER,
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
    Staging,
    begin_copy,
    buffer_address,
    give_back,
    quarantine,
    take,
)
from gpuq.host.tables import (
    ADDRESS,
    ALIGNMENT,
    BUFFERED_DESCRIPTOR,
    DESTINATION_WORDS,
    DIRECT_DESCRIPTOR,
    FALLBACK_ERRNO,
    IS_DIRECT,
    IS_PROVEN,
    KIND,
    LIMIT_END,
    LIMIT_START,
    MUST_BE_DIRECT,
    NBYTES,
    SOURCE_WORDS,
    add_in_flight,
    lookup,
)
from gpuq.layout import (
    COUNTER_WORDS,
    COUNTS,
    COUNTS_FAILED_MASK,
    COUNTS_SHIFT,
    DESTINATION,
    END,
    FLAG_ERRNO_MASK,
    FLAG_ERRNO_SHIFT,
    FLAG_SEQUENCE_SHIFT,
    FLAG_WORDS,
    HEARTBEAT,
    HISTORY,
    HISTORY_WORDS,
    OFFSET,
    OPTIONS,
    REVISION,
    REVISION_SEEN,
    SEQUENCE,
    SOURCE,
    START,
    STATE,
    STATUS_COUNT,
    SUBMISSION_WORDS,
    TAG,
    State,
    Status,
)
from gpuq.ordering import (
    as_signed,
    as_word,
    compare_exchange,
    load_acquire,
    load_relaxed,
    relax,
    store_relaxed,
    store_release,
)

# Columns of a request's record.
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
REQUEST_TAG = 11
COUNTER = 13  # number of the counter that counts the answer, -1 for none
QUEUED = 12  # 1 while it stands in the ring of requests with pieces left to issue
REQUEST_WORDS = 16

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
STATISTICS_WORDS = STATUS_COUNT + 9

_OK = int(Status.OK)
_END_OF_FILE = int(Status.END_OF_FILE)
_READ_FAILED = int(Status.READ_FAILED)
_COPY_FAILED = int(Status.COPY_FAILED)
_BAD_SOURCE = int(Status.BAD_SOURCE)
_BAD_DESTINATION = int(Status.BAD_DESTINATION)
_BAD_RANGE = int(Status.BAD_RANGE)
_OUT_OF_BOUNDS = int(Status.OUT_OF_BOUNDS)
_BAD_OPTIONS = int(Status.BAD_OPTIONS)
_STATUS_ABORTED = int(Status.ABORTED)
_CLOSING = int(State.CLOSING)
_CLOSED = int(State.CLOSED)
_ABORTED = int(State.ABORTED)

_EINTR, _EAGAIN, _EINVAL, _EIO = errno.EINTR, errno.EAGAIN, errno.EINVAL, errno.EIO
_LARGEST = np.uint64((1 << 63) - 1)

_ADMIT_BATCH = 64
_SWEEP_BATCH = 8
_REAP_BATCH = 64
_REAP_BYTES = 256 << 10
_MOST_INTERRUPTIONS = 1000

# Idling, by passes in a row that did nothing: pause, then yield, then sleep.
_YIELD_AFTER = 64
_SLEEP_AFTER = 512
_SLEEP_NS = 50_000
_SLEEP_LONG_AFTER = 2_000
_SLEEP_LONG_NS = 100_000


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
    requests : array of int64, shape (capacity, REQUEST_WORDS)
    expected : array of int64, shape (capacity,)
        Per slot, the ticket to be admitted next.
    queue : array of int64, shape (capacity,)
        Ring of slots whose requests have pieces left to issue.
    copying : array of int64, shape (buffers,)
        Leases whose copies are under way.
    cursor : array of int64, shape (CURSOR_WORDS,)
    capacity : int
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
    requests: Any
    expected: Any
    queue: Any
    copying: Any
    cursor: Any
    capacity: int
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
) -> Poller:
    """Build a poller's state over a queue's memory, the tables, a pool, a reader and a copier.

    Without `shown`, kernels are shown `control` itself.
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
        requests=np.zeros((capacity, REQUEST_WORDS), dtype=np.int64),
        expected=np.arange(capacity, dtype=np.int64),
        queue=np.zeros(capacity, dtype=np.int64),
        copying=np.zeros(len(staging.free), dtype=np.int64),
        cursor=np.zeros(CURSOR_WORDS, dtype=np.int64),
        capacity=capacity,
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


# --- admit ---------------------------------------------------------------------------------


@inlined
def admit(p: Any) -> Any:
    """Take what kernels have posted, up to a batch; return how many requests that were."""
    cursor = p.cursor
    admitted = 0
    while admitted < _ADMIT_BATCH and admit_slot(p, cursor[HEAD] & (p.capacity - 1)):
        admitted += 1
        advance_head(p)
    for _ in range(min(_SWEEP_BATCH, p.capacity)):
        if admit_slot(p, cursor[SWEEP]):
            admitted += 1
        cursor[SWEEP] = (cursor[SWEEP] + 1) & (p.capacity - 1)
    advance_head(p)
    return admitted


@inlined
def seal(p: Any) -> Any:
    """Admit all that stands in the slots of a closing queue; nothing is admitted after it.

    A kernel that goes on posting would otherwise keep the queue from ever closing. What it posts
    from now on is answered by STATE.
    """
    admitted = 0
    for slot in range(p.capacity):
        if admit_slot(p, slot):
            admitted += 1
    p.cursor[IS_SEALED] = 1
    return admitted


@inlined
def advance_head(p: Any) -> None:
    """Move the head past tickets that were admitted already, out of turn ones included."""
    head = p.cursor[HEAD]
    while p.expected[head & (p.capacity - 1)] > head:
        head += 1
    p.cursor[HEAD] = head


@inlined
def admit_slot(p: Any, slot: Any) -> Any:
    """Admit what stands in a slot, if it is the submission that this slot waits for."""
    ticket = p.expected[slot]
    base = slot * SUBMISSION_WORDS
    words = p.submissions
    # Pairs with the producer's release in `publish`: the other words are whole.
    if as_signed(load_acquire(words, base + SEQUENCE)) != ticket + 1:
        return False
    request = p.requests[slot]
    if request[ACTIVE] == 1:
        return False
    p.expected[slot] = ticket + p.capacity
    count_outstanding(p, 1)
    request[ACTIVE] = 1
    request[TICKET] = ticket
    request[PIECES] = 0
    request[QUEUED] = 0
    request[STATUS] = _OK
    request[ERRNO] = 0
    request[SOURCE_BASE] = -1
    request[DESTINATION_BASE] = -1
    request[COUNTER] = -1
    request[REQUEST_TAG] = as_signed(load_relaxed(words, base + TAG))
    status = examine(p, request, base)
    request[STATUS] = status
    if status != _OK or request[BEGIN] == request[FINISH]:
        complete(p, slot)
    else:
        enqueue(p, slot)
    return True


@inlined
def examine(p: Any, request: Any, base: Any) -> Any:
    """Copy a submission's words, each loaded once, into the record, and judge the copies."""
    words = p.submissions
    source = as_signed(load_relaxed(words, base + SOURCE))
    destination = as_signed(load_relaxed(words, base + DESTINATION))
    start_word = load_relaxed(words, base + START)
    end_word = load_relaxed(words, base + END)
    offset_word = load_relaxed(words, base + OFFSET)
    options = load_relaxed(words, base + OPTIONS)
    if options > as_word(len(p.counters) // COUNTER_WORDS):
        return _BAD_OPTIONS
    request[COUNTER] = as_signed(options) - 1

    source_base = lookup(p.sources, SOURCE_WORDS, len(p.sources) // SOURCE_WORDS, source)
    if source_base < 0:
        return _BAD_SOURCE
    destination_base = lookup(
        p.destinations, DESTINATION_WORDS, len(p.destinations) // DESTINATION_WORDS, destination
    )
    if destination_base < 0:
        return _BAD_DESTINATION
    if start_word > end_word:
        return _BAD_RANGE
    if end_word > _LARGEST or offset_word > _LARGEST:
        return _OUT_OF_BOUNDS
    start, end, offset = as_signed(start_word), as_signed(end_word), as_signed(offset_word)
    if start < p.sources[source_base + LIMIT_START] or end > p.sources[source_base + LIMIT_END]:
        return _OUT_OF_BOUNDS
    room = p.destinations[destination_base + NBYTES] - (end - start)
    if room < 0 or offset > room:
        return _OUT_OF_BOUNDS

    request[BEGIN] = start
    request[FINISH] = end
    request[NEXT] = start
    request[TARGET_ADDRESS] = p.destinations[destination_base + ADDRESS] + offset
    if start == end:
        return _OK
    alignment, _ = access(p, source_base)
    begin = span_start(start, alignment)
    if end - begin > p.staging.buffer_bytes:
        # More than one piece: nothing must be copied where the end is missing already.
        # What the system remembers is asked first, which never waits for a server.
        size = cached_size_of(p.sources[source_base + BUFFERED_DESCRIPTOR])
        if size < end:
            size = size_of(p.sources[source_base + BUFFERED_DESCRIPTOR])
        if size < 0:
            request[ERRNO] = -size
            return _READ_FAILED
        if size < end:
            return _END_OF_FILE
    request[SOURCE_BASE] = source_base
    request[DESTINATION_BASE] = destination_base
    add_in_flight(p.sources, source_base, 1)
    add_in_flight(p.destinations, destination_base, 1)
    return _OK


@inlined
def access(p: Any, source_base: Any) -> Any:
    """Return (alignment, descriptor) of how a source is read now."""
    if p.sources[source_base + IS_DIRECT] == 1:
        return p.sources[source_base + ALIGNMENT], p.sources[source_base + DIRECT_DESCRIPTOR]
    return 1, p.sources[source_base + BUFFERED_DESCRIPTOR]


# --- issue ---------------------------------------------------------------------------------


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


# --- reap ----------------------------------------------------------------------------------


@inlined
def reap(p: Any) -> Any:
    """Take finished reads, up to a batch of them and of bytes copied; return how many.

    Large reads come back in lots; to copy them all before the next is issued would leave the
    storage idle.
    """
    enough = p.statistics[STATISTICS_BYTES] + _REAP_BYTES
    for reaped in range(_REAP_BATCH):
        lease, result = reap_read(p.reader)
        if lease < 0:
            return reaped
        p.cursor[READS] -= 1
        arrive(p, lease, result)
        if p.statistics[STATISTICS_BYTES] >= enough:
            return reaped + 1
    return _REAP_BATCH


@inlined
def arrive(p: Any, lease: Any, result: Any) -> None:
    """Judge one finished read alone: copy, read on, or fail its request."""
    record = p.staging.leases[lease]
    request = p.requests[record[LEASE_SLOT]]
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
        verdict = judge_read(record[RESUMED], result, record[FILLED], record[SKIP] + record[WANTED])
        if verdict == ENOUGH:
            copy_piece(p, lease)
            return
        count(p, STATISTICS_SHORT_READS, 1)
        if verdict == RESUME:
            record[FILLED] = reached
            count(p, STATISTICS_RETRIES, 1)
            read_from(p, lease, span_start(reached, record[LEASE_ALIGNMENT]))
        else:
            fail_piece(p, lease, _END_OF_FILE, 0)


@inlined
def arrive_failed(p: Any, lease: Any, number: Any) -> None:
    """Handle a read that returned an errno."""
    record = p.staging.leases[lease]
    source_base = p.requests[record[LEASE_SLOT], SOURCE_BASE]
    if number == _EINTR or number == _EAGAIN:
        record[INTERRUPTIONS] += 1
        if record[INTERRUPTIONS] < _MOST_INTERRUPTIONS:
            count(p, STATISTICS_RETRIES, 1)
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
        count(p, STATISTICS_RETRIES, 1)
        record[DESCRIPTOR] = p.sources[source_base + BUFFERED_DESCRIPTOR]
        record[LEASE_IS_DIRECT] = 0
        record[LEASE_ALIGNMENT] = 1
        record[FILLED] = 0
        read_from(p, lease, 0)
        return
    store_release(p.statistics, STATISTICS_LAST_ERRNO, number)
    fail_piece(p, lease, _READ_FAILED, number)


# --- copy and retire -----------------------------------------------------------------------


@inlined
def copy_piece(p: Any, lease: Any) -> None:
    """Start the copy of a piece whose bytes are all there."""
    begin_copy(p.staging, lease)
    record = p.staging.leases[lease]
    origin = buffer_address(p.staging, lease) + record[SKIP]
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


# --- the loop ------------------------------------------------------------------------------


@compiled
def poll_once(p: Any) -> Any:
    """Do one bounded step of everything; return how much was done."""
    store_release(p.shown, HEARTBEAT, load_relaxed(p.shown, HEARTBEAT) + as_word(1))
    # Pairs with the host's fetch-and-add in `Service.close_entry`, see there.
    store_release(p.control, REVISION_SEEN, load_acquire(p.control, REVISION))
    done = retire(p) + reap(p)
    state = as_signed(load_acquire(p.control, STATE))
    if state != _ABORTED:
        if state != _CLOSING:
            done += admit(p)
        elif p.cursor[IS_SEALED] == 0:
            done += seal(p)
        done += issue(p)
        store_release(p.statistics, STATISTICS_HIGH_WATER, p.staging.counts[HIGH_WATER])
    hand_over(p)
    return done


@inlined
def rest(p: Any, idle: Any) -> None:
    """Let others run, the longer the more passes in a row did nothing."""
    if idle < _YIELD_AFTER:
        relax(0)
    elif idle < _SLEEP_AFTER:
        relax(idle)
    elif p.cursor[READS] > 0:
        await_read(p.reader, _SLEEP_NS)
    elif idle < _SLEEP_LONG_AFTER:
        sleep_ns(_SLEEP_NS)
    else:
        sleep_ns(_SLEEP_LONG_NS)


@compiled
def serve(p: Any) -> Any:
    """Serve until the queue is closed and drained, or aborted; return an errno, 0 for none.

    On return of 0 no read and no copy is in flight. A reader that fails ends the queue at once,
    and its reads may still be in flight: their buffers must outlive them.
    """
    idle = 0
    while True:
        done = poll_once(p)
        if p.cursor[FAILURE] != 0:
            return p.cursor[FAILURE]
        idle = 0 if done > 0 else idle + 1
        if done == 0:
            state = as_signed(load_acquire(p.control, STATE))
            if state == _ABORTED and p.cursor[READS] == 0 and p.cursor[COPIES] == 0:
                return 0
            if p.cursor[IS_SEALED] == 1 and p.cursor[REQUESTS] == 0:
                end_queue(p, _CLOSED)
                return 0
            rest(p, idle)

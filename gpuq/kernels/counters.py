"""Counted requests: one word to wait on for many requests, and no flag to consume for each.

A block that needs 64 slices posts 64 counted requests and waits for one counter. Counts only
grow and are never reset, so a counter serves launch after launch: waiters *take* counts, as from
a semaphore. What was taken stands in device memory, what was answered in mapped memory.

===============  =====================  ===================================
word             writer                 order
===============  =====================  ===================================
counters COUNTS  the poller             release / acquire, system
counters HISTORY the poller             relaxed, ordered by COUNTS
taken[counter]   waiters                compare-and-swap, device
===============  =====================  ===================================

The rule for exact answers: wait for all that is outstanding on a counter. A counter says how
many requests were answered, not which. When a wait takes fewer than were answered, it cannot
know whose failures it sees; it reports them and leaves them for the next wait too, so that no
wait says OK over a missing slice. Of more than HISTORY_WORDS failures since then, it reports the
oldest that is still known.
"""

from __future__ import annotations

from typing import Any

from gpuq.compiling import protocol
from gpuq.kernels.queue import await_slot, publish_with
from gpuq.layout import (
    COUNTED,
    COUNTER_WORDS,
    COUNTS,
    COUNTS_FAILED_MASK,
    COUNTS_SHIFT,
    FLAG_STATUS_MASK,
    HISTORY,
    HISTORY_WORDS,
    LINE_WORDS,
    STATE,
    State,
    Status,
)
from gpuq.ordering import (
    as_signed,
    as_word,
    clock_ns,
    compare_exchange,
    load_acquire,
    load_acquire_device,
    load_relaxed,
    relax,
)

_OK = int(Status.OK)
_PENDING = int(Status.PENDING)
_BAD_OPTIONS = int(Status.BAD_OPTIONS)
_STALE = int(Status.STALE)
_TIMED_OUT = int(Status.TIMED_OUT)
_ABORTED = int(Status.ABORTED)
_RUNNING = int(State.RUNNING)
_CLOSING = int(State.CLOSING)

_ANSWERS_MASK = (1 << (64 - COUNTS_SHIFT)) - 1
_SPINS_PER_LOOK = 16
_FOREVER = -1
_LONGEST_NS = 1 << 61


@protocol
def is_counter(q: Any, counter: Any) -> Any:
    """Whether the queue has a counter of this number."""
    return 0 <= counter < len(q.counters) // COUNTER_WORDS


@protocol
def post_counted_at(
    q: Any,
    counter: Any,
    source: Any,
    destination: Any,
    offset: Any,
    start: Any,
    end: Any,
    tag: Any,
) -> Any:
    """Ask like `post_at`; the answer is counted by a counter instead of waited for by ticket.

    Parameters
    ----------
    q : Queue
    counter : int
        Handle, from ``loader.counter().handle``.
    source, destination, offset, start, end, tag
        As for `post_at`.

    Returns
    -------
    int
        ``Status.OK`` when it was posted; ``Status.NO_SLOT``, ``Status.ABORTED`` or, for a
        handle that is none, ``Status.BAD_OPTIONS`` when nothing was.
    """
    number = as_signed(counter)
    if not is_counter(q, number):
        return _BAD_OPTIONS
    ticket = await_slot(q, COUNTED)
    if ticket < 0:
        return -ticket
    publish_with(q, ticket, source, destination, offset, start, end, tag, number + 1)
    return _OK


@protocol
def post_counted(
    q: Any, counter: Any, source: Any, destination: Any, start: Any, end: Any, tag: Any
) -> Any:
    """Ask like `post`; the answer is counted. `post_counted_at` with offset 0."""
    return post_counted_at(q, counter, source, destination, 0, start, end, tag)


@protocol
def failure_of(q: Any, counter: Any, ordinal: Any) -> Any:
    """Return the status of the failure with this number, counted from 0, as far as it is kept."""
    position = counter * COUNTER_WORDS + HISTORY + (ordinal & COUNTS_FAILED_MASK) % HISTORY_WORDS
    return as_signed(load_relaxed(q.counters, position)) & FLAG_STATUS_MASK


@protocol
def answers_between(taken: Any, answered: Any) -> Any:
    """Return how many answers lie between two COUNTS words; both may have wrapped around."""
    return ((answered >> COUNTS_SHIFT) - (taken >> COUNTS_SHIFT)) & _ANSWERS_MASK


@protocol
def load_counts(q: Any, counter: Any) -> Any:
    """Load what was taken of a counter and what was answered, in this order.

    So no fewer are answered than taken: whoever took them had seen them answered, and the acquire
    pairs with its compare-and-swap.
    """
    taken = as_signed(load_acquire_device(q.taken, counter * LINE_WORDS))
    # Acquire pairs with the poller's release in `count_answer`: the bytes and the history.
    answered = as_signed(load_acquire(q.counters, counter * COUNTER_WORDS + COUNTS))
    return taken, answered


@protocol
def take_counts(q: Any, counter: Any, count: Any) -> Any:
    """Take `count` answers: OK or a failure's status; PENDING: too few; STALE: look again."""
    taken, answered = load_counts(q, counter)
    there = answers_between(taken, answered)
    if there < count:
        return _PENDING
    failures = (answered - taken) & COUNTS_FAILED_MASK
    failed_before = taken & COUNTS_FAILED_MASK
    failed_after = answered & COUNTS_FAILED_MASK if there == count else failed_before
    now_taken = ((taken >> COUNTS_SHIFT) + count) << COUNTS_SHIFT | failed_after
    seen = compare_exchange(q.taken, counter * LINE_WORDS, as_word(taken), as_word(now_taken))
    if as_signed(seen) != taken:
        return _STALE
    if failures == 0:
        return _OK
    # The first failure, or the oldest that the history still holds.
    return failure_of(q, counter, failed_before + max(failures - HISTORY_WORDS, 0))


@protocol
def settle_counter(q: Any, counter: Any, count: Any, timeout_ns: Any) -> Any:
    """Spin until `count` answers were taken, or none can come any more, or the time is over."""
    if not is_counter(q, counter) or count < 0:
        return _BAD_OPTIONS
    spins = 0
    deadline = 0
    is_over = False
    while True:
        status = take_counts(q, counter, count)
        if status == _STALE:
            # Another waiter took some: so often at most, and what is there may still suffice.
            continue
        if status != _PENDING:
            return status
        if is_over:
            return _ABORTED
        if spins % _SPINS_PER_LOOK == 0:
            state = as_signed(load_acquire(q.control, STATE))
            if state != _RUNNING and state != _CLOSING:
                # The state is raised after the last answer: look once more.
                is_over = True
                continue
        if timeout_ns >= 0:
            now = clock_ns()
            if spins == 0:
                deadline = now + timeout_ns
            if now >= deadline:
                return _TIMED_OUT
        relax(spins)
        spins += 1


@protocol
def wait_counter(q: Any, counter: Any, count: Any) -> Any:
    """Wait until `count` counted requests were answered that no earlier wait has taken.

    By one thread; `wait_counter_block` is for all threads of a block. It waits for all `count`
    answers, failed ones included: when it returns, none of these requests is in flight.

    Parameters
    ----------
    q : Queue
    counter : int
        Handle, from ``loader.counter().handle``.
    count : int
        How many answers to take; all that are outstanding, see the module's rule.

    Returns
    -------
    int
        ``Status.OK`` when none had failed; else the status of the first failure. ``ABORTED``
        when the queue ended, ``BAD_OPTIONS`` for a handle that is none.
    """
    return settle_counter(q, as_signed(counter), as_signed(count), _FOREVER)


@protocol
def wait_counter_for(q: Any, counter: Any, count: Any, timeout_ns: Any) -> Any:
    """Wait like `wait_counter`, at most `timeout_ns` nanoseconds; ``TIMED_OUT`` takes nothing."""
    bound = min(max(as_signed(timeout_ns), 0), _LONGEST_NS)
    return settle_counter(q, as_signed(counter), as_signed(count), bound)


@protocol
def poll_counter(q: Any, counter: Any) -> Any:
    """Return how many answers a counter holds that no wait has taken; 0 for no counter."""
    number = as_signed(counter)
    if not is_counter(q, number):
        return 0
    taken, answered = load_counts(q, number)
    return answers_between(taken, answered)

"""The kernel's half of the protocol: post a request, see its answer, free its slot.

One source for all targets: plain Python in the simulator, compiled by Numba for the CPU and to
PTX for a GPU. The host's half is `gpuq.host.poller`; they share the bytes of `gpuq.layout`.

The protocol
------------
::

    claim    a slot is free for ticket t when turns[slot] == t. Only then is t taken from the
             tail, by compare-and-swap, so a producer that gives up leaves nothing behind.
    publish  write words 1 to 7, then SEQUENCE = t + 1 with release: that alone says "ready".
    answer   the host stores flag[slot] = (t + 1) << 16 | errno << 8 | status with release, as
             the last thing that happens to the request.
    consume  the waiter that swaps turns[slot] from t to t + capacity owns the answer and frees
             the slot. Exactly one can: any other gets STALE.
    counted  nobody waits for a counted request (`gpuq.kernels.counters`). Its producer leaves
             COUNTED + t as the turn, and the next producer takes the answer's flag for the turn.

Each word has one writer:

===================  =====================================  ==================================
word                 writer                                 order
===================  =====================================  ==================================
tail                 producers                              compare-and-swap, device
turns[slot]          the waiter that consumes the slot      compare-and-swap / acquire, device
                     or the producer that claimed it        release / acquire, device
submission 1 to 7    the producer that holds the ticket     plain, ordered by SEQUENCE
submission SEQUENCE  that producer                          release / acquire, system
flag[slot]           the poller                             release / acquire, system
control              the host                               release / acquire, system
===================  =====================================  ==================================

Tickets are signed: a negative one is ``-Status``, what `post` returns where nothing was posted.
`wait` and its kin hand such a ticket's status back, so that ``wait(q, post(...))`` needs no test
in between.

Slots are taken in the order of tickets, so an answered ticket that is not waited for stops every
`post` once the others have gone round the queue, however few are outstanding. A thread that
posts while it holds tickets can therefore block itself and all others: it must use `try_post`,
and wait for the oldest of its own where that says NO_SLOT. `post` is for threads that hold none;
its bound, the queue's ``post_timeout_ns``, turns a breach of the rule into ``-Status.NO_SLOT``.
"""

from __future__ import annotations

from typing import Any

from gpuq.compiling import protocol
from gpuq.layout import (
    COUNTED,
    DESTINATION,
    END,
    FLAG_ERRNO_MASK,
    FLAG_ERRNO_SHIFT,
    FLAG_SEQUENCE_SHIFT,
    FLAG_STATUS_MASK,
    FLAG_WORDS,
    NO_TICKET,
    OFFSET,
    OPTIONS,
    SEQUENCE,
    SOURCE,
    START,
    STATE,
    SUBMISSION_WORDS,
    TAG,
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
    store_release,
    store_release_device,
)

_OK = int(Status.OK)
_PENDING = int(Status.PENDING)
_STALE = int(Status.STALE)
_TIMED_OUT = int(Status.TIMED_OUT)
_NO_SLOT = int(Status.NO_SLOT)
_ABORTED = int(Status.ABORTED)
_RUNNING = int(State.RUNNING)
_CLOSING = int(State.CLOSING)

_CLAIM_ATTEMPTS = 64
_SPINS_PER_LOOK = 16
_FOREVER = -1
_LONGEST_NS = 1 << 61
"""73 years: what a time-out is cut to, so that the end of it does not overflow a clock's word."""


@protocol
def is_free(q: Any, turn: Any, ticket: Any) -> Any:
    """Whether a slot whose turn word is `turn` may be used by `ticket`."""
    if turn == ticket:
        return True
    before = ticket - q.capacity
    if turn != COUNTED + before:
        return False
    # Nobody waits for a counted request: the slot is free once its answer is there.
    return flag_of(q, before) >> FLAG_SEQUENCE_SHIFT == before + 1


@protocol
def claim(q: Any) -> Any:
    """Take the next ticket if its slot is free; return it, or ``-Status.NO_SLOT``."""
    return claim_marked(q, 0)


@protocol
def claim_marked(q: Any, mark: Any) -> Any:
    """Claim, and leave `mark` in the turn besides the ticket: COUNTED or 0."""
    ticket = as_signed(load_relaxed(q.tail, 0))
    for _ in range(_CLAIM_ATTEMPTS):
        slot = ticket & (q.capacity - 1)
        # Acquire pairs with the consumer's compare-and-swap: its loads of the slot's flag are
        # over before this producer's stores to the slot begin.
        turn = as_signed(load_acquire_device(q.turns, slot))
        if is_free(q, turn, ticket):
            before = as_signed(compare_exchange(q.tail, 0, as_word(ticket), as_word(ticket + 1)))
            if before == ticket:
                if turn != ticket + mark:
                    # The slot is this producer's: no other claim can succeed on it now.
                    store_release_device(q.turns, slot, as_word(ticket + mark))
                return ticket
            ticket = before
        else:
            now = as_signed(load_relaxed(q.tail, 0))
            if now == ticket:
                return -_NO_SLOT
            ticket = now
    return -_NO_SLOT


@protocol
def await_slot(q: Any, mark: Any) -> Any:
    """Claim like `claim_marked`, spinning for a slot at most the queue's ``post_timeout_ns``."""
    ticket = claim_marked(q, mark)
    spins = 0
    deadline = 0
    while ticket < 0:
        if as_signed(load_acquire(q.control, STATE)) != _RUNNING:
            return -_ABORTED
        now = clock_ns()
        if spins == 0:
            deadline = now + q.post_timeout_ns
        elif now >= deadline:
            return -_NO_SLOT
        relax(spins)
        spins += 1
        ticket = claim_marked(q, mark)
    return ticket


@protocol
def publish(
    q: Any, ticket: Any, source: Any, destination: Any, offset: Any, start: Any, end: Any, tag: Any
) -> None:
    """Write the submission of a claimed ticket and make it visible to the poller."""
    publish_with(q, ticket, source, destination, offset, start, end, tag, 0)


@protocol
def publish_with(
    q: Any,
    ticket: Any,
    source: Any,
    destination: Any,
    offset: Any,
    start: Any,
    end: Any,
    tag: Any,
    options: Any,
) -> None:
    """Publish, with an OPTIONS word."""
    words = q.submissions
    base = (ticket & (q.capacity - 1)) * SUBMISSION_WORDS
    words[base + SOURCE] = as_word(source)
    words[base + DESTINATION] = as_word(destination)
    words[base + START] = as_word(start)
    words[base + END] = as_word(end)
    words[base + OFFSET] = as_word(offset)
    words[base + TAG] = as_word(tag)
    words[base + OPTIONS] = as_word(options)
    # Pairs with the poller's acquire of the same word in `admit`.
    store_release(words, base + SEQUENCE, as_word(ticket + 1))


@protocol
def try_post_at(
    q: Any, source: Any, destination: Any, offset: Any, start: Any, end: Any, tag: Any
) -> Any:
    """Post like `post_at` if a slot is free at this moment; never spin for one.

    Returns
    -------
    int
        The ticket, or ``-Status.NO_SLOT``.
    """
    ticket = claim(q)
    if ticket >= 0:
        publish(q, ticket, source, destination, offset, start, end, tag)
    return ticket


@protocol
def try_post(q: Any, source: Any, destination: Any, start: Any, end: Any, tag: Any) -> Any:
    """Post like `post` if a slot is free at this moment; never spin for one.

    Returns
    -------
    int
        The ticket, or ``-Status.NO_SLOT``.
    """
    return try_post_at(q, source, destination, 0, start, end, tag)


@protocol
def post_at(
    q: Any, source: Any, destination: Any, offset: Any, start: Any, end: Any, tag: Any
) -> Any:
    """Ask for bytes ``[start, end)`` of a source, to land at `offset` of a destination.

    Parameters
    ----------
    q : Queue
        ``loader.queue``.
    source, destination : int
        Handles, from ``loader.open(...).handle`` and ``loader.register(...).handle``.
    offset : int
        Where the first byte goes, in bytes from the destination's begin.
    start, end : int
        Range in the source, in bytes; `end` is one past the last.
    tag : int
        64 bits of the caller's own, for traces.

    Returns
    -------
    int
        A ticket for `wait`, `wait_for` or `poll`. Negative where nothing was posted:
        ``-Status.NO_SLOT`` when no slot came free within the queue's ``post_timeout_ns``,
        ``-Status.ABORTED`` when the queue is closing or was aborted while this waited.
    """
    ticket = await_slot(q, 0)
    if ticket >= 0:
        publish(q, ticket, source, destination, offset, start, end, tag)
    return ticket


@protocol
def post(q: Any, source: Any, destination: Any, start: Any, end: Any, tag: Any) -> Any:
    """Ask for bytes ``[start, end)`` of a source, to land at the begin of a destination.

    `post_at` with offset 0; see there for parameters and for what is returned.
    """
    return post_at(q, source, destination, 0, start, end, tag)


@protocol
def flag_of(q: Any, ticket: Any) -> Any:
    """Load the completion flag of the ticket's slot (acquire), as a signed word."""
    # Pairs with the poller's release in `complete`: the bytes are visible with the flag.
    return as_signed(load_acquire(q.flags, (ticket & (q.capacity - 1)) * FLAG_WORDS))


@protocol
def judge(flag: Any, ticket: Any) -> Any:
    """Say what a completion flag means for `ticket`: a final status, STALE or PENDING."""
    sequence = flag >> FLAG_SEQUENCE_SHIFT
    if sequence == ticket + 1:
        return flag & FLAG_STATUS_MASK
    if sequence > ticket + 1:
        return _STALE
    return _PENDING


@protocol
def judge_silence(q: Any, ticket: Any) -> Any:
    """Say whether an answer to `ticket` can still come: PENDING if so, else what to return."""
    if as_signed(load_relaxed(q.tail, 0)) <= ticket:
        return _STALE
    state = as_signed(load_acquire(q.control, STATE))
    if state == _RUNNING or state == _CLOSING:
        return _PENDING
    # The state is raised after the last answer: an answer that is not here now never comes.
    status = judge(flag_of(q, ticket), ticket)
    return _ABORTED if status == _PENDING else status


@protocol
def status_in(ticket: Any) -> Any:
    """Return the status that a negative ticket carries."""
    return _OK if ticket == NO_TICKET else -ticket


@protocol
def poll(q: Any, ticket: Any) -> Any:
    """Look once whether a request was answered; consume nothing.

    Returns
    -------
    int
        ``Status.PENDING``, or the request's status, also where another thread consumed it
        already. The bytes may be read when it is ``Status.OK``; the slot stays taken until
        `wait` is called.
    """
    ticket = as_signed(ticket)
    if ticket < 0:
        return status_in(ticket)
    status = judge(flag_of(q, ticket), ticket)
    return judge_silence(q, ticket) if status == _PENDING else status


@protocol
def errno_of(q: Any, ticket: Any) -> Any:
    """Return the errno in a ticket's completion flag, 0 where there is none.

    Meaningful after `poll` said ``Status.READ_FAILED`` and before `wait` frees the slot.
    """
    ticket = as_signed(ticket)
    if ticket < 0:
        return 0
    flag = flag_of(q, ticket)
    if flag >> FLAG_SEQUENCE_SHIFT != ticket + 1:
        return 0
    return (flag >> FLAG_ERRNO_SHIFT) & FLAG_ERRNO_MASK


@protocol
def consume(q: Any, ticket: Any, status: Any) -> Any:
    """Free the slot of an answered ticket; return `status`, or STALE where another did it."""
    # Acquire-release pairs with `claim`: this thread's loads of the flag come before the free.
    slot = ticket & (q.capacity - 1)
    turn = compare_exchange(q.turns, slot, as_word(ticket), as_word(ticket + q.capacity))
    return status if as_signed(turn) == ticket else _STALE


@protocol
def settle(q: Any, ticket: Any, timeout_ns: Any) -> Any:
    """Spin until the ticket's answer is there or can no longer come, or the time is over."""
    if ticket < 0:
        return status_in(ticket)
    spins = 0
    deadline = 0
    while True:
        status = judge(flag_of(q, ticket), ticket)
        if status == _STALE:
            return _STALE
        if status != _PENDING:
            return consume(q, ticket, status)
        if spins % _SPINS_PER_LOOK == 0:
            status = judge_silence(q, ticket)
            if status == _STALE or status == _ABORTED:
                return status
        if timeout_ns >= 0:
            now = clock_ns()
            if spins == 0:
                deadline = now + timeout_ns
            if now >= deadline:
                return _TIMED_OUT
        relax(spins)
        spins += 1


@protocol
def wait(q: Any, ticket: Any) -> Any:
    """Wait for a request's answer and free its slot.

    Parameters
    ----------
    q : Queue
    ticket : int
        From `post`. A negative one is handed back as the status that it carries; ``NO_TICKET``
        is ``OK``.

    Returns
    -------
    int
        A `Status`. ``OK``: every byte is in the destination and this thread may read it.
        ``STALE``: the ticket was consumed before. ``ABORTED``: the queue ended without an
        answer; bytes may still arrive in the destination until the `Loader` is closed.
    """
    return settle(q, as_signed(ticket), _FOREVER)


@protocol
def wait_for(q: Any, ticket: Any, timeout_ns: Any) -> Any:
    """Wait like `wait`, for at most `timeout_ns` nanoseconds.

    Returns
    -------
    int
        A `Status`. ``TIMED_OUT`` leaves the ticket outstanding: wait for it again. The
        destination still belongs to the request.
    """
    return settle(q, as_signed(ticket), min(max(as_signed(timeout_ns), 0), _LONGEST_NS))


@protocol
def pull_at(
    q: Any, source: Any, destination: Any, offset: Any, start: Any, end: Any, tag: Any
) -> Any:
    """Ask like `post_at` and wait for the answer; return its `Status`."""
    return wait(q, post_at(q, source, destination, offset, start, end, tag))


@protocol
def pull(q: Any, source: Any, destination: Any, start: Any, end: Any, tag: Any) -> Any:
    """Ask like `post` and wait for the answer; return its `Status`."""
    return wait(q, post(q, source, destination, start, end, tag))

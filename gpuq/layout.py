"""The wire format: what a kernel and the host write for each other, word by word.

Both halves of gpuq meet only in the bytes described here. Everything is a flat array of
64-bit words: Numba stores an unaligned record field one byte at a time, which is neither
atomic nor fast over a bus.

Glossary
--------
submission
    Eight words that a kernel writes to ask for bytes.
completion flag
    One word that the host writes to answer.
ticket
    Position claimed from the tail, counted from 0 and never used twice.
slot, lap
    ``ticket & (capacity - 1)`` and ``ticket >> log2(capacity)``.
sequence
    ``ticket + 1``. It publishes a submission, and nothing else does, so no payload,
    all-zero ones included, can be mistaken for "not there yet".
turn
    Per slot: the ticket that may use the slot next.
counter
    Counts answers instead of handing each to a waiter.
handle
    ``generation << 32 | index`` of an entry in a capability table.

A ticket fits 47 bits, because a completion flag carries ``ticket + 1`` above its low 16 bits
and stays a non-negative signed word. At ten million requests a second that lasts 162 days
of one queue.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

WORD_BYTES = 8
LINE_WORDS = 8
"""Words in a cache line of 64 bytes; words with different writers stand on different lines."""

# A submission: one cache line, written by the producer that holds the ticket.
SUBMISSION_WORDS = 8
SEQUENCE = 0  # ticket + 1; stored last (release), loaded first by the poller (acquire)
SOURCE = 1  # handle
DESTINATION = 2  # handle
START = 3  # first byte in the source
END = 4  # one past the last byte
OFFSET = 5  # first byte in the destination
TAG = 6  # the caller's own 64 bits
OPTIONS = 7  # 0, or 1 + the number of the counter that counts the answer

# A completion flag: one word on a line of its own, written by the poller (release).
FLAG_WORDS = LINE_WORDS
FLAG_STATUS_MASK = 0xFF
FLAG_ERRNO_SHIFT = 8
FLAG_ERRNO_MASK = 0xFF
FLAG_SEQUENCE_SHIFT = 16

# A counter: a line of mapped words, written by the poller.
COUNTER_WORDS = LINE_WORDS
COUNTS = 0  # answers << COUNTS_SHIFT | failures among them (release)
COUNTS_SHIFT = 24
COUNTS_FAILED_MASK = (1 << COUNTS_SHIFT) - 1
HISTORY = 1  # statuses of the newest failures, the f-th (from 0) at HISTORY + f % HISTORY_WORDS
HISTORY_WORDS = 4

# What stands in a slot's turn while a counted request holds the slot: nobody waits for its flag,
# so the next producer of the slot looks at the flag itself.
COUNTED = 1 << 62

# The control words: written by the host only.
CONTROL_WORDS = 4 * LINE_WORDS
STATE = 0  # State; only ever raised
HEARTBEAT = LINE_WORDS  # passes that the poller has begun
REVISION_SEEN = LINE_WORDS + 1  # the poller: REVISION as its newest pass found it
REVISION = 2 * LINE_WORDS  # host threads: how often a handle was withdrawn
TRACE_TAKEN = 3 * LINE_WORDS  # a host thread: records that were taken from the trace

# Device memory of the producers: the tail alone on its line, and one turn per slot.
TAIL_WORDS = LINE_WORDS

MAX_CAPACITY = 1 << 20
MAX_TICKET = (1 << 47) - 2

NO_TICKET = -(1 << 8)
"""What to wait for where nothing was posted and nothing went wrong: `wait` says OK at once."""

HANDLE_INDEX_BITS = 32
HANDLE_INDEX_MASK = (1 << HANDLE_INDEX_BITS) - 1
MAX_GENERATION = (1 << 31) - 1
"""Handles stay non-negative in a signed word. Generations start at 1, so 0 is no handle."""


class Status(IntEnum):
    """How a request stands. Kernels compare against these; they are plain integers there.

    The first group comes from the host in a completion flag, the second from the kernel-side
    functions themselves.
    """

    OK = 0
    """Every byte of ``[start, end)`` is in the destination and visible to the waiter."""
    PENDING = 1
    """Not answered yet (`poll` only)."""
    END_OF_FILE = 2
    """The file ends before ``end``."""
    READ_FAILED = 3
    """The operating system refused the read; the flag carries its errno."""
    COPY_FAILED = 4
    """The bytes were read but could not be brought to the destination."""
    BAD_SOURCE = 5
    """No open source has this handle."""
    BAD_DESTINATION = 6
    """No registered destination has this handle."""
    BAD_RANGE = 7
    """``start`` is greater than ``end``."""
    OUT_OF_BOUNDS = 8
    """The range leaves what the source allows, or the bytes do not fit the destination."""
    BAD_OPTIONS = 9
    """The OPTIONS word says something that this version does not know: no counter, for one."""

    STALE = 10
    """The ticket was consumed already, or was never given out."""
    TIMED_OUT = 11
    """The time is over; the ticket stays outstanding and valid (`wait_for` only)."""
    NO_SLOT = 12
    """No slot was free in time; nothing was posted."""
    ABORTED = 13
    """The queue is closed or was aborted."""


STATUS_COUNT = len(Status)


class State(IntEnum):
    """Life of a queue, in the only order in which it can pass."""

    NEW = 0
    RUNNING = 1
    CLOSING = 2
    """Nothing new is accepted; what was posted is still served."""
    CLOSED = 3
    ABORTED = 4


class Queue(NamedTuple):
    """What a kernel is handed: views of the queue's memory, and nothing that it could free.

    The `Loader` owns the memory. A tuple of arrays is a legal kernel argument on every target.

    Attributes
    ----------
    submissions : array of uint64, ``capacity * SUBMISSION_WORDS``
        Mapped host memory; producers write, the poller reads.
    flags : array of uint64, ``capacity * FLAG_WORDS``
        Mapped host memory; the poller writes, waiters read.
    control : array of uint64, ``CONTROL_WORDS``
        Mapped host memory; the host writes.
    tail : array of uint64, ``TAIL_WORDS``
        Device memory; the next ticket.
    turns : array of uint64, ``capacity``
        Device memory; the ticket that may use each slot next.
    counters : array of uint64, ``number of counters * COUNTER_WORDS``
        Mapped host memory; the poller writes, waiters read.
    taken : array of uint64, ``number of counters * LINE_WORDS``
        Device memory; per counter, the counts that waiters have taken.
    capacity : int
        Slots, a power of two.
    post_timeout_ns : int
        Bound of `post`, in nanoseconds.
    """

    submissions: Any
    flags: Any
    control: Any
    tail: Any
    turns: Any
    counters: Any
    taken: Any
    capacity: int
    post_timeout_ns: int


assert SUBMISSION_WORDS * WORD_BYTES == 64
assert sorted((SEQUENCE, SOURCE, DESTINATION, START, END, OFFSET, TAG, OPTIONS)) == list(
    range(SUBMISSION_WORDS)
)
assert STATE // LINE_WORDS != HEARTBEAT // LINE_WORDS
assert len({word // LINE_WORDS for word in (STATE, REVISION_SEEN, REVISION)}) == 3
assert REVISION < CONTROL_WORDS
assert max(Status) <= FLAG_STATUS_MASK
assert [int(status) for status in Status] == list(range(STATUS_COUNT))
assert FLAG_STATUS_MASK.bit_length() == FLAG_ERRNO_SHIFT
assert FLAG_ERRNO_SHIFT + FLAG_ERRNO_MASK.bit_length() == FLAG_SEQUENCE_SHIFT
assert ((MAX_TICKET + 1) << FLAG_SEQUENCE_SHIFT) | 0xFFFF < 1 << 63
assert (MAX_GENERATION << HANDLE_INDEX_BITS) | HANDLE_INDEX_MASK < 1 << 63
assert max(Status) < -NO_TICKET
assert COUNTED > MAX_TICKET + MAX_CAPACITY
assert HISTORY + HISTORY_WORDS <= COUNTER_WORDS
assert (COUNTS_FAILED_MASK + 1) % HISTORY_WORDS == 0, "the number of a failure wraps around"
assert MAX_CAPACITY & (MAX_CAPACITY - 1) == 0

"""From a submission to a request: what a kernel posted is taken once, judged, and only then used.

A kernel is not trusted. Each word of a submission is loaded once, into the poller's own record,
and that copy is judged and used; what a kernel rewrites afterwards changes nothing. A slot takes
another submission only when its last one was answered, whatever stands in its SEQUENCE. A
producer that claimed a ticket and never publishes it holds up its own slot only: besides the
slot at the head, every pass looks at a few others in turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuq.compiling import inlined
from gpuq.host.completion import complete
from gpuq.host.copier import HOST_MEMORY
from gpuq.host.direct_file import span_start, straight_bytes
from gpuq.host.issuing import enqueue
from gpuq.host.libc import cached_size_of, size_of
from gpuq.host.records import (
    ACTIVE,
    BEGIN,
    COUNTER,
    DESTINATION_BASE,
    ERRNO,
    FINISH,
    HEAD,
    IS_SEALED,
    MAY_GO_STRAIGHT,
    NEXT,
    PIECES,
    QUEUED,
    SOURCE_BASE,
    STATUS,
    SWEEP,
    TARGET_ADDRESS,
    TICKET,
    access,
    count_outstanding,
)
from gpuq.host.tables import (
    ADDRESS,
    BUFFERED_DESCRIPTOR,
    DESTINATION_WORDS,
    IS_DIRECT,
    KIND,
    LIMIT_END,
    LIMIT_START,
    NBYTES,
    ONLY_STAGED,
    SOURCE_WORDS,
    add_in_flight,
    lookup,
)
from gpuq.host.tracing import trace_admission, trace_question
from gpuq.layout import (
    COUNTER_WORDS,
    DESTINATION,
    END,
    OFFSET,
    OPTIONS,
    SEQUENCE,
    SOURCE,
    START,
    SUBMISSION_WORDS,
    TAG,
    Status,
)
from gpuq.ordering import as_signed, as_word, load_acquire, load_relaxed

_OK = int(Status.OK)
_END_OF_FILE = int(Status.END_OF_FILE)
_READ_FAILED = int(Status.READ_FAILED)
_BAD_SOURCE = int(Status.BAD_SOURCE)
_BAD_DESTINATION = int(Status.BAD_DESTINATION)
_BAD_RANGE = int(Status.BAD_RANGE)
_OUT_OF_BOUNDS = int(Status.OUT_OF_BOUNDS)
_BAD_OPTIONS = int(Status.BAD_OPTIONS)
_LARGEST = np.uint64((1 << 63) - 1)
_ADMIT_BATCH = 64
_SWEEP_BATCH = 8


@inlined
def admit(p: Any) -> Any:
    """Take what kernels have posted, up to a batch; return how many requests that were.

    In the order of their tickets, as long as their producers keep it: the slot at the head comes
    first, and others right after it was seen empty.
    """
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
    trace_admission(p, request)
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
    start, end, offset = as_signed(start_word), as_signed(end_word), as_signed(offset_word)
    tag = as_signed(load_relaxed(words, base + TAG))
    trace_question(p, request, tag, source, destination, start, end)
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
    if start < p.sources[source_base + LIMIT_START] or end > p.sources[source_base + LIMIT_END]:
        return _OUT_OF_BOUNDS
    room = p.destinations[destination_base + NBYTES] - (end - start)
    if room < 0 or offset > room:
        return _OUT_OF_BOUNDS

    request[MAY_GO_STRAIGHT] = 0
    request[BEGIN] = start
    request[FINISH] = end
    request[NEXT] = start
    request[TARGET_ADDRESS] = p.destinations[destination_base + ADDRESS] + offset
    if start == end:
        return _OK
    alignment, _ = access(p, source_base)
    begin = span_start(start, alignment)
    least = p.straight_bytes
    may_go_straight = (
        least > 0
        and p.destinations[destination_base + KIND] == HOST_MEMORY
        and (p.sources[source_base + IS_DIRECT] == 0 or p.sources[source_base + ONLY_STAGED] == 0)
        and straight_bytes(start, end, request[TARGET_ADDRESS], alignment, least, least) != 0
    )
    request[MAY_GO_STRAIGHT] = 1 if may_go_straight else 0
    has_pieces = end - begin > p.staging.buffer_bytes
    if may_go_straight or has_pieces:
        # More than one piece, or none that is judged before it is in the destination: nothing
        # must be written there where the end is missing already.
        # What the system remembers is asked first, which never waits for a server.
        size = cached_size_of(p.sources[source_base + BUFFERED_DESCRIPTOR])
        if 0 < size < end and not has_pieces:
            # Staged, it is judged by its read, and no other request waits for a server meanwhile.
            request[MAY_GO_STRAIGHT] = 0
            size = end
        elif size < end:
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

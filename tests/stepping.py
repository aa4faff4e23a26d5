"""A queue and a poller without threads: a test posts, steps, and looks, in the order it wants."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import gpuq
from gpuq.host import poller as serving
from gpuq.host import records, tables
from gpuq.host import staging as leases
from gpuq.layout import (
    CONTROL_WORDS,
    COUNTER_WORDS,
    FLAG_ERRNO_MASK,
    FLAG_ERRNO_SHIFT,
    FLAG_SEQUENCE_SHIFT,
    FLAG_STATUS_MASK,
    FLAG_WORDS,
    LINE_WORDS,
    STATE,
    SUBMISSION_WORDS,
    TAIL_WORDS,
    Queue,
    State,
    Status,
)
from gpuq.testing import copiers, readers

ALIGNMENT = 512
DIRECT_NUMBER = 1_000_000
"""A descriptor that nothing opens: the scripted reader only writes it down."""
GUARD = 0xEE
BUFFER = 4096
"""Bytes of a staging buffer."""
DATA = np.random.default_rng(7).integers(0, 256, 20_011, dtype=np.uint8)
COUNTERS = 4


def bare_queue(capacity: int, *, post_timeout_ns: int = 0, state: State = State.RUNNING) -> Queue:
    """Return a queue that nobody serves."""
    control = np.zeros(CONTROL_WORDS, dtype=np.uint64)
    control[STATE] = state
    return Queue(
        submissions=np.zeros(capacity * SUBMISSION_WORDS, dtype=np.uint64),
        flags=np.zeros(capacity * FLAG_WORDS, dtype=np.uint64),
        control=control,
        tail=np.zeros(TAIL_WORDS, dtype=np.uint64),
        turns=np.arange(capacity, dtype=np.uint64),
        counters=np.zeros(COUNTERS * COUNTER_WORDS, dtype=np.uint64),
        taken=np.zeros(COUNTERS * LINE_WORDS, dtype=np.uint64),
        capacity=capacity,
        post_timeout_ns=post_timeout_ns,
    )


def answer(queue: Queue, ticket: int, status: int, errno: int = 0) -> None:
    """Write a completion flag as the poller does."""
    word = (ticket + 1) << FLAG_SEQUENCE_SHIFT | errno << FLAG_ERRNO_SHIFT | status
    queue.flags[(ticket & (queue.capacity - 1)) * FLAG_WORDS] = word


def read_flag(queue: Queue, ticket: int) -> tuple[Status, int]:
    """Return (status, errno) of a ticket as its flag says, PENDING where it says nothing."""
    word = int(queue.flags[(ticket & (queue.capacity - 1)) * FLAG_WORDS])
    if word >> FLAG_SEQUENCE_SHIFT != ticket + 1:
        return Status.PENDING, 0
    return Status(word & FLAG_STATUS_MASK), word >> FLAG_ERRNO_SHIFT & FLAG_ERRNO_MASK


def submission(queue: Queue, ticket: int) -> list[int]:
    """Return the words of a ticket's submission."""
    base = (ticket & (queue.capacity - 1)) * SUBMISSION_WORDS
    return [int(word) for word in queue.submissions[base : base + SUBMISSION_WORDS]]


def poller_over(
    queue: Queue,
    staging: Any,
    sources: Any,
    destinations: Any,
    reader: Any,
    copier: Any,
    **given: Any,
) -> records.Poller:
    """Return a poller over a bare queue and its parts; `given` are further settings."""
    return records.make_poller(
        submissions=queue.submissions,
        flags=queue.flags,
        counters=queue.counters,
        control=queue.control,
        sources=sources.words,
        destinations=destinations.words,
        capacity=queue.capacity,
        staging=staging,
        reader=reader,
        copier=copier,
        **given,
    )


class Stepper:
    """A poller over scripted reads and copies, with one source and one destination.

    Parameters
    ----------
    data : array of uint8
        What the source holds.
    script, copies
        For the reader and the copier.
    size : int, optional
        What the file system says that the source's size is; by default that of `data`.
    direct, must_be_direct, proven : bool
        Of the source.
    """

    def __init__(
        self,
        data: Any,
        script: Any = ((readers.READ, -1),),
        *,
        copies: Any = (copiers.AT_ONCE,),
        capacity: int = 8,
        buffers: int = 4,
        buffer_bytes: int = BUFFER,
        room: int = 1 << 16,
        size: int | None = None,
        direct: bool = True,
        must_be_direct: bool = False,
        proven: bool = False,
        alignment: int = ALIGNMENT,
        merge_bytes: int = 0,
        straight_bytes: int = 0,
        longest_straight: int | None = None,
        longest_buffered: int | None = None,
        trace: int = 0,
    ) -> None:
        self.data = np.ascontiguousarray(data, dtype=np.uint8)
        self.queue = bare_queue(capacity)
        self._memory = np.zeros(buffers * buffer_bytes + 4096, dtype=np.uint8)
        self.staging_address = -(-self._memory.ctypes.data // 4096) * 4096
        self.staging = leases.make_staging(buffers, buffer_bytes, self.staging_address)
        self.sources = tables.CapabilityTable(4, tables.SOURCE_WORDS, "source")
        self.destinations = tables.CapabilityTable(4, tables.DESTINATION_WORDS, "destination")
        self.reader = readers.make_scripted_reader(self.data, script, reads=buffers)
        self.copier = copiers.make_scripted_copier(buffers, copies)
        self.poller = poller_over(
            self.queue,
            self.staging,
            self.sources,
            self.destinations,
            self.reader,
            self.copier,
            merge_bytes=merge_bytes,
            straight_bytes=straight_bytes,
            longest_straight=longest_straight,
            longest_buffered=longest_buffered,
            trace=trace,
        )
        # Where the size is asked for, a real file must stand behind the buffered descriptor.
        self.buffered = os.memfd_create("stepper")
        os.ftruncate(self.buffered, len(self.data) if size is None else size)
        self.source = self.sources.publish(
            self.sources.reserve(),
            {
                tables.DIRECT_DESCRIPTOR: DIRECT_NUMBER if direct else -1,
                tables.BUFFERED_DESCRIPTOR: self.buffered,
                tables.ALIGNMENT: alignment,
                tables.LIMIT_END: tables.MAX_OFFSET,
                tables.IS_DIRECT: int(direct),
                tables.MUST_BE_DIRECT: int(must_be_direct),
                tables.IS_PROVEN: int(proven),
            },
        )
        self.room = np.full(room + 128, GUARD, dtype=np.uint8)
        """The destination with 64 guard bytes on each side."""
        self.destination = self.destinations.publish(
            self.destinations.reserve(),
            {tables.ADDRESS: self.room.ctypes.data + 64, tables.NBYTES: room},
        )

    def close(self) -> None:
        """Close the file behind the source."""
        os.close(self.buffered)

    def post(self, start: int, end: int, offset: int = 0, **words: int) -> int:
        """Post a request; `words` may name other handles than the usual."""
        source = words.get("source", self.source)
        destination = words.get("destination", self.destination)
        ticket = int(gpuq.try_post_at(self.queue, source, destination, offset, start, end, 0))
        assert ticket >= 0, "no slot is free"
        return ticket

    def step(self) -> int:
        """Let the poller do one pass."""
        return int(serving.poll_once(self.poller))

    def run(self, most: int = 10_000) -> None:
        """Step until the poller has nothing to do."""
        for _ in range(most):
            if self.step() == 0:
                return
        raise AssertionError(f"the poller is not done after {most} passes")

    def status(self, ticket: int) -> Status:
        """Return a ticket's status by its flag."""
        return read_flag(self.queue, ticket)[0]

    def flag(self, ticket: int) -> tuple[Status, int]:
        """Return a ticket's (status, errno) by its flag."""
        return read_flag(self.queue, ticket)

    def consume(self, ticket: int) -> Status:
        """Free the slot of an answered ticket."""
        assert self.status(ticket) != Status.PENDING
        return Status(gpuq.wait(self.queue, ticket))

    @property
    def bytes(self) -> Any:
        """The destination without its guards."""
        return self.room[64:-64]

    def assert_only(self, offset: int, wanted: Any) -> None:
        """Assert that `wanted` stands at `offset` and nothing else was written."""
        expected = np.full_like(self.room, GUARD)
        expected[64 + offset : 64 + offset + len(wanted)] = wanted
        np.testing.assert_array_equal(self.room, expected)

    @property
    def free_leases(self) -> int:
        """Leases that may be taken."""
        return int(self.staging.counts[leases.FREE_COUNT])

    def log(self) -> Any:
        """Return the reader's log of all reads so far."""
        return self.reader.log[: int(self.reader.words[readers.SUBMITTED])]

    def assert_at_rest(self) -> None:
        """Assert that nothing is in flight and every lease came back exactly once."""
        cursor = self.poller.cursor
        assert cursor[records.REQUESTS] == 0
        assert cursor[records.READS] == 0
        assert cursor[records.READ_BYTES] == 0
        assert cursor[records.COPIES] == 0
        assert cursor[records.QUEUE_COUNT] == 0
        free = self.staging.free[: self.free_leases]
        assert sorted(free) == list(range(len(self.staging.free)))
        assert self.sources.in_flight(self.source) == 0
        assert self.destinations.in_flight(self.destination) == 0

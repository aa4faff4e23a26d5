"""A poller under whatever order of posts, reads, copies, closings and ends, against a model.

Every request has a part of its destination of its own, so that each byte of every destination is
known at every moment: as the file has it where an answer said OK, free to change while the
request is under way, and as it was anywhere else.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import ALIGNMENT, BUFFER, GUARD, bare_queue, poller_over, read_flag

import gpuq
from gpuq.host import poller as serving
from gpuq.host import records, tables
from gpuq.host import staging as leases
from gpuq.host.copier import DEVICE_MEMORY, HOST_MEMORY
from gpuq.layout import REVISION, STATE, State, Status
from gpuq.testing import copiers, readers

CAPACITY = 8
ROOM = 1 << 17
FILE_BYTES = 40_000
FILES = 3
FITS, BEYOND, STALE = range(3)
CONTENT = np.random.default_rng(11).integers(0, 256, FILES * FILE_BYTES, dtype=np.uint8)
CONTENT[CONTENT == GUARD] = 0
SCRIPTED = 400  # outcomes that are set in advance; more reads than that bring all

OUTCOMES = st.one_of(
    st.tuples(st.just(readers.READ), st.integers(0, 4096)),
    st.tuples(
        st.just(readers.FAIL),
        st.sampled_from([errno.EIO, errno.EINTR, errno.EAGAIN, errno.EINVAL]),
    ),
)
COPIES = st.sampled_from(
    [copiers.AT_ONCE, copiers.LATE, copiers.LATE, copiers.REFUSED, copiers.LATE_FAILURE]
)


@dataclass
class File:
    """A source: a scripted direct descriptor, a real one for its size, and where its bytes are."""

    row: int
    is_direct: bool
    first: int
    size: int = FILE_BYTES
    least: int = FILE_BYTES
    handle: int = 0
    is_open: bool = True
    buffered: int = -1

    @property
    def content(self) -> Any:
        return CONTENT[self.first : self.first + FILE_BYTES]


@dataclass
class Room:
    """A destination with guards of a buffer's length, and which of its bytes are given out."""

    kind: int
    handle: int = 0
    used: int = 0
    is_open: bool = True
    is_let_go: bool = False
    bytes: Any = field(default_factory=lambda: np.full(ROOM + 2 * BUFFER, GUARD, np.uint8))
    expected: Any = field(default_factory=lambda: np.full(ROOM + 2 * BUFFER, GUARD, np.uint8))

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data) + BUFFER


@dataclass
class Request:
    """What was posted and must be answered."""

    file: File
    room: Room
    start: int
    end: int
    offset: int
    is_refused: bool
    is_missing: bool  # its end, from the moment when it was posted

    @property
    def part(self) -> slice:
        return slice(BUFFER + self.offset, BUFFER + self.offset + self.end - self.start)


class World:
    """One poller that is driven by hand; `check` compares all of memory with the model."""

    def __init__(
        self, buffers: int, merge_bytes: int, straight_bytes: int, trace: int, copies: int
    ) -> None:
        self.queue = bare_queue(CAPACITY)
        self._memory = np.full((buffers + 2) * BUFFER, GUARD, np.uint8)
        address = -(-int(self._memory.ctypes.data) // BUFFER) * BUFFER
        self.staging = leases.make_staging(buffers, BUFFER, address)
        self.sources = tables.CapabilityTable(4, tables.SOURCE_WORDS, "source")
        self.destinations = tables.CapabilityTable(4, tables.DESTINATION_WORDS, "destination")
        self.files: list[File] = []
        self.rooms: list[Room] = []
        self.leaving: list[tuple[Any, Any]] = []
        self.under_way: dict[int, Request] = {}
        self.is_faulty = self.is_aborted = self.is_closing = False
        self.looked_at = 0
        self.reader = readers.make_scripted_reader(
            CONTENT, [(readers.READ, -1)] * SCRIPTED, reads=buffers, files=[(0, 0, 0)] * 4 * FILES
        )
        self.copier = copiers.make_scripted_copier(buffers, [copies] * SCRIPTED)
        self.poller = poller_over(
            self.queue,
            self.staging,
            self.sources,
            self.destinations,
            self.reader,
            self.copier,
            merge_bytes=merge_bytes,
            straight_bytes=straight_bytes,
            trace=trace,
        )
        self.add_room(True)
        self.add_file(True)

    def close(self) -> None:
        for file in self.files:
            os.close(file.buffered)

    # --- what the host does ---

    def add_room(self, is_host: bool) -> None:
        index = self.destinations.reserve()
        if index < 0 or len(self.rooms) == 10:
            return
        room = Room(HOST_MEMORY if is_host else DEVICE_MEMORY)
        words = {tables.ADDRESS: room.address, tables.NBYTES: ROOM, tables.KIND: room.kind}
        room.handle = self.destinations.publish(index, words)
        self.rooms.append(room)

    def add_file(self, is_direct: bool) -> None:
        index = self.sources.reserve()
        if index < 0 or len(self.files) == 4 * FILES:
            return
        row = len(self.files)
        file = File(row, is_direct, row % FILES * FILE_BYTES)
        file.buffered = os.memfd_create("poller-states")
        os.ftruncate(file.buffered, FILE_BYTES)
        # One number for both descriptors: the reader looks the bytes up by it.
        self.reader.files[row] = (file.buffered, file.first, FILE_BYTES)
        file.handle = self.sources.publish(
            index,
            {
                tables.DIRECT_DESCRIPTOR: file.buffered if is_direct else -1,
                tables.BUFFERED_DESCRIPTOR: file.buffered,
                tables.ALIGNMENT: ALIGNMENT if is_direct else 1,
                tables.LIMIT_END: tables.MAX_OFFSET,
                tables.IS_DIRECT: int(is_direct),
            },
        )
        self.files.append(file)

    def unregister(self, which: int) -> None:
        room = self.rooms[which % len(self.rooms)]
        if room.is_open:
            room.is_open = False
            self.destinations.retract(room.handle)
            self.queue.control[REVISION] += np.uint64(1)
            self.leaving.append((self.destinations, room))
            self.add_room(True)

    def close_source(self, which: int) -> None:
        file = self.files[which % len(self.files)]
        if file.is_open:
            file.is_open = False
            self.sources.retract(file.handle)
            self.queue.control[REVISION] += np.uint64(1)
            self.leaving.append((self.sources, file))
            self.add_file(True)

    def resize(self, which: int, size: int) -> None:
        file = self.files[which % len(self.files)]
        file.size, file.least = size, min(file.least, size)
        os.ftruncate(file.buffered, size)
        self.reader.files[file.row, 2] = size
        for request in self.under_way.values():
            request.is_missing &= request.file is not file or request.end > size

    # --- what a kernel does ---

    def post(
        self, which: int, where: int, start: int, length: int, shift: int, beyond: int
    ) -> None:
        """Ask for a part that nobody else was given; mostly one that may be read straight."""
        files = [file for file in self.files if file.is_open or beyond == STALE]
        rooms = [room for room in self.rooms if room.is_open or beyond == STALE]
        if not files or not rooms:
            return
        file, room = files[which % len(files)], rooms[where % len(rooms)]
        offset = room.used + (start - room.address - room.used) % ALIGNMENT + shift
        # What is posted to a queue that has taken its last is answered by STATE alone.
        if offset + length > ROOM or self.poller.cursor[records.IS_SEALED]:
            return
        if beyond == BEYOND:
            offset = ROOM - length + 1
        ticket = int(
            gpuq.try_post_at(self.queue, file.handle, room.handle, offset, start, start + length, 0)
        )
        if ticket < 0:
            return
        refused = beyond == BEYOND or not (file.is_open and room.is_open)
        self.under_way[ticket] = Request(
            file,
            room,
            start,
            start + length,
            offset,
            refused,
            is_missing=0 < length > file.size - start,
        )
        if beyond != BEYOND:
            room.used = offset + length

    def post_neighbours(
        self, which: int, where: int, start: int, lengths: list[int], stranger: int
    ) -> None:
        """Ask for rows that lie side by side, one of them behind a request for something else."""
        for number, length in enumerate(lengths):
            if number == stranger:
                self.post(which + 1, where, 20_000, length, 1, FITS)
            self.post(which, where, start, length, 1, FITS)
            start += length

    # --- what reads and copies do ---

    def script_reads(self, outcomes: list[tuple[int, int]], ahead: int) -> None:
        first = int(self.reader.words[readers.ANSWERED]) + ahead
        for number, outcome in enumerate(outcomes, first):
            if number < SCRIPTED - 1:
                self.reader.script[number] = outcome
                self.is_faulty = True

    def script_copies(self, outcomes: list[int]) -> None:
        first = int(self.copier.words[copiers.STARTED])
        for number, outcome in enumerate(outcomes, first):
            if number < SCRIPTED - 1:
                self.copier.script[number] = outcome
                self.is_faulty = True

    def turn_gate(self, is_closed: bool, is_backwards: bool) -> None:
        self.reader.words[readers.GATE] = is_closed
        self.reader.words[readers.ORDER] = is_backwards

    def end_a_copy(self, which: int) -> None:
        count = int(self.poller.cursor[records.COPIES])
        if count:
            self.copier.ends[self.poller.copying[which % count]] = 1

    # --- passes and ends ---

    def step(self, passes: int) -> None:
        for _ in range(passes):
            serving.poll_once(self.poller)
            self.look_at_reads()
            self.take_answers()
            self.let_go()

    def end(self, is_abort: bool, odds: int) -> None:
        if odds or len(self.under_way) < 3:
            return
        self.is_aborted |= is_abort
        self.is_closing = True
        records.raise_state(self.queue.control, int(State.ABORTED if is_abort else State.CLOSING))

    def finish(self) -> None:
        """Let all come to its end; nothing is left behind."""
        self.reader.words[readers.GATE] = 0
        self.reader.script[:] = (readers.READ, -1)
        self.copier.script[:] = copiers.AT_ONCE
        for _ in range(2000):
            self.copier.ends[self.poller.copying[: self.poller.cursor[records.COPIES]]] = 1
            done = serving.poll_once(self.poller)
            self.look_at_reads()
            self.take_answers()
            self.let_go()
            if done == 0 and self.poller.cursor[records.COPIES] == 0:
                break
        self.check()
        cursor = self.poller.cursor
        assert [cursor[i] for i in (records.READS, records.READ_BYTES, records.COPIES)] == [0] * 3
        free = self.staging.free[: self.staging.counts[leases.FREE_COUNT]]
        assert sorted(free) == list(range(len(self.staging.free)))
        if not self.is_aborted:
            assert self.under_way == {}
            assert cursor[records.REQUESTS] == cursor[records.QUEUE_COUNT] == 0
            for table, words in ((self.sources, tables.SOURCE_WORDS), (self.destinations, 8)):
                assert (table.words.reshape(-1, words)[:, tables.IN_FLIGHT] == 0).all()

    # --- the model ---

    def look_at_reads(self) -> None:
        """Each new read goes to a lease's own buffer or to blocks that its request asked for."""
        first, self.looked_at = self.looked_at, int(self.reader.words[readers.SUBMITTED])
        for read in self.reader.log[first : self.looked_at].tolist():
            lease, descriptor, offset, address, nbytes = read[:5]
            record = self.staging.leases[lease]
            request = self.request_in(int(record[leases.LEASE_SLOT]))
            assert descriptor == request.file.buffered
            assert request.file.is_open or (self.sources, request.file) in self.leaving
            assert nbytes > 0
            if record[leases.IS_STRAIGHT]:
                assert not request.room.is_let_go
                begin = request.room.address + request.offset
                assert begin <= address
                assert address + nbytes <= begin + request.end - request.start
                assert address - begin == offset - request.start, "each byte at its place"
                assert request.room.kind == HOST_MEMORY
            else:
                buffer = self.staging.address + lease * BUFFER
                assert buffer <= address
                assert address + nbytes <= buffer + BUFFER
            if record[leases.LEASE_IS_DIRECT]:
                assert offset % ALIGNMENT == address % ALIGNMENT == nbytes % ALIGNMENT == 0

    def request_in(self, slot: int) -> Request:
        return self.under_way[int(self.poller.requests[slot, records.TICKET])]

    def take_answers(self) -> None:
        for ticket, request in list(self.under_way.items()):
            status, _ = read_flag(self.queue, ticket)
            if status == Status.PENDING:
                continue
            del self.under_way[ticket]
            assert Status(gpuq.wait(self.queue, ticket)) == status or self.is_aborted
            self.judge(request, status)

    def judge(self, request: Request, status: Status) -> None:
        room, part = request.room, request.part
        if status == Status.OK:
            wanted = request.file.content[request.start : request.end]
            assert not request.is_refused or request.start == request.end
            np.testing.assert_array_equal(room.bytes[part], wanted)
        elif request.is_refused:
            refusals = (Status.BAD_SOURCE, Status.BAD_DESTINATION, Status.OUT_OF_BOUNDS)
            assert status in refusals
            return
        elif not self.is_faulty and not self.is_aborted:
            closed = (Status.BAD_SOURCE, Status.BAD_DESTINATION)
            assert status == Status.END_OF_FILE or status in closed
            if status == Status.END_OF_FILE:
                assert request.end > request.file.least
        if request.is_missing and not self.is_faulty:
            assert status != Status.OK
            assert (room.bytes[part] == GUARD).all(), "nothing is written where the end is missing"
        # Nothing is written there ever after.
        room.expected[part] = room.bytes[part]

    def let_go(self) -> None:
        """Do as `Service.close_entry` does: what is let go must never be touched again."""
        left = []
        for table, entry in self.leaving:
            seen = self.queue.control[gpuq.layout.REVISION_SEEN]
            if seen < self.queue.control[REVISION] or table.in_flight(entry.handle):
                left.append((table, entry))
                continue
            if isinstance(entry, Room):
                entry.is_let_go = True
            table.recycle(entry.handle)
        self.leaving = left

    def check(self) -> None:
        pending: dict[int, list[Request]] = {}
        for request in self.under_way.values():
            pending.setdefault(id(request.room), []).append(request)
        for room in self.rooms:
            expected = room.expected.copy()
            if not room.is_let_go:
                for request in pending.get(id(room), []):
                    if not request.is_refused:
                        expected[request.part] = room.bytes[request.part]
            np.testing.assert_array_equal(room.bytes, expected)
        free = set(self.staging.free[: self.staging.counts[leases.FREE_COUNT]].tolist())
        for lease, record in enumerate(self.staging.leases.tolist()):
            assert (lease in free) == (record[leases.PHASE] == leases.FREE)
            assert lease in free or record[leases.LENDER] not in free
        buffers = len(self.staging.free)
        begin = self.staging.address - int(self._memory.ctypes.data)
        assert (self._memory[:begin] == GUARD).all()
        assert (self._memory[begin + buffers * BUFFER :] == GUARD).all()
        assert int(self.poller.cursor[records.READS]) == self.reader.words[readers.WAITING]
        if self.poller.cursor[records.FAILURE]:
            assert self.queue.control[STATE] == State.ABORTED


numbers = st.integers(0, 5)
POST = st.fixed_dictionaries(
    {
        "which": numbers,
        "where": numbers,
        "start": st.sampled_from([0, 1, 300, 512, 4096, 7000, 20_000, FILE_BYTES - 6000]),
        "length": st.sampled_from([0, 1, 512, 700, 1024, 3000, 4096, 4097, 6000, 9000, 20_000]),
        "shift": st.sampled_from([0, 0, 0, 1, 300]),
        "beyond": st.sampled_from([FITS] * 12 + [BEYOND, STALE]),
    }
)
NEIGHBOURS = st.fixed_dictionaries(
    {
        "which": numbers,
        "where": numbers,
        "start": st.integers(0, 3000),
        "lengths": st.lists(st.sampled_from([1, 100, 700, 3000]), min_size=2, max_size=6),
        "stranger": st.integers(0, 3),
    }
)
READS = st.lists(OUTCOMES, min_size=1, max_size=5)
OFTEN: dict[str, Any] = {
    "post": POST,
    "post_neighbours": NEIGHBOURS,
    "step": st.fixed_dictionaries({"passes": st.integers(1, 4)}),
    "end_a_copy": st.fixed_dictionaries({"which": st.integers(0, 23)}),
}
SELDOM: dict[str, Any] = {
    "add_room": st.fixed_dictionaries({"is_host": st.booleans()}),
    "add_file": st.fixed_dictionaries({"is_direct": st.booleans()}),
    "unregister": st.fixed_dictionaries({"which": numbers}),
    "close_source": st.fixed_dictionaries({"which": numbers}),
    "resize": st.fixed_dictionaries({"which": numbers, "size": st.integers(0, FILE_BYTES)}),
    "script_reads": st.fixed_dictionaries({"outcomes": READS, "ahead": st.integers(0, 3)}),
    "script_copies": st.fixed_dictionaries({"outcomes": st.lists(COPIES, max_size=5)}),
    "turn_gate": st.fixed_dictionaries({"is_closed": st.booleans(), "is_backwards": st.booleans()}),
    "end": st.fixed_dictionaries({"is_abort": st.booleans(), "odds": st.integers(0, 15)}),
}


def acts_of(kinds: dict[str, Any]) -> Any:
    return st.one_of([st.tuples(st.just(name), given) for name, given in kinds.items()])


PLANS = st.lists(
    st.tuples(acts_of(OFTEN), acts_of(OFTEN), acts_of(OFTEN), acts_of(SELDOM)),
    min_size=6, max_size=25,
)  # fmt: skip


@settings(max_examples=int(os.environ.get("GPUQ_POLLER_STATES", "60")))
@given(
    plan=PLANS,
    buffers=st.sampled_from([1, 2, 3, 6, 24]),
    merge_bytes=st.sampled_from([0, 1024, BUFFER]),
    straight_bytes=st.sampled_from([0, 1, ALIGNMENT, 4 * ALIGNMENT]),
    trace=st.sampled_from([0, 3]),
    copies=st.sampled_from([copiers.AT_ONCE, copiers.LATE]),
)
def test_whatever_happens_in_whatever_order_no_byte_is_wrong(plan: Any, **given: int) -> None:
    world = World(**given)
    try:
        for acts in plan:
            for name, arguments in acts:
                getattr(world, name)(**arguments)
                world.check()
        world.finish()
    finally:
        world.close()

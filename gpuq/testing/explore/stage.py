"""A queue, the product's poller and a machine under it, for one schedule.

`gpuq.testing.explore.ledger` says what must hold of requests, ``machine`` what must hold of
buffers and events, ``memory`` finds races and ``schedule`` endless waits. Here stands what must
hold in the end: everything was given back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpuq.host import copier, driver, records, staging, tables
from gpuq.layout import (
    CONTROL_WORDS,
    COUNTER_WORDS,
    FLAG_WORDS,
    HEARTBEAT,
    LINE_WORDS,
    STATE,
    SUBMISSION_WORDS,
    TAIL_WORDS,
    Queue,
    State,
)
from gpuq.testing.explore.kernel_ring import KernelRing
from gpuq.testing.explore.ledger import ABORTED, OK, Ledger, Request
from gpuq.testing.explore.machine import (
    FUTEX_ADDRESS,
    STAGING_ADDRESS,
    File,
    Machine,
    ModelReader,
    NotedReader,
)
from gpuq.testing.explore.memory import Words
from gpuq.testing.explore.rebinding import Code
from gpuq.testing.explore.schedule import Violation, World

DESTINATION_ADDRESS = 0x20000
DIRECT, BUFFERED = 10, 11
"""Descriptors of the first file; another has the next two."""


class Table(list[list[int]]):
    """Rows of a two-dimensional array that only one fiber uses, quicker than NumPy's."""

    def __getitem__(self, key: Any) -> Any:
        if key.__class__ is tuple:
            return list.__getitem__(self, key[0])[key[1]]
        return list.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key.__class__ is tuple:
            list.__getitem__(self, key[0])[key[1]] = value
        else:
            list.__setitem__(self, key, value)


def private(thing: Any) -> Any:
    """Return a NamedTuple of arrays with lists in their place, for what one fiber alone uses."""
    lists = {}
    for name, value in zip(thing._fields, thing, strict=True):
        if isinstance(value, np.ndarray):
            rows = value.tolist()
            lists[name] = Table(rows) if value.ndim == 2 else rows
    return thing._replace(**lists)


class Stage:
    """Everything that one schedule runs on.

    Parameters
    ----------
    world : World
    code : Code
    capacity : int
    first : int
        The first ticket.
    buffers, buffer_bytes, alignment : int
    file_bytes : int
    read_faults, driver_faults : tuple of str
        See `Machine`.
    reader : {"inline", "device", "threads", "io_uring", "deferred io_uring"}
    has_engine : bool
        Whether copies go through the CUDA copier.
    has_host : bool
        Whether host threads open and close entries meanwhile.
    must_be_direct : bool
    workers : int
        Threads of the threads reader.
    has_poller : bool
        Whether the product's poller serves the queue.
    may_fail : bool
        Whether the poller may end with an errno.
    """

    def __init__(
        self,
        world: World,
        code: Code,
        ops: SimpleNamespace,
        *,
        capacity: int = 2,
        first: int = 0,
        buffers: int = 2,
        buffer_bytes: int = 4,
        alignment: int = 2,
        file_bytes: int = 64,
        read_faults: tuple[str, ...] = (),
        driver_faults: tuple[str, ...] = (),
        reader: str = "inline",
        has_engine: bool = False,
        has_host: bool = False,
        must_be_direct: bool = False,
        workers: int = 2,
        has_poller: bool = True,
        may_fail: bool = False,
        merge_bytes: int = 0,
        straight_bytes: int = 0,
        kind: int = copier.DEVICE_MEMORY,
    ) -> None:
        self.world = world
        self.code = code
        self.ops = ops
        self.capacity = capacity
        self.first = first
        self.notes: dict[str, int] = {}
        self.machine = Machine(
            world, ops, self._ticket_of, read_faults=read_faults, driver_faults=driver_faults
        )
        world.machine = self.machine

        self.ledger = Ledger(world, self.machine, capacity, first)
        self.result: int | None = None
        self._has_poller = has_poller
        self._read_faults = read_faults
        self._may_fail = may_fail
        self._has_host = has_host
        self.buffers, self.buffer_bytes = buffers, buffer_bytes
        self._room = 0
        self._must_be_direct = must_be_direct
        self._merge_bytes, self._straight_bytes = merge_bytes, straight_bytes
        self._kind = kind

        self.queue = self._make_queue()
        self._make_tables(file_bytes, alignment)
        self.host = self._make_host()
        self._make_poller(reader, has_engine, workers)

    # --- building ---

    def _make_queue(self) -> Queue:
        capacity, first, world = self.capacity, self.first, self.world
        payload = [i for i in range(capacity * SUBMISSION_WORDS) if i % SUBMISSION_WORDS]
        turns = [first + ((slot - first) & (capacity - 1)) for slot in range(capacity)]
        state = [0] * CONTROL_WORDS
        state[STATE] = int(State.RUNNING)
        ledger = self.ledger
        hidden = () if self._has_host else set(range(CONTROL_WORDS)) - {STATE}
        self.control = Words(world, "control", state, private=hidden, on_store=ledger.raised)
        return Queue(
            submissions=Words(
                world,
                "submissions",
                [0] * (capacity * SUBMISSION_WORDS),
                quiet=frozenset(payload),
                on_store=ledger.published,
            ),
            flags=Words(world, "flags", [0] * (capacity * FLAG_WORDS), on_store=ledger.answered),
            control=Words(world, "shown", state, private={HEARTBEAT}, on_store=ledger.raised),
            tail=Words(world, "tail", [first] + [0] * (TAIL_WORDS - 1)),
            turns=Words(world, "turns", turns, on_store=ledger.turned),
            counters=Words(world, "counters", [0] * COUNTER_WORDS, on_store=ledger.counted),
            taken=Words(world, "taken", [0] * LINE_WORDS, on_store=ledger.taken),
            capacity=capacity,
            post_timeout_ns=1000,
        )

    def _make_tables(self, file_bytes: int, alignment: int) -> None:
        world, code = self.world, self.code
        self.sources = code.tables.CapabilityTable(2, tables.SOURCE_WORDS, "source")
        self.destinations = code.tables.CapabilityTable(2, tables.DESTINATION_WORDS, "destination")
        self.source = self.open(DIRECT, file_bytes, alignment)
        self.destination = self.register(256)
        for table in (self.sources, self.destinations):
            words = table.words.tolist()
            table.words = Words(world, table.what + "s", words) if self._has_host else words

    def open(self, descriptor: int, file_bytes: int, alignment: int) -> int:
        """Open a file: two descriptors and a handle."""
        data = [(descriptor << 8) + i + 1 for i in range(file_bytes)]
        self.machine.files[descriptor] = File(data, alignment)
        self.machine.files[descriptor + 1] = File(data, 1)
        words = {
            tables.DIRECT_DESCRIPTOR: descriptor,
            tables.BUFFERED_DESCRIPTOR: descriptor + 1,
            tables.ALIGNMENT: alignment,
            tables.LIMIT_END: tables.MAX_OFFSET,
            tables.IS_DIRECT: 1,
            tables.MUST_BE_DIRECT: int(self._must_be_direct),
        }
        return int(self.sources.publish(self.sources.reserve(), words))

    def close(self, descriptor: int) -> None:
        """Close a file's descriptors: a read of them from now on is a violation."""
        for number in (descriptor, descriptor + 1):
            self.machine.files[number].is_open = False
        for transfer in self.machine.in_flight:
            if transfer.descriptor in (descriptor, descriptor + 1):
                raise Violation(f"a file is closed while ticket {transfer.ticket} reads it")

    def register(self, nbytes: int) -> int:
        """Register a destination of its own memory."""
        address = DESTINATION_ADDRESS
        self.machine.memory.add("destination", address, nbytes)
        words = {
            tables.ADDRESS: address,
            tables.NBYTES: nbytes,
            tables.KIND: self._kind,
        }
        return int(self.destinations.publish(self.destinations.reserve(), words))

    def _make_host(self) -> Any:
        """Return a `Service` over the tables and the queue: its methods, without its threads."""
        host = object.__new__(host_class(self.code))
        host.stage = self
        host.sources, host.destinations = self.sources, self.destinations
        host.control, host.shown = self.control, self.queue.control
        host.lock = threading.RLock()
        return host

    def _make_poller(self, reader: str, has_engine: bool, workers: int) -> None:
        world, code, machine = self.world, self.code, self.machine
        machine.memory.add("staging", STAGING_ADDRESS, self.buffers * self.buffer_bytes)
        self.reader: Any
        if reader.endswith("io_uring"):
            ring = KernelRing(
                world,
                self.ops,
                machine,
                self.buffers,
                code.uring._WORDS,
                self._read_faults,
                reader.startswith("deferred"),
            )
            machine.system_call = ring.system_call
            self.reader = NotedReader(machine, code.reader, ring.reader)
        elif reader == "threads":
            self.threads = code.threads.WorkerThreads(self.buffers, 0)
            self.threads.reader = rings = shared_rings(world, self.threads.reader)
            self.reader = NotedReader(machine, code.reader, rings)
            machine.use_bells(rings.bells)
        else:
            self.reader = ModelReader(machine, reader == "device")
        copies: Any = copier.MemcpyCopier()
        if has_engine:
            functions = driver.DriverTable(*range(len(driver.DriverTable._fields)))
            events = list(range(self.buffers))
            copies = private(copier.make_cuda_copier(functions, 0, events))
        self.poller = private(
            records.make_poller(
                submissions=self.queue.submissions,
                flags=self.queue.flags,
                counters=self.queue.counters,
                control=self.control,
                shown=self.queue.control,
                sources=self.sources.words,
                destinations=self.destinations.words,
                capacity=self.capacity,
                staging=private(
                    staging.make_staging(self.buffers, self.buffer_bytes, STAGING_ADDRESS)
                ),
                reader=self.reader,
                copier=copies,
                merge_bytes=self._merge_bytes,
                straight_bytes=self._straight_bytes,
            )
        )
        turns = self.queue.turns
        self.poller.expected[:] = [turns.peek(slot) for slot in range(self.capacity)]
        self.poller.cursor[records.HEAD] = self.first
        self.ended = Words(world, "ended", [0])
        if self._has_poller:
            world.spawn("poller", self._serve, daemon=True)
        if reader == "device":
            world.spawn("device", machine.read_forever, daemon=True)
        if reader.endswith("io_uring"):
            world.spawn("kernel", ring.complete_forever, daemon=True)
        if reader == "threads":
            for number in range(workers):
                world.spawn(
                    f"worker{number}",
                    lambda: code.threads.work(self.threads.reader),
                    daemon=self._has_poller,
                )
        if has_engine:
            world.spawn("engine", machine.copy_forever, daemon=True)

    def _serve(self) -> None:
        self.result = self.code.poller.serve(self.poller)
        if self.result == 0 and self.machine.in_flight:
            transfer = self.machine.in_flight[0]
            raise Violation(f"the poller ended while a {transfer.what} is in flight")
        self.ops.store_release(self.ended, 0, 1)

    def _ticket_of(self, address: int) -> int:
        for ticket, request in self.ledger.requests.items():
            if request.address <= address < request.address + max(request.end - request.start, 1):
                return ticket
        lease = (address - STAGING_ADDRESS) // self.buffer_bytes
        slot = self.poller.staging.leases[lease, staging.LEASE_SLOT]
        return int(self.poller.requests[slot, records.TICKET])

    # --- what fibers do ---

    def fiber(self, name: str, body: Callable[[], None], *, is_host: bool = False) -> None:
        """Add a fiber that the schedule waits for; in a kernel unless it is a host's thread."""
        self.world.spawn(name, body, device=not is_host)

    def request(self, start: int, end: int, *statuses: int, source: int = 0) -> Request:
        """Return a request for a range of the file, with room of its own in the destination."""
        offset = self._room
        self._room += max(end - start, 0)
        descriptor = DIRECT if source in (0, self.source) else DIRECT + 2
        file = self.machine.files.get(descriptor)
        return Request(
            start,
            end,
            offset,
            DESTINATION_ADDRESS + offset,
            frozenset(statuses or (OK,)),
            source or self.source,
            self.destination,
            file.data[start:end] if file else [],
        )

    def post(self, request: Request, how: str = "post_at") -> int:
        """Post; return the ticket or a negative status."""
        self.world.current.work = request
        ticket = int(
            getattr(self.code.queue, how)(
                self.queue,
                request.source,
                request.destination,
                request.offset,
                request.start,
                request.end,
                request.offset,
            )
        )
        if ticket >= 0 and self.ledger.requests.get(ticket) is not request:
            raise Violation(f"ticket {ticket} was returned for another's request")
        return ticket

    def post_counted(self, request: Request) -> int:
        """Post a request that counter 0 counts; return the status."""
        self.world.current.work = request
        where = (request.source, request.destination, request.offset, request.start, request.end)
        return int(self.code.counters.post_counted_at(self.queue, 0, *where, request.offset))

    def wait_counter(self, count: int) -> int:
        """Take answers from counter 0; return the status."""
        status = int(self.code.counters.wait_counter(self.queue, 0, count))
        if status == ABORTED:
            self.ledger.aborted(-1)
        return status

    def wait(self, ticket: int, timeout_ns: int = -1) -> int:
        """Wait; check the status, and the bytes where it is OK."""
        queue = self.code.queue
        if timeout_ns < 0:
            status = int(queue.wait(self.queue, ticket))
        else:
            status = int(queue.wait_for(self.queue, ticket, timeout_ns))
        if ticket >= 0:
            self.ledger.waited(ticket, status)
            if status == OK:
                self.ledger.read(self.ledger.requests[ticket])
        return status

    def pull(self, request: Request) -> int:
        """Post and wait."""
        return self.wait(self.post(request))

    def raise_state(self, state: State) -> None:
        """Close or abort."""
        self.host.raise_state(state)

    def note(self, what: str) -> None:
        """Count that a schedule reached something."""
        self.notes[what] = self.notes.get(what, 0) + 1

    def mailbox(self, name: str, words: int = 1) -> Mailbox:
        """Return words by which fibers hand things over, in order."""
        return Mailbox(self, name, words)

    # --- the end ---

    def finish(self) -> None:
        """Close the queue if nobody did, let the poller end, and check that all came back."""
        world = self.world

        def close() -> None:
            self.raise_state(State.CLOSING)
            while not self.ops.load_acquire(self.ended, 0):
                world.relax()

        if self._has_poller:
            world.drain(world.spawn("closer", close))
            self.check_rest()

    def check_rest(self) -> None:
        """Everything was given back, and everything that was promised was answered."""
        poller = self.poller
        if self.result != 0 and not self._may_fail:
            raise Violation(f"the poller ended with {self.result}")
        if self.control.peek(STATE) != State.CLOSED:
            return
        self.ledger.check_promises()
        for name in ("REQUESTS", "READS", "READ_BYTES", "COPIES", "QUEUE_COUNT"):
            if poller.cursor[getattr(records, name)]:
                raise Violation(f"{name} is not 0 in the end")
        free = poller.staging.free[: poller.staging.counts[staging.FREE_COUNT]]
        if sorted(free) != list(range(self.buffers)):
            raise Violation(f"the free leases in the end are {free}")
        for table in (self.sources, self.destinations):
            for entry in range(table.entries):
                if peek(table.words, entry * table.entry_words + tables.IN_FLIGHT):
                    raise Violation(f"a {table.what} is in use in the end")


@functools.lru_cache(maxsize=4)
def host_class(code: Code) -> Any:
    """Return the rebuilt `Service`, whose poller serves until it has returned."""
    serving = property(lambda host: host.stage.result is None)
    return type("Host", (code.service.Service,), {"is_serving": serving})


def peek(words: Any, index: int) -> int:
    """Return a word of an array or list without an access: for checks."""
    return words.peek(index) if isinstance(words, Words) else words[index]


class Mailbox:
    """Words by which fibers hand numbers to each other, each stored once."""

    def __init__(self, stage: Stage, name: str, words: int) -> None:
        self._stage = stage
        self._words = Words(stage.world, name, [0] * words)

    def put(self, value: int, index: int = 0) -> None:
        """Hand a number over; what this fiber did before is visible with it."""
        self._stage.ops.store_release(self._words, index, value + 1)

    def take(self, index: int = 0) -> int:
        """Wait for the number."""
        while True:
            value = self._stage.ops.load_acquire(self._words, index)
            if value:
                return int(value) - 1
            self._stage.world.relax()


def shared_rings(world: World, reader: Any) -> Any:
    """Return a `ThreadsReader` whose rings are words of the search."""
    rings = {
        name: Words(world, name, getattr(reader, name).tolist())
        for name in ("jobs", "results", "shared", "bells")
    }
    return reader._replace(**rings, bells_address=FUTEX_ADDRESS, words=reader.words.tolist())

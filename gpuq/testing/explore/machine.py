"""Models of what the poller works with: files, a device that reads, a copy engine, futexes.

They take every liberty that the real ones have. A read fills its buffer and a copy reads it at
any time between its start and its end, a read may come back short or with an errno, reads end in
any order, and a futex sleeps until it is woken, for its time-out would hide a lost wake-up.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from gpuq.host import driver
from gpuq.testing.explore.memory import Memory, Words, operations
from gpuq.testing.explore.schedule import Fiber, Violation, World

STAGING_ADDRESS = 0x10000
FUTEX_ADDRESS = 0x50000

# How a read goes, besides as asked.
SHORT = "short"
INTERRUPTED = "interrupted"
BROKEN = "broken"
REFUSED = "refused"

# How a call of the driver goes.
INVALID_COPY = "invalid copy"
LOST_COPY = "lost copy"
LOST_EVENT = "lost event"

_CALLS = (
    "cached_size_of",
    "call_driver",
    "copy_memory",
    "futex_wait",
    "futex_wake",
    "read_at",
    "size_of",
    "system_call",
)
_READ_FAULTS = (SHORT, INTERRUPTED, BROKEN, REFUSED)
_UNKNOWN_ERROR = 999


@dataclass
class File:
    """What stands behind a descriptor.

    Attributes
    ----------
    data : list of int
    alignment : int
        Of a direct read; 1 for buffered.
    is_open : bool
    """

    data: list[int]
    alignment: int = 1
    is_open: bool = True


@dataclass(eq=False)
class Transfer:
    """A read or a copy between its start and its end.

    Attributes
    ----------
    what : str
    ticket : int
        Of the request that it belongs to.
    buffer, nbytes : int
        What it reads or writes of staging.
    number, lease, descriptor, offset : int
        Of a read; numbers count up from 0.
    destination : int
        Of a copy.
    result : int
    """

    what: str
    ticket: int
    buffer: int
    nbytes: int
    number: int = -1
    lease: int = -1
    descriptor: int = -1
    offset: int = 0
    destination: int = 0
    result: int = 0


class Machine:
    """Files, memory, what is in flight, and the faults that may occur.

    Parameters
    ----------
    world : World
    ticket_of : callable
        Which ticket works with the memory at an address, of staging or of a destination.
    read_faults, driver_faults : tuple of str
        What may happen, within `Bounds.faults`.

    Attributes
    ----------
    reads : list of Transfer
        All, in the order in which they were submitted.
    in_flight : list of Transfer
        Reads and copies between their start and their end.
    """

    def __init__(
        self,
        world: World,
        ops: SimpleNamespace,
        ticket_of: Callable[[int], int],
        *,
        read_faults: tuple[str, ...] = (),
        driver_faults: tuple[str, ...] = (),
    ) -> None:
        self.world = world
        self.ops = ops
        self.memory = Memory(world)
        self.files: dict[int, File] = {}
        self.in_flight: list[Transfer] = []
        self.faults_seen = 0
        self.system_call: Callable[..., int] | None = None
        self._ticket_of = ticket_of
        self._read_faults = ("whole", *(fault for fault in read_faults if fault in _READ_FAULTS))
        self._driver_faults = ("well", *driver_faults)
        self._sleepers: dict[int, list[Fiber]] = {}
        self._bells: Words | None = None
        # The reading device: submitted, handed over, done.
        self.reads: list[Transfer] = []
        self._waiting: list[Transfer] = []
        self._started: set[int] = set()
        self._shortened: set[tuple[int, int]] = set()
        self._done: list[Transfer] = []
        self._reaped = 0
        self._flushed = 0
        self._rings = Words(world, "rings", [0, 0])
        # The copy engine: a stream of copies and event records, and how far each event is.
        self._stream: list[tuple[str, Any, int]] = []
        self._stream_tail = Words(world, "stream", [0])
        self._events = Words(world, "events", [0] * 8)
        self._records = [0] * 8
        self._observed = [0] * 8

    # --- memory and files ---

    def begin(self, transfer: Transfer) -> None:
        """Note that a transfer begins; its buffer must not be in use."""
        for other in self.in_flight:
            if transfer.what == other.what == "copy":
                continue  # from one read, for neighbours
            if (
                transfer.buffer < other.buffer + other.nbytes
                and other.buffer < transfer.buffer + transfer.nbytes
            ):
                raise Violation(
                    f"a {transfer.what} for ticket {transfer.ticket} uses a buffer while a "
                    f"{other.what} for ticket {other.ticket} does"
                )
        self.in_flight.append(transfer)

    def end(self, transfer: Transfer) -> None:
        """Note that a transfer is over."""
        self.in_flight.remove(transfer)

    def of_ticket(self, ticket: int) -> list[Transfer]:
        """Return what is in flight for a request."""
        return [transfer for transfer in self.in_flight if transfer.ticket == ticket]

    def fill(self, read: Transfer) -> int:
        """Do a read: put the bytes into the buffer and return the result."""
        fault = self._read_faults[self.world.fault(len(self._read_faults))]
        if fault != "whole":
            self.faults_seen += 1
        if fault == INTERRUPTED:
            return -errno.EINTR
        if fault == BROKEN:
            return -errno.EIO
        file = self.files[read.descriptor]
        if not file.is_open:
            raise Violation(f"a read of descriptor {read.descriptor}, which is closed")
        if fault == REFUSED and file.alignment > 1:
            return -errno.EINVAL
        if (read.offset | read.buffer | read.nbytes) % file.alignment:
            return -errno.EINVAL
        most = max(min(read.nbytes, len(file.data) - read.offset), 0)
        piece = (read.ticket, read.buffer + read.nbytes)
        if fault == SHORT and piece not in self._shortened:
            # Once for each piece: a second one that brings nothing new would be the end of a file.
            self._shortened.add(piece)
            most = min(most, max(read.nbytes - 1, 1) if most == read.nbytes else most // 2)
        for i in range(most):
            self.memory.store(read.buffer + i, file.data[read.offset + i])
        return most

    # --- libc ---

    def read_at(self, descriptor: int, address: int, nbytes: int, offset: int) -> int:
        """pread(2), which takes its time."""
        for read in self.reads:
            if read.buffer == address and read in self.in_flight:
                break
        else:
            raise Violation(f"a worker reads into {address:#x} for no job")
        asked = (read.descriptor, read.nbytes, read.offset)
        if asked != (descriptor, nbytes, offset) or id(read) in self._started:
            raise Violation(f"a worker reads {descriptor, nbytes, offset} for the job {asked}")
        self._started.add(id(read))
        self.world.point()
        read.result = self.fill(read)
        self.world.point()
        self.end(read)
        return read.result

    def expect(self, lease: int, descriptor: int, offset: int, address: int, nbytes: int) -> None:
        """Note a read that was given to the product's own reader."""
        read = Transfer(
            "read", self._ticket_of(address), address, nbytes, -1, lease, descriptor, offset
        )
        read.number = len(self.reads)
        self.reads.append(read)
        self.begin(read)

    def size_of(self, descriptor: int) -> int:
        """Size of an open file."""
        return len(self.files[descriptor].data)

    def cached_size_of(self, descriptor: int) -> int:
        """Size of an open file as the system remembers it."""
        return self.size_of(descriptor)

    def copy_memory(self, destination: int, source: int, nbytes: int) -> None:
        """memcpy(3)."""
        self.memory.copy(destination, source, nbytes)

    def use_bells(self, bells: Words) -> None:
        """Let the futex calls find these words at `FUTEX_ADDRESS`."""
        self._bells = bells

    def futex_wait(self, address: int, expected: int, _timeout_ns: int) -> int:
        """Compare and sleep in one step, until woken."""
        assert self._bells is not None
        self.world.point()
        word = self._bells.cells[(address - FUTEX_ADDRESS) // 4]
        if word.value != expected:
            return -errno.EAGAIN
        self._sleepers.setdefault(address, []).append(self.world.current)
        self.world.sleep(word)
        return 0

    def futex_wake(self, address: int, count: int) -> int:
        """Wake sleepers, the first ones first."""
        self.world.point()
        sleepers = self._sleepers.get(address, [])
        woken = sleepers[:count]
        del sleepers[:count]
        for fiber in woken:
            self.world.rouse(fiber)
        return len(woken)

    # --- the reading device ---

    def flush(self, *, is_shared: bool) -> None:
        """Let the device see what was submitted."""
        new = self.reads[self._flushed :]
        self._flushed += len(new)
        self._waiting += new
        if new and is_shared:
            self.ops.store_release(self._rings, 0, self._flushed)

    def do_one(self, visible: int) -> Transfer | None:
        """Do one of the first `visible` reads, not always the oldest."""
        ready = sum(read.number < visible for read in self._waiting)
        if not ready:
            return None
        read = self._waiting.pop(self.world.fault(ready))
        read.result = self.fill(read)
        return read

    def read_forever(self) -> None:
        """Be the device: the body of a fiber."""
        while True:
            read = self.do_one(self.ops.load_acquire(self._rings, 0))
            if read is None:
                self.world.relax()
                continue
            self.end(read)
            self._done.append(read)
            self.ops.store_release(self._rings, 1, len(self._done))

    def reap(self, *, is_shared: bool) -> tuple[int, int]:
        """Return (lease, result) of a read that is over."""
        if is_shared:
            if self.ops.load_acquire(self._rings, 1) == self._reaped:
                return -1, 0
        elif self._reaped == len(self._done):
            read = self.do_one(self._flushed)
            if read is None:
                return -1, 0
            self.end(read)
            self._done.append(read)
        read = self._done[self._reaped]
        self._reaped += 1
        return read.lease, read.result

    # --- the copy engine ---

    def call_driver(self, function: int, a: int, b: int, c: int, d: int) -> int:
        """Answer a call of the driver's table."""
        if function == driver.EVENT_QUERY:
            if self.ops.load_acquire(self._events, a) < self._records[a]:
                return driver.NOT_READY
            self._observed[a] = self._records[a]
            return driver.SUCCESS
        fault = "well"
        if function == driver.MEMCPY_HTOD_ASYNC:
            faults = [f for f in self._driver_faults if f != LOST_EVENT]
            fault = faults[self.world.fault(len(faults))]
            if fault == INVALID_COPY:
                self.faults_seen += 1
                return driver.INVALID_VALUE
            copy = Transfer("copy", self._ticket_of(a), b, c, destination=a)
            self.begin(copy)
            self._stream.append(("copy", copy, 0))
        else:
            assert function == driver.EVENT_RECORD
            if LOST_EVENT in self._driver_faults and self.world.fault(2):
                self.faults_seen += 1
                return _UNKNOWN_ERROR
            if self._observed[a] != self._records[a]:
                raise Violation(f"event {a} is recorded again before it was seen complete")
            self._records[a] += 1
            self._stream.append(("event", a, self._records[a]))
        self.ops.store_release(self._stream_tail, 0, len(self._stream))
        if fault == LOST_COPY:
            self.faults_seen += 1
            return _UNKNOWN_ERROR
        return driver.SUCCESS

    def copy_forever(self) -> None:
        """Be the copy engine: the body of a fiber."""
        taken = 0
        while True:
            if self.ops.load_acquire(self._stream_tail, 0) == taken:
                self.world.relax()
                continue
            what, thing, number = self._stream[taken]
            taken += 1
            if what == "copy":
                self.memory.copy(thing.destination, thing.buffer, thing.nbytes)
                self.end(thing)
            else:
                self.ops.store_release(self._events, thing, number)


class ModelReader(NamedTuple):
    """A reader of the machine's: the contract of `gpuq.host.reader`, as methods.

    Attributes
    ----------
    machine : Machine
    is_shared : bool
        Whether a device of its own does the reads, or `reap_read` when it is called.
    """

    machine: Machine
    is_shared: bool

    def submit_read(self, *read: int) -> None:
        """Take a read."""
        self.machine.expect(*read)

    def flush_reads(self) -> int:
        """Let the device see what was submitted."""
        self.machine.flush(is_shared=self.is_shared)
        return 0

    def reap_read(self) -> tuple[int, int]:
        """Return a read that is over."""
        return self.machine.reap(is_shared=self.is_shared)

    def await_read(self, _timeout_ns: int) -> None:
        """Wait for one."""
        self.machine.world.relax()


class NotedReader(NamedTuple):
    """Hands reads to one of the product's readers, and tells the machine of them.

    Attributes
    ----------
    machine : Machine
    contract : namespace
        The rebuilt `gpuq.host.reader`.
    reader : NamedTuple
    """

    machine: Machine
    contract: Any
    reader: Any

    def submit_read(self, *read: int) -> None:
        """Take a read."""
        self.machine.expect(*read)
        self.contract.submit_read(self.reader, *read)

    def flush_reads(self) -> Any:
        """Let the workers see what was submitted."""
        return self.contract.flush_reads(self.reader)

    def reap_read(self) -> Any:
        """Return a read that is over."""
        return self.contract.reap_read(self.reader)

    def await_read(self, timeout_ns: int) -> None:
        """Wait for one."""
        self.contract.await_read(self.reader, timeout_ns)


def stand_ins(world: World) -> dict[str, Any]:
    """Return what replaces the operations, libc and the driver, by name."""

    def machine(name: str) -> Callable[..., Any]:
        return lambda *arguments: getattr(world.machine, name)(*arguments)

    return {
        **operations(world),
        **{name: machine(name) for name in _CALLS},
        "sleep_ns": world.relax,
        "thread_cpu_ns": lambda: 0,
        "time": SimpleNamespace(sleep=world.relax, monotonic=lambda: 0.0),
    }

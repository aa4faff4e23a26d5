"""The kernel's side of io_uring: takes entries when it is entered, completes them when it likes.

It is as unhelpful as the real one may be: `io_uring_enter` may take fewer entries than it is
given, or none with EAGAIN or EINTR; reads end in any order; and the completion ring is no larger
than it must be. A ring with DEFER_TASKRUN writes completion entries only when it is entered for
them, and then only those of reads that had ended before.
"""

from __future__ import annotations

import errno
from types import SimpleNamespace

from gpuq.host.libc import SYS_IO_URING_ENTER
from gpuq.host.uring import UringReader
from gpuq.host.uring_abi import CQE_WORDS, ENTER_GETEVENTS, OP_READ, SQ_TASKRUN, SQE_WORDS
from gpuq.testing.explore.machine import Machine, Transfer
from gpuq.testing.explore.memory import Words
from gpuq.testing.explore.schedule import Violation, World

# How an entry into the kernel goes, besides well.
BUSY = "busy"
PARTLY = "partly"
LOST_RING = "lost ring"

_FAULTS = (BUSY, PARTLY, LOST_RING)
_DESCRIPTOR = 3
_DESCRIPTORS = 16
_WORD = 0xFFFF_FFFF_FFFF_FFFF


class KernelRing:
    """One ring, as `gpuq.host.uring` maps it, and the kernel behind it.

    Parameters
    ----------
    world : World
    ops : namespace
        The operations.
    machine : Machine
    reads : int
        Entries of both rings, a power of two.
    words : int
        Words of the reader's own.
    faults : tuple of str
        What may happen, within `Bounds.faults`.
    is_deferred : bool
        The ring is set up with DEFER_TASKRUN.
    """

    def __init__(
        self,
        world: World,
        ops: SimpleNamespace,
        machine: Machine,
        reads: int,
        words: int,
        faults: tuple[str, ...],
        is_deferred: bool,
    ) -> None:
        self._world = world
        self._ops = ops
        self._machine = machine
        self._entries = reads
        self._faults = ("well", *(fault for fault in faults if fault in _FAULTS))
        self._taken = 0
        self._handed_over = Words(world, "kernel", [0])
        self._waiting: list[tuple[int, Transfer]] = []
        self._completed = 0
        self._is_deferred = is_deferred
        self._ended = Words(world, "ended", [0])
        self._deferred: list[tuple[int, int]] = []
        self.reader = UringReader(
            descriptor=_DESCRIPTOR,
            sq_mask=reads - 1,
            cq_mask=reads - 1,
            sq_tail=Words(world, "sq_tail", [0]),
            sq_flags=Words(world, "sq_flags", [0]),
            cq_head=Words(world, "cq_head", [0]),
            cq_tail=Words(world, "cq_tail", [0]),
            sqes=Words(world, "sqes", [0] * (reads * SQE_WORDS)),
            cqes=Words(world, "cqes", [0] * (reads * CQE_WORDS)),
            words=[0] * words,
            words_address=0,
            flags=[0] * _DESCRIPTORS,
        )

    def system_call(
        self, number: int, descriptor: int, submit: int, complete: int, flags: int, *_rest: int
    ) -> int:
        """io_uring_enter(2)."""
        if number != SYS_IO_URING_ENTER or descriptor != _DESCRIPTOR:
            raise Violation(f"system call {number} on descriptor {descriptor}")
        asks_only = complete > 0 or submit == 0
        # A lost ring gives no more than it takes.
        if asks_only and LOST_RING in self._faults and self._world.fault(2):
            self._machine.faults_seen += 1
            return -errno.EBADF
        if complete:
            # The poller has reaped all it could see: wait for one more.
            while self._ops.load_acquire(self.reader.cq_tail, 0) == self._ops.load_acquire(
                self.reader.cq_head, 0
            ) and not self._ops.load_acquire(self._ended, 0):
                self._world.relax()
            self._write_deferred()
            return 0
        self._world.point()
        if submit == 0 and flags & ENTER_GETEVENTS:
            self._write_deferred()
            return 0
        fault = self._faults[self._world.fault(len(self._faults))]
        if fault != "well":
            self._machine.faults_seen += 1
        if fault == BUSY:
            return -errno.EAGAIN
        there = int(self._ops.load_acquire(self.reader.sq_tail, 0)) - self._taken
        count = min(submit, there)
        if fault == LOST_RING:
            return -errno.EBADF
        if fault == PARTLY:
            count = min(count, 1)
        for _ in range(count):
            self._take()
        self._ops.store_release(self._handed_over, 0, self._taken)
        return count

    def _take(self) -> None:
        """Read one submission entry, plainly as the kernel does."""
        base = (self._taken & (self._entries - 1)) * SQE_WORDS
        first, offset, address, nbytes, lease = (self.reader.sqes[base + i] for i in range(5))
        self._taken += 1
        if first & 0xFF != OP_READ:
            raise Violation(f"an entry of the ring asks for operation {first & 0xFF}")
        for read in self._machine.in_flight:
            asked = (read.descriptor, read.offset, read.buffer, read.nbytes)
            if read.lease == lease and asked == (first >> 32, offset, address, nbytes):
                self._waiting.append((self._taken, read))
                return
        raise Violation(f"lease {lease} has an entry in the ring that nobody submitted")

    def complete_forever(self) -> None:
        """Do reads and post completions: the body of a fiber."""
        while True:
            visible = self._ops.load_acquire(self._handed_over, 0)
            ready = sum(number <= visible for number, _ in self._waiting)
            if not ready:
                self._world.relax()
                continue
            _, read = self._waiting.pop(self._world.fault(ready))
            result = self._machine.fill(read)
            while self._completed - int(self._ops.load_acquire(self.reader.cq_head, 0)) >= (
                self._entries
            ):
                self._world.relax()
            self._machine.end(read)
            if self._is_deferred:
                self._deferred.append((read.lease, result))
                self._ops.fetch_add(self._ended, 0, 1)
                self._ops.store_release(self.reader.sq_flags, 0, SQ_TASKRUN)
            else:
                self._write(read.lease, result)

    def _write_deferred(self) -> None:
        """Write the entries of the reads that have ended, in the thread that enters."""
        if not self._is_deferred:
            return
        self._ops.store_release(self.reader.sq_flags, 0, 0)
        for _ in range(int(self._ops.load_acquire(self._ended, 0))):
            self._ops.fetch_add(self._ended, 0, -1)
            self._write(*self._deferred.pop(0))

    def _write(self, lease: int, result: int) -> None:
        """Write a completion entry."""
        base = (self._completed & (self._entries - 1)) * CQE_WORDS
        self.reader.cqes[base] = lease
        self.reader.cqes[base + 1] = result & _WORD
        self._completed += 1
        self._ops.store_release(self.reader.cq_tail, 0, self._completed)

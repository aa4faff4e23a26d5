"""gpuq's own pool under the same schedule: its poller, leases, reader and CUDA copier.

Only what would be a GPU is replaced: the copier's calls of the CUDA driver go to functions that
submit to a `GatedStream`. The poller's pass is called step by step instead of in its loop, so
that the order can be forced; nothing in it knows of the gates.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba import typeof

from gpuq.config import LoaderConfig
from gpuq.errors import GpuqError
from gpuq.host import poller as serving
from gpuq.host import records, tables
from gpuq.host import staging as leases
from gpuq.host.copier import DEVICE_MEMORY, make_cuda_copier
from gpuq.host.device import CpuDevice
from gpuq.host.driver import NOT_READY, SUCCESS, DriverTable
from gpuq.host.service import Service
from gpuq.kernels import queue as protocol
from gpuq.layout import State, Status
from gpuq.race.board import NOTHING, Board, Holder
from gpuq.race.order import Watchdog
from gpuq.race.stream import GatedStream, Layout, StreamEvent

_WORD = ctypes.c_int64
_IDLE_SECONDS = 0.0001
_STREAM_HANDLE = 1


class GatedDriver:
    """The three driver calls that the copier makes, on a stream that gates can hold.

    Events are handles counted from 1. No stream is there before `connect`.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._stream: GatedStream | None = None
        self._events: list[StreamEvent] = []
        # Called from the poller's compiled code; ctypes takes the interpreter lock for them.
        self._functions = (
            ctypes.CFUNCTYPE(ctypes.c_int, _WORD, _WORD, _WORD, _WORD)(self._copy),
            ctypes.CFUNCTYPE(ctypes.c_int, _WORD, _WORD)(self._record),
            ctypes.CFUNCTYPE(ctypes.c_int, _WORD)(self._query),
        )
        self.table = DriverTable(
            *(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions)
        )

    def connect(self, stream: GatedStream, events: int) -> None:
        """Say which stream the calls are about, and how many events there are."""
        self._stream = stream
        self._events = [StreamEvent(stream) for _ in range(events)]

    def _copy(self, to: int, origin: int, nbytes: int, _stream: int) -> int:
        assert self._stream is not None
        self._stream.copy(to, origin, nbytes)
        return SUCCESS

    def _record(self, event: int, _stream: int) -> int:
        self._events[event - 1].record()
        self._board.note("record_event", event - 1)
        return SUCCESS

    def _query(self, event: int) -> int:
        return SUCCESS if self._events[event - 1].is_complete() else NOT_READY


class GatedDevice(CpuDevice):
    """Host memory that the CUDA copier serves, as if it were a GPU's.

    Parameters
    ----------
    driver : GatedDriver
    """

    name = "gated"

    def __init__(self, driver: GatedDriver) -> None:
        self._driver = driver

    def copier(self, leases: int) -> Any:
        """Return the CUDA copier, with an event for each lease."""
        return make_cuda_copier(self._driver.table, _STREAM_HANDLE, list(range(1, leases + 1)))


class ProductPool:
    """A queue with its poller, two files, and a destination for `samples` blocks.

    Parameters
    ----------
    board : Board
    watchdog : Watchdog
    buffers : int
    destination : array of uint64, shape (samples, words of a block)
    values : list of int
        What each block holds; the last one comes from a file of its own.
    """

    def __init__(
        self,
        board: Board,
        watchdog: Watchdog,
        buffers: int,
        destination: Any,
        values: list[int],
    ) -> None:
        self._board = board
        self._watchdog = watchdog
        self._block_bytes = destination[0].nbytes
        slots = 1 << (len(values) - 1).bit_length()
        config = LoaderConfig(
            target="cpu",
            reader="threads",
            reader_threads=1,  # so that reads end in the order in which they were asked for
            slots=slots,
            staging_buffers=buffers,
            staging_bytes=self._block_bytes,
            sources=2,
            destinations=1,
            counters=1,
            trace=1,  # a request's tag is written down for a trace alone
        )
        driver = GatedDriver(board)
        self._service = Service(config, GatedDevice(driver))
        poller = self._service.poller
        self._poller = poller
        self.stream = GatedStream(
            Layout(poller.staging.address, destination.ctypes.data, self._block_bytes), board
        )
        driver.connect(self.stream, buffers)
        self._files = [_write_blocks(destination[0].size, part) for part in _files_of(values)]
        self._sources = [self._open(file) for file in self._files]
        self._destination = self._service.destinations.publish(
            self._service.destinations.reserve(),
            {
                tables.ADDRESS: destination.ctypes.data,
                tables.NBYTES: destination.nbytes,
                tables.KIND: DEVICE_MEMORY,
            },
        )
        self._last = len(values) - 1
        self._tickets: list[int] = []
        self._seen = [NOTHING] * buffers  # by lease, the sample that it carried after a pass

    def start(self) -> None:
        """Compile what serves and start the reader's thread."""
        if hasattr(serving.poll_once, "compile"):
            serving.poll_once.compile((typeof(self._poller),))
        self._service.choice.workers.start()
        self._service.raise_state(State.RUNNING)

    def close(self) -> None:
        """Give everything back; no copy is under way."""
        self._service.abort()
        self._service.join()
        for file in self._files:
            os.close(file)

    # --- what readers do ---

    def claim(self, sample: int) -> int:
        """Take a ticket and stop there: nothing says yet what is asked for."""
        self._board.note("ask", sample=sample)
        ticket = int(protocol.claim(self._service.queue))
        if ticket < 0:
            raise GpuqError(f"no slot for block {sample}")
        self._tickets.append(ticket)
        return ticket

    def publish(self, ticket: int, sample: int) -> None:
        """Ask for a block with a ticket."""
        is_other = sample == self._last
        start = 0 if is_other else sample * self._block_bytes
        protocol.publish(
            self._service.queue,
            ticket,
            self._sources[is_other],
            self._destination,
            sample * self._block_bytes,
            start,
            start + self._block_bytes,
            sample,
        )

    def ask(self, sample: int) -> None:
        """Ask for a block."""
        self.publish(self.claim(sample), sample)

    def finish(self) -> None:
        """Take all answers.

        Raises
        ------
        GpuqError
            One is not OK.
        """
        for ticket in self._tickets:
            status = Status(int(protocol.wait(self._service.queue, ticket)))
            if status != Status.OK:
                raise GpuqError(f"ticket {ticket} was answered {status.name}")

    # --- what the poller does ---

    def poll_until(self, condition: Callable[[], bool]) -> None:
        """Let the poller do passes until a condition holds."""
        while not condition():
            self._watchdog.check()
            done = serving.poll_once(self._poller)
            self._look()
            if done == 0:
                time.sleep(_IDLE_SECONDS)

    def has_admitted(self, count: int) -> bool:
        """Say whether the poller has taken so many requests, answered or not."""
        done = self._service.statistics()
        return done.outstanding + sum(done.requests.values()) >= count

    def has_answered(self, count: int) -> bool:
        """Say whether the poller has answered so many requests."""
        return sum(self._service.statistics().requests.values()) >= count

    def has_lease(self, sample: int) -> bool:
        """Say whether a buffer carries this block now."""
        return sample in self._seen

    def lease_of(self, sample: int) -> int:
        """Return the buffer that carries a block."""
        return self._seen.index(sample)

    def _look(self) -> None:
        """Note which leases a pass gave out and took back."""
        pending = self.stream.pending_buffers()
        now = [self._sample_on(lease) for lease in range(len(self._seen))]
        changed = [lease for lease, sample in enumerate(now) if sample != self._seen[lease]]
        for lease in changed:
            if self._seen[lease] != NOTHING:
                self._board.note("free_too_early" if lease in pending else "free", lease)
        for lease in changed:
            if now[lease] != NOTHING:
                self._board.note("lease", lease, now[lease])
        self._seen = now

    def _sample_on(self, lease: int) -> int:
        record = self._poller.staging.leases[lease]
        if record[leases.PHASE] == leases.FREE:
            return NOTHING
        return int(self._poller.requests[record[leases.LEASE_SLOT], records.REQUEST_TAG])

    # --- what there is to see ---

    def in_phase(self, phase: int) -> set[int]:
        """Return the leases that are in a phase."""
        phases = self._poller.staging.leases[:, leases.PHASE]
        return {int(lease) for lease in np.flatnonzero(phases == phase)}

    def holders(self) -> Iterator[Holder]:
        """Say of each buffer who holds it, and whether rightly."""
        pending = self.stream.pending_buffers()
        for lease, phase in enumerate(self._poller.staging.leases[:, leases.PHASE]):
            is_pending = lease in pending
            if phase == leases.FREE:
                yield Holder.FREE_TOO_EARLY if is_pending else Holder.FREE
            elif phase == leases.READING:
                yield Holder.FILLED_TOO_EARLY if is_pending else Holder.READER
            else:
                yield Holder.COPYING if is_pending else Holder.COPIED

    def _open(self, file: int) -> int:
        return self._service.sources.publish(
            self._service.sources.reserve(),
            {
                tables.DIRECT_DESCRIPTOR: -1,
                tables.BUFFERED_DESCRIPTOR: file,
                tables.ALIGNMENT: 1,
                tables.LIMIT_END: tables.MAX_OFFSET,
            },
        )


def _files_of(values: list[int]) -> tuple[list[int], list[int]]:
    return values[:-1], values[-1:]


def _write_blocks(words: int, values: list[int]) -> int:
    """Make a file in memory whose blocks hold one value each; return its descriptor."""
    file = os.memfd_create("gpuq-race")
    with os.fdopen(file, "wb", closefd=False) as stream:
        for value in values:
            stream.write(np.full(words, value, dtype=np.uint64).data)
    return file

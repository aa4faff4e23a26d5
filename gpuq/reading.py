"""Reads that the host asks for, through the same queue, poller and copier as a kernel's.

A thread of the loader's own posts them and looks for their answers, in compiled code that holds
no interpreter lock; callers get futures. On CUDA it launches a kernel for each batch instead,
since the words of the producers lie in the GPU's memory.
"""

from __future__ import annotations

import errno
import operator
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuq.compiling import compiled
from gpuq.errors import ClosedError, DestinationError, GpuqError, ReadError, SourceError
from gpuq.handles import Destination, Source, unregister_all
from gpuq.host.libc import futex_wait, futex_wake, sleep_ns, sleep_precisely
from gpuq.host.service import Service
from gpuq.host.tables import MAX_OFFSET
from gpuq.kernels.queue import poll
from gpuq.kernels.ready import (
    ANSWER_ERRNO,
    ANSWER_STATUS,
    ANSWER_WORDS,
    SLICE_DESTINATION,
    SLICE_END,
    SLICE_SOURCE,
    SLICE_START,
    SLICE_WORDS,
    post_slice,
    pull_request,
    take_answer,
)
from gpuq.launching import cuda_kernel, launch_on_cuda
from gpuq.layout import STATE, Queue, State, Status
from gpuq.ordering import as_signed, clock_ns, load_acquire, relax, store_release

# What stands for a ticket in a row without one.
_FREE = -1_000
_UNPOSTED = -1_001
_ANSWERED = -1_002

_HALF = 0xFFFFFFFF
_ENOSYS = errno.ENOSYS

_PENDING = int(Status.PENDING)
_ABORTED = int(Status.ABORTED)
_RUNNING = int(State.RUNNING)

_MOST_ROWS = 256
_SPINS_BEFORE_SLEEP = 256
_LEAST_SLEEP_NS = 20_000
_MOST_SLEEP_NS = 500_000
_SLEEP_SHARE = 8
"""A sleep lasts for so great a part of the time that was waited already."""
_LOOK_NS = 100_000_000
_HELD_DESTINATIONS = 64
_HELD_BYTES = 64 << 20
_IDLE_SECONDS = 0.05
_INTERRUPTED_SECONDS = 10.0


@compiled
def attend(
    q: Any,
    slices: Any,
    tickets: Any,
    answers: Any,
    bell: Any,
    bell_address: Any,
    heard: Any,
    timeout_ns: Any,
) -> Any:
    """Post what is unposted and look for answers, until there is one or the bell rings.

    Parameters
    ----------
    q : Queue
    slices : array of int64, shape (rows, SLICE_WORDS)
    tickets : array of int64, shape (rows,)
        The ticket of each row, or what its row is otherwise.
    answers : array of int64, shape (rows, ANSWER_WORDS)
    bell : array of uint64, shape (1,)
        Another thread changes it, and wakes who sleeps on its lower half, to be heard.
    bell_address : int
        Of that half.
    heard : int
        Its value so far.
    timeout_ns : int

    Returns
    -------
    int
        Rows that were answered meanwhile.
    """
    began = clock_ns()
    spins = 0
    while True:
        answered = 0
        for row in range(len(tickets)):
            if tickets[row] == _UNPOSTED:
                ticket = post_slice(q, slices, row, False)
                if ticket >= 0:
                    tickets[row] = ticket
                elif as_signed(load_acquire(q.control, STATE)) != _RUNNING:
                    answers[row, ANSWER_STATUS] = _ABORTED
                    answers[row, ANSWER_ERRNO] = 0
                    tickets[row] = _ANSWERED
                    answered += 1
            elif tickets[row] >= 0 and poll(q, tickets[row]) != _PENDING:
                take_answer(q, tickets[row], answers, row)
                tickets[row] = _ANSWERED
                answered += 1
        waited = clock_ns() - began
        if answered > 0 or as_signed(load_acquire(bell, 0)) != heard or waited >= timeout_ns:
            return answered
        if spins < _SPINS_BEFORE_SLEEP:
            relax(spins)
        else:
            duration = min(max(waited // _SLEEP_SHARE, _LEAST_SLEEP_NS), _MOST_SLEEP_NS)
            if futex_wait(bell_address, np.int64(heard & _HALF), duration) == -_ENOSYS:
                sleep_ns(_LEAST_SLEEP_NS)
        spins += 1


@dataclass(eq=False)
class _Read:
    """One range that somebody asked for."""

    path: str
    source: int
    start: int
    end: int
    destination: Destination
    future: Future[Any]


class HostReads:
    """The thread that reads for the host.

    Parameters
    ----------
    service : Service
    q : Queue

    Notes
    -----
    Destinations stay registered for a little while after their read, so that many are let go
    with one wait for the poller.
    """

    def __init__(self, service: Service, q: Queue) -> None:
        self._service = service
        self._queue = q
        self.rows = max(min(q.capacity // 2, _MOST_ROWS), 1)
        self._slices = np.zeros((self.rows, SLICE_WORDS), np.int64)
        self._tickets = np.full(self.rows, _FREE, np.int64)
        self._answers = np.zeros((self.rows, ANSWER_WORDS), np.int64)
        self._bell = np.zeros(1, np.uint64)
        self._kernel = _BatchKernel(service, q, self.rows) if _is_cuda(service) else None
        if self._kernel is None:
            arguments = (self._slices, self._tickets, self._answers, self._bell, 0, 0, 0)
            attend.compile(tuple(_typeof(argument) for argument in (q, *arguments)))
        self._pending: deque[_Read] = deque()
        self._reads: dict[int, _Read] = {}
        self._held: list[Destination] = []
        # So many that are done may stay registered; few where the table is small.
        self._most_held = min(_HELD_DESTINATIONS, service.config.destinations // 8)
        self._changed = threading.Condition()
        self._is_stopping = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gpuq-host-reads", daemon=True)
        self._thread.start()

    def submit(self, read: _Read) -> None:
        """Have a range read; its future says when."""
        with self._changed:
            if self._death is not None:
                raise GpuqError("the thread that reads for the host has ended") from self._death
            if self._is_stopping:
                raise ClosedError("the loader is closed")
            self._pending.append(read)
            self._ring()

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller is the reading thread itself."""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float | None = 0.0) -> None:
        """Take no more; the thread ends when all that was posted has its answer.

        Waits for that at most `timeout` seconds, None for ever.
        """
        with self._changed:
            self._is_stopping = True
            self._ring()
        if not self.is_this_thread:
            self._thread.join(timeout)

    def _ring(self) -> None:
        """Be heard by the thread, wherever it waits; the caller holds `_changed`."""
        store_release(self._bell, 0, self._bell[0] + np.uint64(1))
        futex_wake(self._bell.ctypes.data, 1)
        self._changed.notify()

    # --- in the thread ---

    def _run(self) -> None:
        try:
            sleep_precisely()
            while True:
                heard = self._take_pending()
                if heard is None:
                    return
                self._advance(heard)
                self._settle()
        except BaseException as error:  # nobody must wait for a thread that is gone
            with self._changed:
                self._death = error
                left = [*self._reads.values(), *self._pending]
                self._pending.clear()
            for read in left:
                if not read.future.done():
                    read.future.set_exception(error)

    def _take_pending(self) -> int | None:
        """Move what was asked for to free rows; wait while there is nothing to do.

        Returns the bell's value, or None at the end.
        """
        while True:
            with self._changed:
                if not self._pending and not self._reads:
                    if self._is_stopping:
                        return None
                    self._changed.wait(_IDLE_SECONDS if self._held else None)
                heard = int(self._bell[0])
                taken = [self._pending.popleft() for _ in range(self._room())]
                refused = list(self._pending) if self._is_stopping else []
                if refused:
                    self._pending.clear()
            for read in refused:
                self._close(read, Status.ABORTED, 0)
            for read in taken:
                self._begin(read)
            if self._reads:
                return heard
            self._let_go()

    def _room(self) -> int:
        return 0 if self._is_stopping else min(self.rows - len(self._reads), len(self._pending))

    def _begin(self, read: _Read) -> None:
        if not read.future.set_running_or_notify_cancel():
            self._hold(read.destination)
            return
        row = int(np.flatnonzero(self._tickets == _FREE)[0])
        self._slices[row] = 0
        self._slices[row, SLICE_SOURCE] = read.source
        self._slices[row, SLICE_DESTINATION] = read.destination.handle
        self._slices[row, SLICE_START] = read.start
        self._slices[row, SLICE_END] = read.end
        self._tickets[row] = _UNPOSTED
        self._reads[row] = read

    def _advance(self, heard: int) -> None:
        if self._kernel is not None:
            self._kernel.run(self._slices, self._tickets, self._answers)
            return
        attend(
            self._queue,
            self._slices,
            self._tickets,
            self._answers,
            self._bell,
            self._bell.ctypes.data,
            heard,
            _LOOK_NS,
        )

    def _settle(self) -> None:
        """Tell those whose reads were answered."""
        for row in np.flatnonzero(self._tickets == _ANSWERED):
            read = self._reads.pop(int(row))
            self._tickets[row] = _FREE
            status = Status(int(self._answers[row, ANSWER_STATUS]))
            self._close(read, status, int(self._answers[row, ANSWER_ERRNO]))

    def _close(self, read: _Read, status: Status, number: int) -> None:
        self._hold(read.destination)
        if read.future.cancelled():
            return
        if status == Status.OK:
            read.future.set_result(read.destination.array)
        else:
            read.future.set_exception(self._error(read, status, number))

    def _error(self, read: _Read, status: Status, number: int) -> Exception:
        if status == Status.ABORTED:
            try:
                self._service.check()
            except GpuqError as error:
                return error
        return ReadError(read.path, read.start, read.end, status, number or None)

    def _hold(self, destination: Destination) -> None:
        self._held.append(destination)
        if (
            len(self._held) >= self._most_held
            or sum(held.nbytes for held in self._held) > _HELD_BYTES
        ):
            self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, []
        unregister_all(held)


class _BatchKernel:
    """Runs reads on the GPU, a kernel for each batch, on a stream of its own."""

    def __init__(self, service: Service, q: Queue, rows: int) -> None:
        import cupy

        self._device = service.device
        self._queue = q
        self._requests, requests = self._device.mapped_words(rows * SLICE_WORDS)
        self._answers, answers = self._device.mapped_words(rows * ANSWER_WORDS)
        self._arguments = (q, requests, answers)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._device.prepare(cuda_kernel(pull_request), (self._arguments,))

    def run(self, slices: Any, tickets: Any, answers: Any) -> None:
        """Have every unposted row answered."""
        rows = np.flatnonzero(tickets == _UNPOSTED)
        self._requests[: len(rows) * SLICE_WORDS] = slices[rows].reshape(-1).view(np.uint64)
        launch_on_cuda(pull_request, len(rows), self._arguments, 1, self._stream)
        self._device.synchronize(self._stream)
        got = self._answers[: len(rows) * ANSWER_WORDS].view(np.int64)
        answers[rows] = got.reshape(-1, ANSWER_WORDS)
        tickets[rows] = _ANSWERED


def _is_cuda(service: Service) -> bool:
    return service.device.name == "cuda"


def _typeof(argument: Any) -> Any:
    from numba import int64, typeof

    return int64 if isinstance(argument, int) else typeof(argument)


# --- what a loader offers --------------------------------------------------------------------


def start_read(loader: Any, source: Source, start: int, end: int | None, out: Any) -> Future[Any]:
    """Ask for a range; see `Loader.read_async`."""
    loader.check()
    if not isinstance(source, Source):
        raise TypeError(f"a Source of this loader is needed, not {type(source).__name__}")
    if not source.is_open or loader._sources.get(source.handle) is not source:
        raise SourceError(f"{source!r} is not open in this loader")
    start = operator.index(start)
    limit = min(source.size, source.end) if end is None else operator.index(end)
    if not 0 <= start <= limit <= MAX_OFFSET:
        raise SourceError(f"{source.path}: the range {start} to {limit} is none")
    array = loader.empty(limit - start) if out is None else out
    destination = loader.register(array)
    destination.is_for_kernels = False
    future: Future[Any] = Future()
    try:
        if destination.nbytes != limit - start:
            raise DestinationError(
                f"out has {destination.nbytes} bytes, and the range {start} to {limit} of "
                f"{source.path} has {limit - start}"
            )
        loader._host_reads().submit(
            _Read(source.path, source.handle, start, limit, destination, future)
        )
    except BaseException:
        destination.unregister()
        raise
    return future


def check_may_wait(loader: Any) -> None:
    """Refuse to wait for reads in the thread that makes them.

    Raises
    ------
    RuntimeError
    """
    if loader._host_reads().is_this_thread:
        raise RuntimeError(
            "a callback of a future cannot wait for a read: it runs in the thread that reads"
        )


def read(loader: Any, source: Source, start: int, end: int | None, out: Any) -> Any:
    """Ask for a range and wait; see `Loader.read`."""
    check_may_wait(loader)
    future = start_read(loader, source, start, end, out)
    try:
        return future.result()
    except KeyboardInterrupt:
        # Bytes may arrive in `out` until the read is over.
        if not future.cancel():
            wait([future], _INTERRUPTED_SECONDS)
        raise


def read_many(
    loader: Any, source: Source, ranges: Iterable[tuple[int, int]], in_flight: int
) -> Iterator[tuple[int, Any]]:
    """Read ranges and give each when it has arrived; see `Loader.read_many`."""
    check_may_wait(loader)
    most = reads_at_once(loader, in_flight)
    arrived: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
    outstanding: dict[Future[Any], int] = {}
    left = enumerate(ranges)
    is_over = False
    try:
        while True:
            while not is_over and len(outstanding) < most:
                number, wanted = next(left, (0, None))
                if wanted is None:
                    is_over = True
                    break
                future = _begun(loader, source, *wanted)
                outstanding[future] = number
                future.add_done_callback(arrived.put)
            if not outstanding:
                return
            future = arrived.get()
            number = outstanding.pop(future)
            yield number, future.result()
    finally:
        for future in outstanding:
            future.cancel()


def _begun(loader: Any, source: Source, start: int, end: int | None) -> Future[Any]:
    """Begin to read a range; what keeps it from beginning is the future's error, for its turn."""
    try:
        return start_read(loader, source, start, end, None)
    except GpuqError as error:
        future: Future[Any] = Future()
        future.set_exception(error)
        return future


def reads_at_once(loader: Any, wanted: int) -> int:
    """Return how many reads may be under way: each has a destination, and others need some too."""
    return max(min(wanted, int(loader.config.destinations) // 2), 1)

"""The poller's thread and everything it needs: start, stop, abort, drain, statistics.

Ending is safe from signal handlers and twice: `abort` only raises a word, and `close` takes each
resource out of its place before it gives it back.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass, replace

import numpy as np
from numba import typeof

from gpuq.config import LoaderConfig
from gpuq.errors import ClosedError, ForkedError, PollerDiedError
from gpuq.host import poller as serving
from gpuq.host import records
from gpuq.host.choice import choose_reader, keep_forever
from gpuq.host.copier import describe_failure
from gpuq.host.device import CpuDevice, Device, Region
from gpuq.host.libc import sleep_precisely
from gpuq.host.staging import make_staging
from gpuq.host.statistics import Statistics, take_statistics
from gpuq.host.tables import DESTINATION_WORDS, SOURCE_WORDS, CapabilityTable
from gpuq.layout import (
    CONTROL_WORDS,
    COUNTER_WORDS,
    FLAG_WORDS,
    LINE_WORDS,
    REVISION,
    REVISION_SEEN,
    STATE,
    SUBMISSION_WORDS,
    TAIL_WORDS,
    Queue,
    State,
)
from gpuq.ordering import fetch_add, load_acquire

STUCK_SECONDS = 5.0
"""How long the end of the interpreter waits for a read or a copy that does not end."""

_LOOK_SECONDS = 0.0002
_BUFFERS_STRAIGHT = 8
_STRAIGHT_BYTES = 4 << 20
_TIMES_BUFFERED = 4
_BUFFERED_BYTES = 16 << 20
"""Of a read straight out of the page cache: more than Linux reads ahead at once, so that it takes
each for a stream, and not for a random read."""


_services: weakref.WeakSet[Service] = weakref.WeakSet()


def _abort_in_child() -> None:
    """Tell kernels of a forked child that nobody serves them; its copy of the words is its own."""
    for service in list(_services):
        # A thread that held it is not there to let go of it.
        service.lock = threading.RLock()
        # CUDA does not survive a fork, and its memory may not be there.
        if isinstance(service.device, CpuDevice):
            records.raise_state(service.shown, int(State.ABORTED))


os.register_at_fork(after_in_child=_abort_in_child)


def _longest_straight(staging_bytes: int) -> int:
    """Return how much is read at once into an array itself: some buffers, where these are small.

    4 MiB is what recent Linux hands a disk as one (queue/max_sectors_kb in sysfs).
    """
    buffers = min(_BUFFERS_STRAIGHT, _STRAIGHT_BYTES // staging_bytes)
    return max(buffers, 1) * staging_bytes


def _longest_buffered(staging_bytes: int) -> int:
    """Return the same of a file that is read through the page cache."""
    direct = _longest_straight(staging_bytes)
    return max(min(_TIMES_BUFFERED * direct, _BUFFERED_BYTES), direct)


@dataclass
class _Outcome:
    """How the poller's thread ended; written by it alone, before it ends."""

    error: BaseException | None = None
    is_dirty: bool = False
    is_over: bool = False


def _run(poller: records.Poller, device: Device, outcome: _Outcome) -> None:
    """Serve, and abort the queue whatever goes wrong; the body of the thread."""
    try:
        sleep_precisely()
        device.enter_thread()
        number = serving.serve(poller)
        if number != 0:
            outcome.is_dirty = True
            outcome.error = OSError(number, describe_failure(poller.copier, number))
    except BaseException as error:
        outcome.is_dirty = True
        outcome.error = error
    finally:
        if int(load_acquire(poller.control, STATE)) != State.CLOSED:
            records.end_queue(poller, int(State.ABORTED))
        # Not Thread.is_alive: an exception in a join lets CPython 3.11 believe that a running
        # thread has ended (python/cpython issue 90882).
        outcome.is_over = True


class Service:
    """One queue, its memory and its poller.

    Parameters
    ----------
    config : LoaderConfig
    device : Device

    Raises
    ------
    ReaderUnavailableError
        The reader that was asked for does not work here. Nothing is left behind.
    """

    def __init__(self, config: LoaderConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.sources = CapabilityTable(config.sources, SOURCE_WORDS, "source")
        self.destinations = CapabilityTable(config.destinations, DESTINATION_WORDS, "destination")
        submissions, kernel_submissions = device.mapped_words(config.slots * SUBMISSION_WORDS)
        flags, kernel_flags = device.mapped_words(config.slots * FLAG_WORDS)
        # Kernels are shown a copy: what they write there must not move the host.
        self.control = np.zeros(CONTROL_WORDS, dtype=np.uint64)
        self.shown, kernel_control = device.mapped_words(CONTROL_WORDS)
        counters, kernel_counters = device.mapped_words(config.counters * COUNTER_WORDS)
        self.queue = Queue(
            submissions=kernel_submissions,
            flags=kernel_flags,
            control=kernel_control,
            tail=device.own_words(TAIL_WORDS, 0, 0),
            turns=device.own_words(config.slots, 0, 1),
            counters=kernel_counters,
            taken=device.own_words(config.counters * LINE_WORDS, 0, 0),
            capacity=config.slots,
            post_timeout_ns=config.post_timeout_ns,
        )
        self._memory: list[Region] = [device.staging(config.staging_buffers * config.staging_bytes)]
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._outcome = _Outcome()
        self._reported = False
        self._released = False
        self._is_reader_stopped = False
        _services.add(self)
        self._was_started = False
        self._was_aborted_here = False
        try:
            self.choice = choose_reader(config)
        except BaseException:
            device.close()
            raise
        staging = make_staging(
            config.staging_buffers, config.staging_bytes, self._memory[0].address
        )
        self.poller = records.make_poller(
            submissions=submissions,
            flags=flags,
            counters=counters,
            control=self.control,
            shown=self.shown,
            sources=self.sources.words,
            destinations=self.destinations.words,
            capacity=config.slots,
            staging=staging,
            reader=self.choice.reader,
            copier=device.copier(config.staging_buffers),
            merge_bytes=config.merge_bytes,
            straight_bytes=config.straight_bytes,
            longest_straight=_longest_straight(config.staging_bytes),
            longest_buffered=_longest_buffered(config.staging_bytes),
            trace=config.trace,
        )
        self._thread = threading.Thread(
            target=_run,
            args=(self.poller, device, self._outcome),
            name="gpuq-poller",
            daemon=True,
        )

    def start(self) -> None:
        """Compile what serves, then start the threads and open the queue."""
        try:
            self.raise_state(State.NEW)
            if hasattr(serving.serve, "compile"):
                serving.serve.compile((typeof(self.poller),))
            if self.choice.workers is not None:
                self.choice.workers.start()
            self.raise_state(State.RUNNING)
            self._thread.start()
            self._was_started = True
        except BaseException:
            self.raise_state(State.ABORTED)
            self.choice.stop(STUCK_SECONDS)
            self.device.close()
            self._released = True
            raise

    def raise_state(self, state: State) -> None:
        """Raise the queue's STATE for the host, and then for kernels."""
        records.raise_state(self.control, int(state))
        records.raise_state(self.shown, int(state))

    # --- what every host call asks first ---

    def check(self) -> None:
        """Raise what the caller must know before anything is done.

        Raises
        ------
        ForkedError, PollerDiedError, ClosedError
        """
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this loader belongs to process {self._pid}; make one in the forked process"
            )
        if self.state == State.ABORTED and not self._was_aborted_here:
            # The poller ended the queue; it says why a moment later.
            self._await_end(STUCK_SECONDS)
        self.raise_death()
        if self.state >= State.CLOSING:
            raise ClosedError(f"the loader is {self.state.name.lower()}")

    def raise_death(self) -> None:
        """Raise `PollerDiedError` if the poller ended by an error."""
        error = self._outcome.error
        if error is not None:
            self._reported = True
            raise PollerDiedError(f"the poller ended by an error: {error}") from error

    @property
    def state(self) -> State:
        """Where the queue is in its life."""
        return State(int(load_acquire(self.control, STATE)))

    @property
    def is_serving(self) -> bool:
        """Whether the poller's thread is alive in this process."""
        return os.getpid() == self._pid and self._was_started and not self._outcome.is_over

    # --- entries ---

    def close_entry(self, table: CapabilityTable, *handles: int) -> None:
        """Refuse new requests for handles, wait for those admitted, and give the indices back.

        The wait is over when no request uses an entry any more, or the poller is gone. It can
        be interrupted; the handles stay refused then.
        """
        with self.lock:
            table.retract(*handles)
        # The poller's acquire of REVISION makes the withdrawal visible to that pass and all later
        # ones; its release of REVISION_SEEN says that the passes before are over.
        wanted = int(fetch_add(self.control, REVISION, 1)) + 1
        while self.is_serving and (
            int(load_acquire(self.control, REVISION_SEEN)) < wanted or table.in_flight(*handles) > 0
        ):
            time.sleep(_LOOK_SECONDS)
        with self.lock:
            table.recycle(*handles)

    # --- the end ---

    def abort(self) -> None:
        """Release every waiting kernel at once; return without waiting for anything."""
        if os.getpid() == self._pid:
            self._was_aborted_here = True
            self.raise_state(State.ABORTED)

    def close(self) -> None:
        """Serve what was posted, then stop and give everything back; a second call does nothing.

        Raises
        ------
        PollerDiedError
            The poller had ended by an error that no call has raised yet.
        """
        if os.getpid() != self._pid:
            return
        self.raise_state(State.CLOSING)
        self.join()
        if not self._reported:
            self.raise_death()

    def join(self) -> None:
        """Wait for the poller's thread and give back what it used."""
        if self._thread is threading.current_thread():
            return
        self._await_end(None)
        with self.lock:
            if self._released:
                return
            self._released = True
        self._is_reader_stopped = self.choice.stop(STUCK_SECONDS)
        if not self._is_reader_stopped or self.is_dirty:
            keep_forever((self.device, self._memory, self.poller, self.choice))
            return
        # Views of a ring's memory keep its descriptor.
        self.poller = self.poller._replace(reader=None, copier=None)
        self.choice = replace(self.choice, reader=None, ring=None, workers=None)
        self._memory = []
        self.device.close()

    def _await_end(self, seconds: float | None) -> bool:
        """Wait until the poller's thread is over, for ever with None; False where it is not."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.is_serving:
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    @property
    def is_dirty(self) -> bool:
        """Whether a read or a copy may still be under way although nobody waits for it."""
        return self._outcome.is_dirty

    @property
    def may_begin_reads(self) -> bool:
        """Whether a worker may yet begin a read that a poller left behind when it died."""
        return self.is_dirty and self.choice.workers is not None and not self._is_reader_stopped

    def finish(self) -> None:
        """End a queue that its owner forgot, or that is left when the interpreter ends.

        Nothing raises, nothing waits for kernels, and a read that is stuck is waited for only so
        long.
        """
        self.abort()
        if os.getpid() != self._pid or self._released:
            return
        if self._thread is threading.current_thread():
            return
        if not self._await_end(STUCK_SECONDS):
            self._outcome.is_dirty = True
            keep_forever((self.device, self._memory, self.poller, self.choice))
        else:
            self.join()

    # --- what was done ---

    def statistics(self) -> Statistics:
        """Return a snapshot; each figure is exact, the set may be a pass apart."""
        return take_statistics(self.poller, self.device.name, self.choice.name)

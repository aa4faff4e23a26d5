"""The threads reader: pread(2) in worker threads of compiled code, for where io_uring is refused.

Two rings in host memory. The poller is the only producer of jobs and the only consumer of
results; workers claim jobs by compare-and-swap and positions for results by fetch-add. Neither
ring can overflow: each has room for every lease, and a lease has one read at a time.

=================  ====================  =========================================
word               writer                order
=================  ====================  =========================================
JOB_TAIL           poller                release / acquire
JOB_HEAD           workers               compare-and-swap
job words          poller                relaxed, ordered by JOB_TAIL
RESULT_TAIL        workers               fetch-add
result SEQUENCE    the worker            release / acquire; orders the other words
BELL               poller, at stop host  fetch-add; workers sleep on it (futex(2))
SLEEPERS           workers               fetch-add
STOP               host                  release / acquire
=================  ====================  =========================================
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import numpy as np
from numba import typeof

from gpuq.compiling import compiled, implements, inlined
from gpuq.host.libc import futex_wait, futex_wake, read_at
from gpuq.host.reader import await_read, flush_reads, reap_read, submit_read
from gpuq.layout import LINE_WORDS
from gpuq.ordering import (
    as_signed,
    compare_exchange,
    fetch_add,
    load_acquire,
    load_relaxed,
    relax,
    store_relaxed,
    store_release,
)

_JOB_TAIL = 0
_JOB_HEAD = LINE_WORDS
_RESULT_TAIL = 2 * LINE_WORDS
_STOP = 3 * LINE_WORDS
_SLEEPERS = 4 * LINE_WORDS
_SHARED_WORDS = 5 * LINE_WORDS

# Words of a job.
_LEASE, _DESCRIPTOR, _OFFSET, _ADDRESS, _NBYTES = range(5)
# Words of a result.
_SEQUENCE, _RESULT_LEASE, _RESULT = range(3)

# The poller's own words.
_SUBMITTED = 0
_RUNG = 1
_REAPED = 2

# The 32-bit words on which threads sleep: one for workers, one for the poller.
_BELL = 0
_DONE_BELL = 16

_SPINS_BEFORE_SLEEP = 128
_SLEEP_NS = 50_000_000
_EVERYBODY = 1 << 30
_LOOK_SECONDS = 0.0002


class ThreadsReader(NamedTuple):
    """The rings as compiled code sees them.

    Attributes
    ----------
    jobs, results : array of int64
        `LINE_WORDS` for each position.
    shared : array of int64
        The words of the table above.
    bells : array of uint32
    bells_address : int
    words : array of int64
        The poller's own.
    mask : int
    """

    jobs: Any
    results: Any
    shared: Any
    bells: Any
    bells_address: int
    words: Any
    mask: int


@compiled
def work(reader: Any) -> None:
    """Serve jobs until STOP is set; the body of a worker thread."""
    spins = 0
    while as_signed(load_acquire(reader.shared, _STOP)) == 0:
        if _work_once(reader):
            spins = 0
        elif spins < _SPINS_BEFORE_SLEEP:
            relax(spins)
            spins += 1
        else:
            _sleep_until_rung(reader)


@inlined
def _work_once(reader: Any) -> Any:
    """Claim a job, do it, and publish its result; False where there is none."""
    head = load_acquire(reader.shared, _JOB_HEAD)
    # Pairs with the poller's release in `_flush`: the job's words are visible.
    if head >= load_acquire(reader.shared, _JOB_TAIL):
        return False
    # Read the job before claiming it: once it is claimed, a lap of quick jobs may overwrite the
    # place. While HEAD stands here it cannot, since that would take more jobs than leases; so a
    # claim that succeeds proves that these words belong together.
    base = (head & reader.mask) * LINE_WORDS
    jobs = reader.jobs
    lease = load_relaxed(jobs, base + _LEASE)
    descriptor = load_relaxed(jobs, base + _DESCRIPTOR)
    offset = load_relaxed(jobs, base + _OFFSET)
    address = load_relaxed(jobs, base + _ADDRESS)
    nbytes = load_relaxed(jobs, base + _NBYTES)
    if compare_exchange(reader.shared, _JOB_HEAD, head, head + 1) != head:
        return True
    result = read_at(descriptor, address, nbytes, offset)
    position = fetch_add(reader.shared, _RESULT_TAIL, 1)
    base = (position & reader.mask) * LINE_WORDS
    reader.results[base + _RESULT_LEASE] = lease
    reader.results[base + _RESULT] = result
    # Pairs with the poller's acquire in `_reap`: the result and the bytes read are visible.
    store_release(reader.results, base + _SEQUENCE, position + 1)
    fetch_add(reader.bells, _DONE_BELL, 1)
    futex_wake(reader.bells_address + 4 * _DONE_BELL, 1)
    return True


@inlined
def _sleep_until_rung(reader: Any) -> None:
    # The poller stores JOB_TAIL, rings, and then reads SLEEPERS, all by read-modify-write; a
    # worker counts itself in and then looks for jobs. One of the two sees the other.
    bell = load_relaxed(reader.bells, _BELL)
    fetch_add(reader.shared, _SLEEPERS, 1)
    head = load_acquire(reader.shared, _JOB_HEAD)
    if head >= load_acquire(reader.shared, _JOB_TAIL) and (load_acquire(reader.shared, _STOP) == 0):
        futex_wait(reader.bells_address + 4 * _BELL, np.int64(bell), _SLEEP_NS)
    fetch_add(reader.shared, _SLEEPERS, -1)


@inlined
def _ring(reader: Any, count: Any) -> None:
    fetch_add(reader.bells, _BELL, 1)
    if fetch_add(reader.shared, _SLEEPERS, 0) > 0:
        futex_wake(reader.bells_address + 4 * _BELL, count)


@implements(submit_read, ThreadsReader)
def _submit(
    reader: Any, lease: Any, descriptor: Any, offset: Any, address: Any, nbytes: Any
) -> None:
    tail = reader.words[_SUBMITTED]
    base = (tail & reader.mask) * LINE_WORDS
    jobs = reader.jobs
    store_relaxed(jobs, base + _LEASE, lease)
    store_relaxed(jobs, base + _DESCRIPTOR, descriptor)
    store_relaxed(jobs, base + _OFFSET, offset)
    store_relaxed(jobs, base + _ADDRESS, address)
    store_relaxed(jobs, base + _NBYTES, nbytes)
    reader.words[_SUBMITTED] = tail + 1


@implements(flush_reads, ThreadsReader)
def _flush(reader: Any) -> Any:
    new = reader.words[_SUBMITTED] - reader.words[_RUNG]
    if new > 0:
        reader.words[_RUNG] = reader.words[_SUBMITTED]
        # Pairs with the workers' acquire in `_work_once`: the jobs' words are visible.
        store_release(reader.shared, _JOB_TAIL, reader.words[_SUBMITTED])
        _ring(reader, new)
    return 0


@implements(reap_read, ThreadsReader)
def _reap(reader: Any) -> Any:
    position = reader.words[_REAPED]
    base = (position & reader.mask) * LINE_WORDS
    # Pairs with the worker's release in `_work_once`.
    if load_acquire(reader.results, base + _SEQUENCE) != position + 1:
        return -1, 0
    reader.words[_REAPED] = position + 1
    return reader.results[base + _RESULT_LEASE], reader.results[base + _RESULT]


@implements(await_read, ThreadsReader)
def _await(reader: Any, timeout_ns: Any) -> None:
    bell = load_acquire(reader.bells, _DONE_BELL)
    position = reader.words[_REAPED]
    base = (position & reader.mask) * LINE_WORDS
    if load_acquire(reader.results, base + _SEQUENCE) != position + 1:
        futex_wait(reader.bells_address + 4 * _DONE_BELL, np.int64(bell), timeout_ns)


class WorkerThreads:
    """The threads behind a `ThreadsReader`.

    Parameters
    ----------
    reads : int
        Reads at once, one for each lease.
    threads : int
        Worker threads.
    """

    def __init__(self, reads: int, threads: int) -> None:
        capacity = 1 << max(reads - 1, 0).bit_length()
        bells = np.zeros(32, dtype=np.uint32)
        self.reader = ThreadsReader(
            jobs=np.zeros(capacity * LINE_WORDS, dtype=np.int64),
            results=np.zeros(capacity * LINE_WORDS, dtype=np.int64),
            shared=np.zeros(_SHARED_WORDS, dtype=np.int64),
            bells=bells,
            bells_address=bells.ctypes.data,
            words=np.zeros(LINE_WORDS, dtype=np.int64),
            mask=capacity - 1,
        )
        self._over = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"gpuq-read-{i}", daemon=True)
            for i in range(threads)
        ]

    def start(self) -> None:
        """Compile what they run, then start the threads."""
        if hasattr(work, "compile"):
            work.compile((typeof(self.reader),))
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        try:
            work(self.reader)
        finally:
            with self._lock:
                self._over += 1

    def stop(self, timeout: float) -> bool:
        """Stop the threads within `timeout` seconds; False where one is stuck in a read."""
        store_release(self.reader.shared, _STOP, 1)
        _ring(self.reader, _EVERYBODY)
        started = sum(thread.ident is not None for thread in self._threads)
        deadline = time.monotonic() + timeout
        # Not Thread.join: an exception in it lets CPython 3.11 believe that the thread has ended.
        while self._over < started:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

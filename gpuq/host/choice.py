"""Which reader serves: io_uring where a trial read with it succeeds, else threads."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuq.compiling import compiled
from gpuq.config import LoaderConfig
from gpuq.errors import ReaderUnavailableError
from gpuq.host.direct_file import OpenFile
from gpuq.host.libc import sleep_ns
from gpuq.host.reader import flush_reads, reap_read, submit_read
from gpuq.host.threads import WorkerThreads
from gpuq.host.uring import make_uring_reader, note_descriptor
from gpuq.host.uring_abi import SETUPS

_PROBE_BYTES = 4096
_ETIME, _EIO = errno.ETIME, errno.EIO


def keep_forever(thing: Any) -> None:
    """Never free what a stuck read or copy may still touch; to reuse it would be worse.

    Not even when the interpreter ends and empties its modules: a thread may be using it then.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@dataclass
class ReaderChoice:
    """A reader, why it was taken, and what stands behind it.

    Attributes
    ----------
    name : str
    reason : str
    reader : NamedTuple
    ring : MappedRing or None
    workers : WorkerThreads or None
    """

    name: str
    reason: str
    reader: Any
    ring: Any = None
    workers: Any = None

    def note(self, file: OpenFile) -> None:
        """Prepare for reads of a file; called before kernels can ask for it."""
        if self.ring is not None:
            note_descriptor(self.reader, file.buffered, file.may_wait, is_buffered=True)
            note_descriptor(self.reader, file.direct, file.may_wait, is_buffered=False)

    def stop(self, timeout: float) -> bool:
        """Give back what stands behind it; False where a worker is stuck in a read for so long."""
        if self.ring is not None:
            self.ring.close()
            self.ring = None
        return self.workers is None or self.workers.stop(timeout)


@compiled
def _try_reader(reader: Any, descriptor: Any, address: Any, nbytes: Any) -> Any:
    """Read once through a reader; return its result, or -ETIME after a second."""
    submit_read(reader, 0, descriptor, 0, address, nbytes)
    failure = flush_reads(reader)
    if failure != 0:
        return -failure
    for _ in range(10_000):
        lease, result = reap_read(reader)
        if lease == 0:
            return result
        sleep_ns(100_000)
    return -_ETIME


def probe_reader(reader: Any) -> int:
    """Read a page of known bytes through a reader; return 0 or an errno."""
    expected = os.urandom(_PROBE_BYTES)
    buffer = np.zeros(_PROBE_BYTES, dtype=np.uint8)
    descriptor = os.memfd_create("gpuq-probe")
    try:
        os.write(descriptor, expected)
        result = int(_try_reader(reader, descriptor, buffer.ctypes.data, _PROBE_BYTES))
    finally:
        os.close(descriptor)
    if result == -_ETIME:
        keep_forever((reader, buffer))
    if result < 0:
        return -result
    return 0 if buffer.tobytes() == expected else _EIO


def choose_reader(config: LoaderConfig) -> ReaderChoice:
    """Set up the reader that the settings ask for, or the best that really reads.

    Raises
    ------
    ReaderUnavailableError
        ``reader="io_uring"`` was asked for and does not work here.
    """
    reason = 'reader="threads" was asked for'
    if config.reader != "threads":
        try:
            return _uring(config)
        except ReaderUnavailableError as error:
            if config.reader == "io_uring":
                raise
            reason = error.strerror or str(error)
    workers = WorkerThreads(config.staging_buffers, config.reader_threads)
    return ReaderChoice("threads", reason, workers.reader, workers=workers)


def _uring(config: LoaderConfig) -> ReaderChoice:
    asked = "was asked for" if config.reader == "io_uring" else "a trial read with it succeeded"
    for setup in SETUPS:
        try:
            # A ring of its own: one that was read through belongs to the thread that did it.
            _try_ring(setup)
            reader, ring = make_uring_reader(config.staging_buffers, setup)
        except ReaderUnavailableError as error:
            refusal = error
            if error.errno == _ETIME:
                break  # that took its time once
        else:
            return ReaderChoice("io_uring", asked, reader, ring=ring)
    raise refusal


def _try_ring(setup: int) -> None:
    """Read once through a ring that is set up in one of the ways of `SETUPS`."""
    reader, ring = make_uring_reader(1, setup)
    try:
        number = probe_reader(reader)
    finally:
        ring.close()
    if number != 0:
        raise ReaderUnavailableError(
            number, f"io_uring was set up, but a read with it failed: {os.strerror(number)}"
        )

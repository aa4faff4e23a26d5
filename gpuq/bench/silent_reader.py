"""A reader that reads nothing: what is left of a request is the queue's own cost.

It says of every read at once that all bytes came. It keeps the contract of `gpuq.host.reader`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpuq.compiling import implements
from gpuq.host.libc import sleep_ns
from gpuq.host.reader import await_read, flush_reads, reap_read, submit_read

_SUBMITTED = 0
_REAPED = 1
_LEASE = 0
_NBYTES = 1


class SilentReader(NamedTuple):
    """Reads that were submitted and not reaped; the poller's alone.

    Attributes
    ----------
    words : array of int64, shape (2,)
        Reads submitted, and reaped, so far.
    reads : array of int64, shape (capacity, 2)
        Lease and bytes of read n at ``n % capacity``, a power of two.
    """

    words: Any
    reads: Any


def make_silent_reader(reads: int) -> SilentReader:
    """Build a reader that takes so many reads at once."""
    capacity = 1 << max(reads - 1, 0).bit_length()
    return SilentReader(np.zeros(2, dtype=np.int64), np.zeros((capacity, 2), dtype=np.int64))


@implements(submit_read, SilentReader)
def _submit(
    reader: Any, lease: Any, descriptor: Any, offset: Any, address: Any, nbytes: Any
) -> None:
    read = reader.reads[reader.words[_SUBMITTED] & (len(reader.reads) - 1)]
    read[_LEASE] = lease
    read[_NBYTES] = nbytes
    reader.words[_SUBMITTED] += 1


@implements(flush_reads, SilentReader)
def _flush(reader: Any) -> Any:
    return 0


@implements(reap_read, SilentReader)
def _reap(reader: Any) -> Any:
    if reader.words[_REAPED] == reader.words[_SUBMITTED]:
        return -1, 0
    read = reader.reads[reader.words[_REAPED] & (len(reader.reads) - 1)]
    reader.words[_REAPED] += 1
    return read[_LEASE], read[_NBYTES]


@implements(await_read, SilentReader)
def _await(reader: Any, timeout_ns: Any) -> None:
    sleep_ns(timeout_ns)

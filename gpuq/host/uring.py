"""The io_uring reader: reads through one ring, submitted and reaped by compiled code."""

from __future__ import annotations

import errno
from typing import Any, NamedTuple

import numpy as np

from gpuq.compiling import implements, inlined
from gpuq.host.libc import SYS_IO_URING_ENTER, SYS_IO_URING_REGISTER, system_call
from gpuq.host.reader import await_read, flush_reads, reap_read, submit_read
from gpuq.host.uring_abi import (
    CQE_WORDS,
    ENTER_EXT_ARG,
    ENTER_GETEVENTS,
    OP_READ,
    REGISTER_ENABLE_RINGS,
    SQ_TASKRUN,
    SQE_ASYNC,
    SQE_WORDS,
    MappedRing,
    map_ring,
)
from gpuq.ordering import as_signed, as_word, load_acquire, store_release

# Private words of the poller.
_TAIL = 0  # submission entries filled
_UNSENT = 1  # of these, not yet handed to the kernel
_HEAD = 2  # completion entries consumed
_FAILURE = 3  # errno of a call for completions; those that are missing never come then
_TIMESPEC = 4  # struct __kernel_timespec: seconds, nanoseconds
_ARGUMENT = 6  # struct io_uring_getevents_arg: sigmask, sigmask_sz + pad, ts
_UNAIDED = 9  # 1: the kernel has no workers to read beside the poller
_WORDS = 16

_DESCRIPTORS = 1 << 16
"""Descriptors beyond this are read as if each of their reads might wait."""

_BUFFERED = 1 << 8
"""What stands for a descriptor whose reads go through the page cache, in place of SQE flags."""
_LEAST_BESIDE = 1 << 20
_BESIDE = 1 << 32
"""Beside the lease in an entry's user data: its read was handed to the kernel's workers."""

_EAGAIN, _EBUSY, _EINTR = errno.EAGAIN, errno.EBUSY, errno.EINTR
_EBADFD, _ECANCELED, _ETIME = errno.EBADFD, errno.ECANCELED, errno.ETIME
_ARGUMENT_BYTES = 24
_RESULT_MASK = 0xFFFFFFFF
_RESULT_SIGN = 1 << 31


class UringReader(NamedTuple):
    """The ring as compiled code sees it; the kernel reads and writes the uint32 words.

    Attributes
    ----------
    descriptor, sq_mask, cq_mask : int
    sq_tail, sq_flags, cq_head, cq_tail : array of uint32, shape (1,)
    sqes, cqes : array of uint64
    words : array of int64
        The poller's own.
    words_address : int
    flags : array of int64
        SQE_ASYNC, _BUFFERED or 0 for each descriptor; written by the host before a source is
        opened.
    """

    descriptor: int
    sq_mask: int
    cq_mask: int
    sq_tail: Any
    sq_flags: Any
    cq_head: Any
    cq_tail: Any
    sqes: Any
    cqes: Any
    words: Any
    words_address: int
    flags: Any


def make_uring_reader(reads: int, setup: int) -> tuple[UringReader, MappedRing]:
    """Set up a ring for `reads` reads at once, in one of the ways of `uring_abi.SETUPS`.

    The thread that hands over the first read is the only one that may use it from then on.

    Raises
    ------
    ReaderUnavailableError
        The system refuses io_uring.
    """
    ring = map_ring(1 << max(reads - 1, 0).bit_length(), setup)
    words = np.zeros(_WORDS, dtype=np.int64)
    words[_ARGUMENT + 2] = words.ctypes.data + _TIMESPEC * 8
    reader = UringReader(
        descriptor=ring.descriptor,
        sq_mask=ring.sq_entries - 1,
        cq_mask=ring.cq_entries - 1,
        sq_tail=ring.sq_tail,
        sq_flags=ring.sq_flags,
        cq_head=ring.cq_head,
        cq_tail=ring.cq_tail,
        sqes=ring.sqes,
        cqes=ring.cqes,
        words=words,
        words_address=words.ctypes.data,
        flags=np.zeros(_DESCRIPTORS, dtype=np.int64),
    )
    return reader, ring


def note_descriptor(
    reader: UringReader, descriptor: int, may_wait: bool, is_buffered: bool
) -> None:
    """Say how reads of a descriptor are begun.

    Those that `may_wait` inside io_uring_enter would hold up all others: of files that know no
    "would wait" (FUSE, for one), a read is begun in the caller's own system call unless it is
    handed to the kernel's workers at once.
    """
    if 0 <= descriptor < len(reader.flags):
        ready = _BUFFERED if is_buffered else 0
        reader.flags[descriptor] = SQE_ASYNC if may_wait else ready


@inlined
def _is_read_beside(reader: Any, descriptor: Any, nbytes: Any) -> Any:
    """Say whether the kernel's workers are to make a read, beside this thread and all it has to do.

    They do where a large one goes through the page cache: most of it is a copy.
    """
    return (
        descriptor < len(reader.flags)
        and reader.flags[descriptor] == _BUFFERED
        and nbytes >= _LEAST_BESIDE
        and reader.words[_UNAIDED] == 0
    )


@inlined
def _may_wait(reader: Any, descriptor: Any) -> Any:
    return descriptor >= len(reader.flags) or reader.flags[descriptor] == SQE_ASYNC


@implements(submit_read, UringReader)
def _submit(
    reader: Any, lease: Any, descriptor: Any, offset: Any, address: Any, nbytes: Any
) -> None:
    # There is room: the ring has an entry for each lease, and a lease one read at a time.
    tail = reader.words[_TAIL]
    base = (tail & reader.sq_mask) * SQE_WORDS
    entry = reader.sqes
    beside = _BESIDE if _is_read_beside(reader, descriptor, nbytes) else 0
    flags = SQE_ASYNC if beside != 0 or _may_wait(reader, descriptor) else 0
    entry[base] = as_word(OP_READ | flags << 8 | descriptor << 32)
    entry[base + 1] = as_word(offset)
    entry[base + 2] = as_word(address)
    entry[base + 3] = as_word(nbytes)
    entry[base + 4] = as_word(lease | beside)
    entry[base + 5] = as_word(0)
    entry[base + 6] = as_word(0)
    entry[base + 7] = as_word(0)
    reader.words[_TAIL] = tail + 1
    reader.words[_UNSENT] += 1
    # Pairs with the kernel's acquire of the tail in io_uring_enter.
    store_release(reader.sq_tail, 0, np.uint32(tail + 1))


@inlined
def _comes_to_nothing(result: Any) -> Any:
    """Whether io_uring_enter only found no time for what it was asked."""
    return result == -_EAGAIN or result == -_EBUSY or result == -_EINTR or result == -_ETIME


@inlined
def _note_failure(reader: Any, result: Any) -> None:
    """Have the next flush fail where a call for completions did."""
    if result < 0 and not _comes_to_nothing(result):
        reader.words[_FAILURE] = -result


@implements(flush_reads, UringReader)
def _flush(reader: Any) -> Any:
    unsent = reader.words[_UNSENT]
    if unsent == 0 or reader.words[_FAILURE] != 0:
        return reader.words[_FAILURE]
    sent = system_call(SYS_IO_URING_ENTER, reader.descriptor, unsent, 0, 0, 0, 0)
    if sent == -_EBADFD:
        # The ring is not enabled yet. It will belong to this thread.
        failure = system_call(
            SYS_IO_URING_REGISTER, reader.descriptor, REGISTER_ENABLE_RINGS, 0, 0, 0, 0
        )
        if failure < 0:
            return -failure
        sent = system_call(SYS_IO_URING_ENTER, reader.descriptor, unsent, 0, 0, 0, 0)
    if sent >= 0:
        reader.words[_UNSENT] = unsent - sent
        return 0
    # Busy or interrupted: what is unsent is handed over again at the next flush.
    return 0 if _comes_to_nothing(sent) else -sent


@inlined
def _is_empty(reader: Any, head: Any) -> Any:
    """Whether the ring has no completion entry from `head` on."""
    # Pairs with the kernel's release of the tail: the entry and the bytes read are visible.
    return as_signed(load_acquire(reader.cq_tail, 0)) == head & _RESULT_MASK


@implements(reap_read, UringReader)
def _reap(reader: Any) -> Any:
    head = reader.words[_HEAD]
    if _is_empty(reader, head):
        if as_signed(load_acquire(reader.sq_flags, 0)) & SQ_TASKRUN == 0:
            return -1, 0
        # Reads are over whose entries are not written yet: this thread is to write them.
        entered = system_call(SYS_IO_URING_ENTER, reader.descriptor, 0, 0, ENTER_GETEVENTS, 0, 0)
        _note_failure(reader, entered)
        if _is_empty(reader, head):
            return -1, 0
    base = (head & reader.cq_mask) * CQE_WORDS
    data = as_signed(reader.cqes[base])
    lease = data & (_BESIDE - 1)
    result = as_signed(reader.cqes[base + 1]) & _RESULT_MASK
    if result & _RESULT_SIGN:
        result -= _RESULT_MASK + 1
    if result == -_ECANCELED and data & _BESIDE:
        # There is no worker, and none can be made (RLIMIT_NPROC): this thread reads it.
        reader.words[_UNAIDED] = 1
        result = np.int64(-_EAGAIN)
    reader.words[_HEAD] = head + 1
    # Pairs with the kernel's acquire of the head: the entry has been read.
    store_release(reader.cq_head, 0, np.uint32(head + 1))
    return lease, result


@implements(await_read, UringReader)
def _await(reader: Any, timeout_ns: Any) -> None:
    words = reader.words
    words[_TIMESPEC] = 0
    words[_TIMESPEC + 1] = timeout_ns
    entered = system_call(
        SYS_IO_URING_ENTER,
        reader.descriptor,
        0,
        1,
        ENTER_GETEVENTS | ENTER_EXT_ARG,
        reader.words_address + _ARGUMENT * 8,
        _ARGUMENT_BYTES,
    )
    _note_failure(reader, entered)

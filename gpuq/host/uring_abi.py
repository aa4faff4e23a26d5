"""The part of io_uring's kernel interface that gpuq uses (io_uring_setup(2), io_uring_enter(2)).

The ring is set up in Python, once; only what runs per read is compiled, in `gpuq.host.uring`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpuq.errors import ReaderUnavailableError
from gpuq.host.libc import SYS_IO_URING_SETUP, system_call

OP_READ = 22
SQE_ASYNC = 1 << 4
ENTER_GETEVENTS = 1 << 0
ENTER_EXT_ARG = 1 << 3
SETUP_R_DISABLED = 1 << 6
SETUP_COOP_TASKRUN = 1 << 8
SETUP_TASKRUN_FLAG = 1 << 9
SETUP_SINGLE_ISSUER = 1 << 12
SETUP_DEFER_TASKRUN = 1 << 13
SETUPS = (
    # Completions wait until the poller asks for them, which it does when SQ_TASKRUN says so, and
    # the first is there before the last has come (Linux 6.1). The ring belongs to the thread that
    # enables it.
    SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN | SETUP_TASKRUN_FLAG | SETUP_R_DISABLED,
    # They wait for the next system call, instead of interrupting a poller that spins (5.19).
    SETUP_COOP_TASKRUN | SETUP_TASKRUN_FLAG,
    0,
)
"""How a ring may be set up, the best first; which of them a kernel has is found by trying."""
SQ_TASKRUN = 1 << 2
REGISTER_ENABLE_RINGS = 12
FEAT_SINGLE_MMAP = 1 << 0
FEAT_NODROP = 1 << 1
FEAT_EXT_ARG = 1 << 8

SQE_BYTES = 64
SQE_WORDS = 8
CQE_BYTES = 16
CQE_WORDS = 2

_OFF_RINGS = 0
_OFF_SQES = 0x10000000
_RING_HEAD_BYTES = 64

# The mode of a thread under a filter (proc_pid_status(5)).
_SECCOMP_FILTER = "2"


class _SqOffsets(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_uint32)
            for name in (
                "head",
                "tail",
                "ring_mask",
                "ring_entries",
                "flags",
                "dropped",
                "array",
                "reserved",
            )
        ),
        ("user_address", ctypes.c_uint64),
    )


class _CqOffsets(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_uint32)
            for name in (
                "head",
                "tail",
                "ring_mask",
                "ring_entries",
                "overflow",
                "cqes",
                "flags",
                "reserved",
            )
        ),
        ("user_address", ctypes.c_uint64),
    )


class _Params(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_uint32)
            for name in (
                "sq_entries",
                "cq_entries",
                "flags",
                "sq_thread_cpu",
                "sq_thread_idle",
                "features",
                "wq_fd",
            )
        ),
        ("reserved", ctypes.c_uint32 * 3),
        ("sq_off", _SqOffsets),
        ("cq_off", _CqOffsets),
    )


assert ctypes.sizeof(_SqOffsets) == ctypes.sizeof(_CqOffsets) == 40
assert ctypes.sizeof(_Params) == 120


@dataclass
class MappedRing:
    """A ring and views of what it shares with the kernel; `close` gives it back.

    Attributes
    ----------
    descriptor : int
    sq_entries, cq_entries : int
    sq_tail, sq_flags, cq_head, cq_tail : array of uint32, shape (1,)
    sqes : array of uint64
        `SQE_WORDS` for each entry.
    cqes : array of uint64
        `CQE_WORDS` for each entry.
    """

    descriptor: int
    sq_entries: int
    cq_entries: int
    sq_tail: NDArray[np.uint32]
    sq_flags: NDArray[np.uint32]
    cq_head: NDArray[np.uint32]
    cq_tail: NDArray[np.uint32]
    sqes: NDArray[np.uint64]
    cqes: NDArray[np.uint64]

    def close(self) -> None:
        """Close the ring; its memory goes when the last view of it does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def map_ring(entries: int, setup: int) -> MappedRing:
    """Set up a ring with at least `entries` submission entries, in one of the ways of `SETUPS`.

    Raises
    ------
    ReaderUnavailableError
        The system refuses; the message says how and what that usually means.
    """
    params = _Params(flags=setup)
    descriptor = system_call(SYS_IO_URING_SETUP, entries, ctypes.addressof(params), 0, 0, 0, 0)
    if descriptor < 0:
        raise ReaderUnavailableError(-descriptor, _explain_refusal(-descriptor))
    try:
        wanted = FEAT_SINGLE_MMAP | FEAT_NODROP | FEAT_EXT_ARG
        if params.features & wanted != wanted:
            raise ReaderUnavailableError(
                errno.ENOSYS, "io_uring is too old here: it lacks EXT_ARG (Linux 5.11)"
            )
        sq, cq = params.sq_off, params.cq_off
        rings_bytes = max(sq.array + params.sq_entries * 4, cq.cqes + params.cq_entries * CQE_BYTES)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        rings = mmap.mmap(descriptor, rings_bytes, flags=flags, offset=_OFF_RINGS)
        sqes = mmap.mmap(descriptor, params.sq_entries * SQE_BYTES, flags=flags, offset=_OFF_SQES)
        # Submission entry i always stands at index i of the indirection array.
        order = np.frombuffer(rings, np.uint32, params.sq_entries, sq.array)
        order[:] = np.arange(params.sq_entries, dtype=np.uint32)
        return MappedRing(
            descriptor=descriptor,
            sq_entries=params.sq_entries,
            cq_entries=params.cq_entries,
            sq_tail=np.frombuffer(rings, np.uint32, 1, sq.tail),
            sq_flags=np.frombuffer(rings, np.uint32, 1, sq.flags),
            cq_head=np.frombuffer(rings, np.uint32, 1, cq.head),
            cq_tail=np.frombuffer(rings, np.uint32, 1, cq.tail),
            sqes=np.frombuffer(sqes, np.uint64, params.sq_entries * SQE_WORDS),
            cqes=np.frombuffer(rings, np.uint64, params.cq_entries * CQE_WORDS, cq.cqes),
        )
    except BaseException:
        os.close(descriptor)
        raise


def ring_bytes(reads: int) -> int:
    """Return the memory that the kernel pins for a ring of `reads` reads at once, in bytes."""
    entries = 1 << max(reads - 1, 0).bit_length()
    rings = _RING_HEAD_BYTES + entries * 4 + 2 * entries * CQE_BYTES
    pages = -(-rings // mmap.PAGESIZE) + -(-entries * SQE_BYTES // mmap.PAGESIZE)
    return pages * mmap.PAGESIZE


def _explain_refusal(number: int) -> str:
    name = errno.errorcode.get(number, str(number))
    setting = _word_of("/proc/sys/kernel/io_uring_disabled")
    is_filtered = _word_of("/proc/thread-self/status", "Seccomp:") == _SECCOMP_FILTER
    if number == errno.EPERM:
        if setting == "2" or (setting == "1" and not is_filtered):
            why = f"the sysctl kernel.io_uring_disabled is {setting}"
        elif setting == "1":
            why = "the sysctl kernel.io_uring_disabled is 1, or a seccomp filter refuses it"
        elif is_filtered:
            why = f"a seccomp filter (kernel.io_uring_disabled is {setting or 'absent'})"
        else:
            shown = setting or "absent"
            why = f"no seccomp filter, and kernel.io_uring_disabled is {shown}: a security module?"
    elif number == errno.ENOSYS:
        if setting is not None:
            what = "a seccomp filter" if is_filtered else "something"
            why = f"{what} hides it; the kernel has it"
        elif is_filtered:
            why = "the kernel has none, or a seccomp filter hides it"
        else:
            why = "the kernel has none"
    elif number == errno.ENOMEM:
        why = "the locked-memory limit (ulimit -l) is too low"
    else:
        why = os.strerror(number)
    return f"io_uring is refused with {name}: {why}"


def _word_of(path: str, label: str = "") -> str | None:
    """Return the word behind a label in a file of /proc; None where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line[len(label) :].strip() for line in lines if line.startswith(label)), None)

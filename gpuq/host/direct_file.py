"""Files read with O_DIRECT: how one is opened, which spans are read, and where a file ends.

The arithmetic is compiled for the poller; opening happens in Python. A source is the descriptor
that was opened, not the path: another file that takes the path later is another source.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
from dataclasses import dataclass
from typing import Any

from gpuq.compiling import inlined
from gpuq.errors import DirectUnavailableError, SourceError

MEMORY_ALIGNMENT = 4096
"""Alignment of every staging buffer, in bytes."""

_PINS_SINCE = (6, 5)
_ASSUMED_ALIGNMENT = 4096
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MASK_AT, _MEMORY_AT, _OFFSET_AT = 0, 152, 156

DIRECT_MODES = ("auto", "require", "off")

# Verdicts on a finished read.
ENOUGH = 0
RESUME = 1
ENDED = 2


@inlined
def span_start(start: Any, alignment: Any) -> Any:
    """Return the last aligned offset that is not after `start`.

    An alignment is a power of two, here and below; `open_file` takes no other. A division costs
    more than all else that is done for a small request.
    """
    return start & -alignment


@inlined
def span_bytes(start: Any, end: Any, alignment: Any, most: Any) -> Any:
    """Return the bytes to read from ``span_start(start)`` to cover up to `end`, at most `most`.

    `most` is a multiple of the alignment.
    """
    rounded = (end + alignment - 1) & -alignment
    return min(rounded - span_start(start, alignment), most)


@inlined
def straight_bytes(
    start: Any, end: Any, address: Any, alignment: Any, least: Any, most: Any
) -> Any:
    """Return how many bytes from `start` on can be read to `address` and need no buffer.

    Whole blocks, at least `least` bytes of them in all up to `end`, and at once up to the next
    multiple of `most` in the file, a multiple of the alignment: the system cuts large reads where
    they cross blocks of the disk. 0 where none can; less than 0 where so many bytes come before
    the first of them.
    """
    edge = -start & (alignment - 1)
    inner = (end - start - edge) & -alignment
    if inner < least or inner <= 0 or (address + edge) & (alignment - 1) != 0:
        return 0
    return -edge if edge > 0 else min(inner, most - start % most)


@inlined
def judge_read(resumed: Any, got: Any, filled: Any, needed: Any) -> Any:
    """Say what a read of `got` bytes that began at `resumed` of its span means.

    `filled` bytes were known before it, of which `needed` are wanted. A short read is no error:
    the caller reads on from the last aligned boundary. A read that makes no progress is the end
    of the file, for a read with O_DIRECT returns the same unaligned tail again and again.
    """
    reached = resumed + got
    if reached >= needed:
        return ENOUGH
    return RESUME if reached > filled else ENDED


@dataclass(frozen=True)
class OpenFile:
    """A file opened for reading.

    Attributes
    ----------
    path : str
    buffered : int
        Descriptor through the page cache.
    direct : int
        Descriptor with O_DIRECT, -1 where there is none.
    alignment : int
        Bytes; of offset and length of direct reads.
    size : int
        Bytes, when it was opened.
    reason : str
        Why reads are direct or buffered.
    proven : bool
        Whether a direct read was done and succeeded.
    may_wait : bool
        The file knows no "would wait": even to begin a read may take as long as the read.
    pins : bool
        Direct reads may go to any memory, whatever a fork does meanwhile.
    """

    path: str
    buffered: int
    direct: int
    alignment: int
    size: int
    reason: str
    proven: bool
    may_wait: bool
    pins: bool

    def close(self) -> None:
        """Close both descriptors."""
        for descriptor in (self.buffered, self.direct):
            if descriptor >= 0:
                # close(2) reports the fate of writes, of which there are none, and a file system
                # whose server is gone; the descriptor is given back in any case.
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def statx_alignment(descriptor: int) -> tuple[int, int] | None:
    """Return (memory, offset) alignment of direct I/O, from statx(2) STATX_DIOALIGN (Linux 6.1).

    None where the kernel or the file system does not say; (0, 0) where it says "not supported".
    """
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return None
    if libc.statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None

    def word(position: int) -> int:
        return int.from_bytes(buffer.raw[position : position + 4], "little")

    if not word(_MASK_AT) & _STATX_DIOALIGN:
        return None
    return word(_MEMORY_AT), word(_OFFSET_AT)


def pins_memory(said: tuple[int, int] | None) -> bool:
    """Say whether the system pins the pages of a direct read, so that a fork copies them at once.

    Where it does not, and the process forks while such a read is under way, the next write to a
    page of it gives the writer another page, and the read's bytes are lost (open(2), O_DIRECT).
    Staging is kept from children instead. Linux pins since 6.5 in block devices and the file
    systems that build on them; these say their alignment, others (FUSE, NFS) do not. `said` is
    what `statx_alignment` returned.
    """
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if release is None or (int(release[1]), int(release[2])) < _PINS_SINCE:
        return False
    return said not in (None, (0, 0))


def open_file(path: str | os.PathLike[str], direct: str, staging_bytes: int) -> OpenFile:
    """Open a regular file or block device for reading.

    Parameters
    ----------
    path : path-like
    direct : {"auto", "require", "off"}
    staging_bytes : int
        Size of a staging buffer; an alignment beyond it cannot be served.

    Raises
    ------
    OSError
        The system refuses to open it; `filename` is set.
    SourceError
        It is neither a regular file nor a block device.
    DirectUnavailableError
        ``direct="require"`` and direct reads do not work here.
    """
    name = os.fspath(path)
    # Without O_NONBLOCK a FIFO blocks in open(2); with it, io_uring never waits: cleared below.
    buffered = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(buffered).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise SourceError(f"{name}: neither a regular file nor a block device")
        flags = fcntl.fcntl(buffered, fcntl.F_GETFL)
        fcntl.fcntl(buffered, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
        size = os.lseek(buffered, 0, os.SEEK_END)
        may_wait = not _knows_would_wait(buffered)
        if direct == "off":
            reason = 'direct="off" was asked for'
            return OpenFile(name, buffered, -1, 1, size, reason, False, may_wait, False)
        said = statx_alignment(buffered)
        descriptor, alignment, reason, proven = _open_direct(
            name, buffered, said, size, staging_bytes
        )
        if descriptor < 0 and direct == "require":
            raise DirectUnavailableError(f"{name}: direct reads were required, but {reason}")
        pins = descriptor >= 0 and pins_memory(said)
        return OpenFile(name, buffered, descriptor, alignment, size, reason, proven, may_wait, pins)
    except BaseException as error:
        os.close(buffered)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = name  # calls on a descriptor do not know it
        raise


def _open_direct(
    name: str, buffered: int, said: tuple[int, int] | None, size: int, staging_bytes: int
) -> tuple[int, int, str, bool]:
    """Return (descriptor, alignment, reason, proven); the descriptor is -1 where refused."""
    if said == (0, 0):
        return -1, 1, "the file system says that it cannot (statx STATX_DIOALIGN is 0)", False
    memory, offset = said or (_ASSUMED_ALIGNMENT, _ASSUMED_ALIGNMENT)
    # A short read is read on at the next aligned offset, into the same place of the buffer.
    alignment = max(memory, offset)
    source = "by statx" if said else "assumed, the file system does not say"
    is_odd = alignment & (alignment - 1) != 0
    if is_odd or memory > MEMORY_ALIGNMENT or staging_bytes % alignment != 0:
        return (
            -1,
            1,
            f"it needs memory aligned to {memory} and offsets to {offset} bytes, staging has "
            f"buffers of {staging_bytes} bytes aligned to {MEMORY_ALIGNMENT}",
            False,
        )
    try:
        descriptor = _reopen(name, buffered)
    except OSError as error:
        return -1, 1, f"open with O_DIRECT failed: {_name_of(error)}", False
    if size == 0:
        return descriptor, alignment, f"O_DIRECT, offsets of {alignment} bytes ({source})", False
    got = _try_direct_read(descriptor, alignment)
    # A read that ends inside a block cannot be read on: the same bytes would come again.
    if isinstance(got, OSError) or got < min(size, alignment):
        os.close(descriptor)
        if isinstance(got, OSError):
            return -1, 1, f"a first read with O_DIRECT failed: {_name_of(got)}", False
        return -1, 1, f"a first read with O_DIRECT brought {got} of {alignment} bytes", False
    return descriptor, alignment, f"O_DIRECT, offsets of {alignment} bytes ({source})", True


def _reopen(name: str, buffered: int) -> int:
    """Open the same file again with O_DIRECT, through the descriptor where /proc is there."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
    link = f"/proc/self/fd/{buffered}"
    if os.path.exists(link):
        return os.open(link, flags)
    descriptor = os.open(name, flags)
    if not os.path.sameopenfile(descriptor, buffered):
        os.close(descriptor)
        raise OSError(errno.ESTALE, "another file took the path meanwhile", name)
    return descriptor


def _try_direct_read(descriptor: int, alignment: int) -> int | OSError:
    with mmap.mmap(-1, max(alignment, mmap.PAGESIZE)) as memory:
        view = memoryview(memory)[:alignment]
        try:
            return os.preadv(descriptor, [view], 0)
        except OSError as error:
            return error
        finally:
            view.release()


def _knows_would_wait(descriptor: int) -> bool:
    """Whether reads can be told not to wait (preadv2(2), RWF_NOWAIT)."""
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError as error:
        return error.errno != errno.EOPNOTSUPP
    return True


def _name_of(error: OSError) -> str:
    number = error.errno or 0
    return f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"

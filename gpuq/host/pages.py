"""Where an array lies in its pages, how large these are, and when they come and go.

A file is read straight to an array, without a staging buffer, where a byte's place in a block of
the file is its place in a page.

Memory that was just allocated has no pages yet: each first write to one costs a fault, and the
system clears a page. In the poller's thread that is time in which no read is answered and none
issued, and more of it than the copy takes. So large arrays are in huge pages, which the system
clears faster and hands to a disk as one.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import operator
from pathlib import Path
from typing import Any

import numpy as np

_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)  # its calls hold no interpreter lock
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_LEAST_PLACED = 64 << 10
_LEAST_MAPPED = 2 << 20
_MOST_WASTED = 1 / 8
"""Share of a region's bytes that may be added to fill its last huge page."""


def _huge_page_bytes() -> int:
    """Return how large a huge page is; what most processors have where the system does not say."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 2 << 20


_HUGE = _huge_page_bytes()


def placed_empty(shape: Any, dtype: Any) -> Any:
    """Return an uninitialized NumPy array that begins where a page does.

    Small ones lie where NumPy puts them, and so does one whose elements are arrays themselves.
    """
    kind = np.dtype(dtype)
    nbytes = kind.itemsize * math.prod(_dimensions(shape))
    if nbytes < _LEAST_PLACED or not can_be_placed(kind, 0):
        return np.empty(shape, kind)
    return Region(nbytes, 0).memory.view(kind).reshape(shape)


def can_be_placed(dtype: np.dtype[Any], file_offset: int) -> bool:
    """Say whether elements may lie in memory as they do in a file at an offset."""
    is_plain = not dtype.hasobject and dtype.subdtype is None
    return is_plain and file_offset % dtype.alignment == 0


class Region:
    """Uninitialized memory that lies in its pages as in a file at an offset; for several arrays.

    Parameters
    ----------
    nbytes : int
    file_offset : int

    Attributes
    ----------
    memory : array of uint8, shape (nbytes,)

    Raises
    ------
    MemoryError
    """

    def __init__(self, nbytes: int, file_offset: int) -> None:
        place = file_offset % mmap.PAGESIZE
        self._mapping: mmap.mmap | None = None
        self._has_gaps = False
        if nbytes >= _LEAST_MAPPED:
            whole, skip = self._map(place, nbytes)
        else:
            whole = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
            skip = (place - whole.ctypes.data) % mmap.PAGESIZE
        self.memory = whole[skip : skip + nbytes]

    def _map(self, place: int, nbytes: int) -> tuple[Any, int]:
        """Make the mapping; return it as an array, and where in it the bytes begin."""
        used = place + nbytes
        filled = -(-used // _HUGE) * _HUGE
        is_huge = filled - used <= used * _MOST_WASTED
        try:
            mapping = mmap.mmap(-1, filled + _HUGE if is_huge else used, flags=_PRIVATE)
        except (OSError, OverflowError):
            raise MemoryError(f"no memory for {nbytes} bytes") from None
        self._mapping = mapping
        whole = np.frombuffer(mapping, np.uint8)
        if not is_huge:
            return whole, place
        # All of it: the system joins such mappings, and it has only so many.
        with contextlib.suppress(OSError):  # a system without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return whole, -whole.ctypes.data % _HUGE + place

    def part(self, start: int, nbytes: int) -> Any:
        """Return bytes of the region; pages that only they use go when no array views them."""
        piece = self.memory[start : start + nbytes]
        if self._mapping is None or nbytes < mmap.PAGESIZE:
            return piece
        return np.asarray(_Part(self, piece))

    def give_back(self, address: int, nbytes: int) -> None:
        """Give back the pages that lie whole within so many bytes from an address."""
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length <= 0 or self._mapping is None:
            return
        if not self._has_gaps:
            # Else the system would fill them again to have huge pages (khugepaged), where it
            # gives these to all memory, too.
            self._has_gaps = True
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        _libc.madvise(first, length, mmap.MADV_DONTNEED)


class _Part:
    """What arrays over a part of a region hold on to.

    The region's addresses stay reserved while there is an array in it; memory does not.
    """

    _region: Region | None = None

    def __init__(self, region: Region, piece: Any) -> None:
        self.__array_interface__ = piece.__array_interface__
        self._bytes = piece.ctypes.data, piece.nbytes
        self._region = region

    def __del__(self) -> None:
        if self._region is not None:
            self._region.give_back(*self._bytes)


def _dimensions(shape: Any) -> tuple[int, ...]:
    try:
        return (operator.index(shape),)
    except TypeError:
        return tuple(int(length) for length in shape)


def bring_in(array: Any) -> int:
    """Let every page of a NumPy array be there, in the calling thread; its bytes stay.

    Returns
    -------
    int
        0, or the errno with which the system refused (an older Linux: EINVAL). Nothing is lost
        then: the pages come when they are written to.
    """
    if array.nbytes == 0:
        return 0
    page = mmap.PAGESIZE
    first = array.ctypes.data // page * page
    end = -(-(array.ctypes.data + array.nbytes) // page) * page
    if _libc.madvise(first, end - first, _MADV_POPULATE_WRITE) == 0:
        return 0
    return ctypes.get_errno()

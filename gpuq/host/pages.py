"""Where an array lies in its pages, and that these are there before it is written to.

A file is read straight to an array, without a staging buffer, where a byte's place in a block of
the file is its place in a page.

Memory that was just allocated has no pages yet: each first write to one costs a fault, and the
system clears a page. In the poller's thread that is time in which no read is answered and none
issued, and more of it than the copy takes.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import operator
from typing import Any

import numpy as np

_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)  # its calls hold no interpreter lock
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_LEAST_PLACED = 64 << 10


def placed_empty(shape: Any, dtype: Any, file_offset: int = 0) -> Any:
    """Return an uninitialized NumPy array that lies in its pages as in a file at an offset.

    Small ones lie where NumPy puts them, and so does one whose elements do not stand in the file
    as the processor wants them, or are arrays themselves.
    """
    kind = np.dtype(dtype)
    nbytes = kind.itemsize * math.prod(_dimensions(shape))
    place = file_offset % mmap.PAGESIZE
    is_plain = not kind.hasobject and kind.subdtype is None
    if nbytes < _LEAST_PLACED or not is_plain or place % kind.alignment:
        return np.empty(shape, kind)
    memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    skip = (place - memory.ctypes.data) % mmap.PAGESIZE
    return memory[skip : skip + nbytes].view(kind).reshape(shape)


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

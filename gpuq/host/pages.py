"""Pages of an array brought in before it is written to.

Memory that was just allocated has no pages yet: each first write to one costs a fault, and the
system clears a page. In the poller's thread that is time in which no read is answered and none
issued, and more of it than the copy takes.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)  # its calls hold no interpreter lock
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


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

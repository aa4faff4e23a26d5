"""What is in the page cache."""

from __future__ import annotations

import mmap
from typing import Any

from gpuq.compiling import inlined
from gpuq.host.libc import SYS_CACHESTAT, system_call

CACHESTAT_WORDS = 7
"""struct cachestat_range (off, len), and behind it struct cachestat, which begins with the pages
that are cached."""

_CACHED_PAGES = 2
_PAGE = mmap.PAGESIZE


@inlined
def is_cached(words: Any, address: Any, descriptor: Any, offset: Any, nbytes: Any) -> Any:
    """Say whether all bytes of a range of a file are in the page cache (cachestat(2), Linux 6.5).

    Where the system does not tell, as it does only those who own a file or may write it, it is as
    if some were not.

    Parameters
    ----------
    words : array of int64, shape (CACHESTAT_WORDS,)
        For the call.
    address : int
        Of these words.
    descriptor, offset, nbytes : int
    """
    words[0] = offset
    words[1] = nbytes
    answer = address + _CACHED_PAGES * 8
    failure = system_call(SYS_CACHESTAT, descriptor, address, answer, 0, 0, 0)
    return failure == 0 and words[_CACHED_PAGES] * _PAGE >= nbytes

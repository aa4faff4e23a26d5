"""What the page cache holds of a file: bring it in, let it go, and look."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_READ_BYTES = 8 << 20
COLD_SHARE = 0.02
"""A file counts as cold where at most this share of its pages is cached."""


class CacheStateError(RuntimeError):
    """The page cache does not hold, or not forget, what a benchmark needs."""


def cached_share(path: Path) -> float:
    """Return the share of a file's pages that are in the page cache (mincore(2)).

    Raises
    ------
    OSError
        Also where the caller may not know: mincore tells only those who may write the file.
    """
    nbytes = path.stat().st_size
    if nbytes == 0:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-nbytes // mmap.PAGESIZE)
    present = np.zeros(pages, dtype=np.uint8)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, dtype=np.uint8)
        address, vector = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(present.ctypes.data)
        failed = libc.mincore(address, ctypes.c_size_t(nbytes), vector)
        del view
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}")
    return float(np.count_nonzero(present & 1)) / pages


def make_cold(path: Path) -> None:
    """Let the page cache forget a file.

    Raises
    ------
    CacheStateError
        It did not: a process has the file mapped, or the file system keeps its pages (tmpfs).
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    share = cached_share(path)
    if share > COLD_SHARE:
        raise CacheStateError(f"{path}: {share:.0%} of its pages stay cached")


def make_cached(path: Path) -> None:
    """Bring a file into the page cache by reading it.

    Raises
    ------
    CacheStateError
        It does not stay there: there is not enough memory.
    """
    buffer = bytearray(_READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    share = cached_share(path)
    if share < 1 - COLD_SHARE:
        raise CacheStateError(f"{path}: only {share:.0%} of its pages are cached")

"""The file that is read: of random bytes that are really on the disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_CHUNK_BYTES = 4 << 20
SIZE_STEP = 1 << 20
"""Sizes are rounded down to multiples of this, so that every block size divides them."""


@contextmanager
def bench_file(
    path: Path | None, nbytes: int, directory: Path, *, keep: bool = False
) -> Iterator[tuple[Path, int]]:
    """Yield a file and how many of its bytes to use.

    Parameters
    ----------
    path : Path or None
        A file that is there already; it is left alone. None makes one.
    nbytes : int
        Of the file that is made; of one that is there, at most so many are read.
    directory : Path
        Where a file is made.
    keep : bool
        Whether a file that was made stays.

    Raises
    ------
    ValueError
        The file is too small to read from.
    OSError
        It cannot be read, or made.
    """
    if path is not None:
        usable = min(path.stat().st_size, nbytes)
        yield path, _rounded(usable, f"{path} is too small")
        return
    size = _rounded(nbytes, "the size is too small")
    descriptor, name = tempfile.mkstemp(prefix="gpuq-bench-", suffix=".bin", dir=directory)
    made = Path(name)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            _fill(file.fileno(), size)
        yield made, size
    finally:
        if not keep:
            made.unlink(missing_ok=True)


def _rounded(nbytes: int, complaint: str) -> int:
    if nbytes < SIZE_STEP:
        raise ValueError(f"{complaint}: {nbytes} bytes; at least {SIZE_STEP} are needed")
    return nbytes // SIZE_STEP * SIZE_STEP


def _fill(descriptor: int, nbytes: int) -> None:
    """Write random bytes, bring them to the disk, and let the page cache forget them."""
    generator = np.random.default_rng(nbytes)
    for start in range(0, nbytes, _CHUNK_BYTES):
        chunk = memoryview(generator.bytes(min(_CHUNK_BYTES, nbytes - start)))
        while chunk:
            chunk = chunk[os.write(descriptor, chunk) :]
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

"""Pages brought in before they are written to."""

from __future__ import annotations

import ctypes
import errno
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuq
from gpuq import arrays
from gpuq.host import pages

NBYTES = 64 * mmap.PAGESIZE


def present(array: Any) -> int:
    """Return how many of an array's pages are there (mincore(2) tells of anonymous memory too)."""
    first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(array.ctypes.data + array.nbytes - first) // mmap.PAGESIZE)
    vector = (ctypes.c_uint8 * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(array.nbytes), vector) == 0
    return sum(flag & 1 for flag in vector)


def fresh() -> Any:
    """Return bytes whose pages are not there, between pages of others."""
    mapping = mmap.mmap(-1, NBYTES + 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapping, np.uint8)[mmap.PAGESIZE : -mmap.PAGESIZE]


def bring_in(array: Any) -> None:
    number = pages.bring_in(array)
    if number == errno.EINVAL:
        pytest.skip("this Linux has no MADV_POPULATE_WRITE")
    assert number == 0


def test_every_page_is_there_and_no_byte_changed() -> None:
    array = fresh()
    array[5] = 77
    assert present(array) == 1
    bring_in(array)
    assert present(array) == NBYTES // mmap.PAGESIZE
    assert array[5] == 77
    assert np.count_nonzero(array) == 1


def test_a_part_of_a_page_at_both_ends_is_enough() -> None:
    array = fresh()
    inner = array[mmap.PAGESIZE - 1 : 2 * mmap.PAGESIZE + 1]
    bring_in(inner)
    assert present(array) == 3


def test_nothing_is_asked_for_an_empty_array() -> None:
    assert pages.bring_in(np.empty(0, np.uint8)) == 0


def test_a_refusal_is_returned() -> None:
    array = fresh()
    # Of a file's pages that are mapped for reading only, none may be written to.
    with open(__file__, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert pages.bring_in(np.frombuffer(mapping, np.uint8)) in (errno.EINVAL, errno.EFAULT)
    assert present(array) == 0


@pytest.mark.parametrize("number", [0, errno.EINVAL])
def test_load_brings_in_what_it_reads_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    expected = np.arange(10_000, dtype=np.int32).reshape(100, 100)
    np.save(tmp_path / "a.npy", expected)
    brought: list[Any] = []

    def note(array: Any) -> int:
        brought.append(array)
        return number

    monkeypatch.setattr(arrays, "bring_in", note)
    with gpuq.Loader(target="cpu") as loader:
        (array,) = loader.load(tmp_path / "a.npy").values()
    np.testing.assert_array_equal(array, expected)
    assert len(brought) == 1
    assert np.shares_memory(brought[0], array)

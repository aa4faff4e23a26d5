"""Pages brought in before they are written to."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuq
from gpuq import arrays, handles
from gpuq.host import pages

NBYTES = 64 * mmap.PAGESIZE
HUGE = pages._HUGE


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
@pytest.mark.parametrize(
    ("is_direct", "straight_bytes", "times"), [(True, 1, 1), (False, 1, 0), (False, 0, 1)]
)
def test_load_brings_in_what_it_reads_into_unless_others_than_the_poller_copy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    is_direct: bool,
    straight_bytes: int,
    times: int,
) -> None:
    expected = np.arange(10_000, dtype=np.int32).reshape(100, 100)
    np.save(tmp_path / "a.npy", expected)
    brought: list[Any] = []

    def note(array: Any) -> int:
        brought.append(array)
        return number

    monkeypatch.setattr(arrays, "bring_in", note)
    monkeypatch.setattr(handles.Source, "_is_direct", is_direct)
    with gpuq.Loader(target="cpu", direct="off", straight_bytes=straight_bytes) as loader:
        (array,) = loader.load(tmp_path / "a.npy").values()
    np.testing.assert_array_equal(array, expected)
    assert len(brought) == times
    assert all(np.shares_memory(one, array) for one in brought)


# --- regions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE - 1, HUGE, 3 * HUGE + 5, 32 * HUGE - 5000])
@pytest.mark.parametrize("file_offset", [0, 1, 4095, HUGE + 512])
def test_a_region_lies_in_its_pages_as_in_the_file(nbytes: int, file_offset: int) -> None:
    region = pages.Region(nbytes, file_offset)
    assert region.memory.shape == (nbytes,)
    assert region.memory.ctypes.data % mmap.PAGESIZE == file_offset % mmap.PAGESIZE
    region.memory[[0, -1]] = 5
    if nbytes > 16 * HUGE:
        assert region.memory.ctypes.data % HUGE == file_offset % mmap.PAGESIZE


def test_a_part_gives_back_its_own_pages_when_nothing_views_it() -> None:
    region = pages.Region(4 * HUGE - mmap.PAGESIZE, 100)
    region.memory[:] = 7
    begin = HUGE + 1000
    part = region.part(begin, 2 * HUGE)
    # The last view is of another type and shape, and reaches the memory through a buffer.
    view = np.frombuffer(memoryview(part.view("<u4").reshape(2, -1)[1]), np.uint8)[8:]
    del part
    gc.collect()
    assert (view == 7).all()
    before = present(region.memory)
    del view
    gc.collect()
    inner = 2 * HUGE - mmap.PAGESIZE  # it begins and ends within a page
    assert before - present(region.memory) == inner // mmap.PAGESIZE
    assert (region.memory[:begin] == 7).all()
    assert (region.memory[begin + 2 * HUGE :] == 7).all()
    first = -(region.memory.ctypes.data + begin) % mmap.PAGESIZE
    assert not region.memory[begin + first : begin + first + inner].any()


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE - 1, mmap.PAGESIZE, mmap.PAGESIZE + 1])
def test_a_small_part_takes_no_neighbours_page_with_it(nbytes: int) -> None:
    region = pages.Region(HUGE, 0)
    region.memory[:] = 9
    parts = [region.part(at, nbytes) for at in (0, 4096 - nbytes // 2, HUGE - nbytes)]
    for part in parts:
        part[:] = 9
    del part, parts
    gc.collect()
    kept = np.ones(HUGE, bool)
    if nbytes >= mmap.PAGESIZE:
        kept[: mmap.PAGESIZE] = False
        kept[HUGE - mmap.PAGESIZE :] = False
    assert (region.memory[kept] == 9).all()


def smaps_of(array: Any) -> dict[str, str]:
    """Return what the system says of an array's mapping (proc_pid_smaps(5))."""
    said: dict[str, str] = {}
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            is_it = int(span[1], 16) <= array.ctypes.data < int(span[2], 16)
        elif is_it:
            name, _, value = line.partition(":")
            said[name] = value
    return said


def test_a_region_whose_part_was_given_back_is_not_filled_again() -> None:
    # The system's khugepaged gave each gap its memory back, to have huge pages again.
    region = pages.Region(16 * HUGE, 0)
    region.memory[:] = 1
    if smaps_of(region.memory)["AnonHugePages"].split()[0] == "0":
        pytest.skip("this system gives no huge pages")
    part = region.part(0, HUGE)
    assert "hg" in smaps_of(region.memory)["VmFlags"].split()
    del part
    gc.collect()
    assert "nh" in smaps_of(region.memory)["VmFlags"].split()
    assert (region.memory[HUGE:] == 1).all()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages"
)
def test_nor_is_one_that_did_not_ask_for_huge_pages() -> None:
    # A system that gives them to all memory (transparent_hugepage/enabled: always) filled it.
    region = pages.Region(2 * HUGE + HUGE // 2, 0)
    region.memory[:] = 1
    assert "hg" not in smaps_of(region.memory)["VmFlags"].split()
    part = region.part(0, HUGE)
    del part
    gc.collect()
    assert "nh" in smaps_of(region.memory)["VmFlags"].split()
    assert (region.memory[HUGE:] == 1).all()


def test_many_arrays_are_few_mappings() -> None:
    # Each was two: the system has only so many (vm.max_map_count), and fails at any call then.
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    arrays = [pages.placed_empty(8 * HUGE, np.uint8) for _ in range(50)]
    assert mappings() - before < 10
    assert len(arrays) == 50


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 63, 1 << 70])
def test_memory_that_there_is_not_is_a_memory_error(nbytes: int) -> None:
    with pytest.raises(MemoryError):
        pages.Region(nbytes, 0)


def test_without_huge_pages_a_region_is_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.mmap, "MADV_HUGEPAGE", 12345)  # refused: EINVAL
    array = pages.Region(16 * HUGE, 77).memory
    array[:] = 1
    assert array.ctypes.data % mmap.PAGESIZE == 77

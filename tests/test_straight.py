"""Reads straight into a destination: only whole blocks, only the request's own bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import Compiled
from stepping import ALIGNMENT, BUFFER, DATA, GUARD, Stepper

import gpuq
from gpuq.host import direct_file, records, tables
from gpuq.host.direct_file import straight_bytes
from gpuq.host.pages import Region, can_be_placed, placed_empty
from gpuq.layout import STATE, State, Status
from gpuq.testing import readers

READ_ALL = (readers.READ, -1)


@pytest.fixture
def straight(stepper: Any) -> Callable[..., Stepper]:
    """Make steppers that read straight what is at least a block."""
    return lambda *given, **named: stepper(*given, **{"straight_bytes": ALIGNMENT} | named)


def fitting_offset(s: Stepper, start: int) -> int:
    """Return an offset in the destination that has the place in a block that `start` has."""
    return (start - (s.room.ctypes.data + 64)) % ALIGNMENT


def addresses(s: Stepper) -> list[int]:
    """Return where the reads went, as offsets in the destination; -1 for a staging buffer."""
    begin = s.room.ctypes.data + 64
    return [
        int(a) - begin if begin <= a < begin + len(s.bytes) else -1
        for a in s.log()[:, readers.ADDRESS]
    ]


def went_straight(s: Stepper) -> int:
    return int(s.poller.statistics[records.STATISTICS_STRAIGHT])


def test_whole_blocks_go_straight_and_the_rest_by_staging(straight: Any) -> None:
    s = straight(DATA)
    start, end = 300, 300 + 3000
    offset = fitting_offset(s, start)
    ticket = s.post(start, end, offset)
    s.run()
    assert s.status(ticket) == Status.OK
    # 300 to 512 by a buffer, 512 to 3072 straight, the rest by a buffer.
    assert [int(n) for n in s.log()[:, readers.NBYTES]] == [512, 2560, 512]
    assert addresses(s) == [-1, offset + 212, -1]
    assert went_straight(s) == 2560
    assert s.poller.statistics[records.STATISTICS_BYTES] == 3000
    s.assert_only(offset, DATA[start:end])
    s.assert_at_rest()


def test_blocks_that_lie_otherwise_in_memory_are_staged(straight: Any) -> None:
    s = straight(DATA)
    s.post(512, 2048, fitting_offset(s, 512) + 1)
    s.run()
    assert went_straight(s) == 0
    assert addresses(s) == [-1]
    s.assert_at_rest()


def test_a_buffered_file_has_blocks_of_one_byte(straight: Any) -> None:
    s = straight(DATA, direct=False)
    s.post(301, 301 + 3000, 17)
    s.run()
    assert addresses(s) == [17]
    assert went_straight(s) == 3000
    s.assert_only(17, DATA[301:3301])
    s.assert_at_rest()


def test_a_buffered_file_is_read_by_one_long_piece_at_a_time(straight: Any) -> None:
    # Of several at once the system takes each for a random read, and reads less ahead.
    s = straight(DATA, direct=False, longest_straight=BUFFER, longest_buffered=2 * BUFFER)
    s.reader.words[readers.GATE] = 1
    other = s.post(0, BUFFER, 17)
    ticket = s.post(5, 5 + 4 * BUFFER, 17 + BUFFER)
    s.run()
    assert [int(n) for n in s.log()[:, readers.NBYTES]] == [BUFFER, 2 * BUFFER - 5]
    s.reader.words[readers.GATE] = 0
    s.run()
    assert s.status(other) == s.status(ticket) == Status.OK
    begins = [(int(at), int(n)) for at, n in s.log()[:, [readers.OFFSET, readers.NBYTES]]]
    assert begins[1:] == [
        (5, 2 * BUFFER - 5),
        (2 * BUFFER, 2 * BUFFER),
        (4 * BUFFER, 5),
    ]
    assert went_straight(s) == 5 * BUFFER - 5  # so few are staged
    s.assert_at_rest()


def test_a_piece_is_no_longer_than_a_buffer_unless_it_is_said(straight: Any) -> None:
    s = straight(DATA)
    offset = fitting_offset(s, 0)
    s.post(0, 3 * BUFFER, offset)
    s.run()
    assert sorted(int(n) for n in s.log()[:, readers.NBYTES]) == [BUFFER] * 3
    s.assert_only(offset, DATA[: 3 * BUFFER])


def test_long_pieces_end_at_multiples_of_their_length_in_the_file(straight: Any) -> None:
    # One that began at the odd end of the first had the system cut each read in three.
    s = straight(DATA, longest_straight=2 * BUFFER)
    start, end = 2 * ALIGNMENT, 4 * BUFFER + 3 * ALIGNMENT
    offset = fitting_offset(s, start)
    ticket = s.post(start, end, offset)
    s.run()
    assert s.status(ticket) == Status.OK
    reads = sorted((int(at), int(n)) for at, n in s.log()[:, [readers.OFFSET, readers.NBYTES]])
    assert reads == [
        (start, 2 * BUFFER - start),
        (2 * BUFFER, 2 * BUFFER),
        (4 * BUFFER, 3 * ALIGNMENT),
    ]
    s.assert_only(offset, DATA[start:end])
    s.assert_at_rest()


def test_what_goes_straight_is_bounded_in_bytes_and_a_small_request_passes_it(
    straight: Any,
) -> None:
    s = straight(DATA, longest_straight=4 * BUFFER)
    first = fitting_offset(s, 0)
    s.reader.words[readers.GATE] = 1
    large = [s.post(0, 4 * BUFFER, first + i * 4 * BUFFER) for i in range(2)]
    small = s.post(700, 800)
    s.run()
    # The first brings as much as all four buffers hold; the second has a short piece.
    assert [int(n) for n in s.log()[:, readers.NBYTES]] == [4 * BUFFER, BUFFER, ALIGNMENT]
    assert s.free_leases == 1
    s.reader.words[readers.GATE] = 0
    s.run()
    assert [s.status(ticket) for ticket in (*large, small)] == [Status.OK] * 3
    assert went_straight(s) == 8 * BUFFER
    s.assert_at_rest()


def test_a_straight_request_is_not_overtaken_for_ever_by_staged_ones(straight: Any) -> None:
    # Staged reads that hold all buffers bring as much as goes straight at once: it went back in
    # the ring whenever it was at its head, and behind all that had come meanwhile.
    s = straight(DATA, capacity=64, buffers=2)
    first = fitting_offset(s, 0)
    s.reader.words[readers.ORDER] = readers.BY_LIST
    s.reader.order[:] = np.arange(len(s.reader.order))
    staged = [s.post(0, BUFFER, first + 1) for _ in range(3)]
    wanted = s.post(0, BUFFER, first)
    for answered in range(1, 7):
        staged += [s.post(0, BUFFER, first + 1) for _ in range(2)]
        for _ in range(3):
            s.step()
        s.reader.words[readers.LISTED] = answered
        for _ in range(3):
            s.step()
    assert s.status(wanted) == Status.OK
    assert Status.PENDING in {s.status(ticket) for ticket in staged}


def test_a_loaders_long_reads_are_eight_buffers_or_four_mib_and_buffered_ones_longer(
    make_loader: Callable[..., gpuq.Loader],
) -> None:
    for staging, longest in ((4096, 8 * 4096), (1 << 19, 1 << 22), (12288 * 100, 3 * 12288 * 100)):
        loader = make_loader(staging_bytes=staging, staging_buffers=2)
        assert loader._service.poller.longest_straight == longest
        assert loader._service.poller.longest_buffered == 4 * longest
        loader.close()
    loader = make_loader(staging_bytes=1 << 24, staging_buffers=2)
    assert loader._service.poller.longest_straight == 1 << 24
    assert loader._service.poller.longest_buffered == 1 << 24  # what a buffer holds is enough


@pytest.mark.parametrize("settings", [{"straight_bytes": 0}, {"straight_bytes": 4096}], ids=str)
def test_less_than_the_setting_is_staged(straight: Any, settings: Any) -> None:
    s = straight(DATA, **settings)
    s.post(0, 2048, fitting_offset(s, 0))
    s.run()
    assert went_straight(s) == 0
    s.assert_at_rest()


def test_nothing_is_written_where_the_end_is_missing_already(straight: Any) -> None:
    s = straight(DATA[:2000])
    ticket = s.post(0, 2048, fitting_offset(s, 0))
    s.run()
    assert s.status(ticket) == Status.END_OF_FILE
    assert set(addresses(s)) == {-1}
    s.assert_only(0, DATA[:0])
    s.assert_at_rest()


def test_a_file_that_has_shrunk_meanwhile_is_an_end_of_file(straight: Any) -> None:
    s = straight(DATA[:1000], size=4096)
    ticket = s.post(0, 2048, fitting_offset(s, 0))
    s.run()
    assert s.status(ticket) == Status.END_OF_FILE
    s.assert_at_rest()


def test_a_short_read_is_read_on_at_a_block(straight: Any) -> None:
    s = straight(DATA, [(readers.READ, 700), READ_ALL])
    offset = fitting_offset(s, 0)
    ticket = s.post(0, 2048, offset)
    s.run()
    assert s.status(ticket) == Status.OK
    assert addresses(s) == [offset, offset + 512]
    s.assert_only(offset, DATA[:2048])
    s.assert_at_rest()


def test_a_refusal_of_direct_reads_is_met_by_a_buffered_one(straight: Any) -> None:
    s = straight(DATA, [(readers.FAIL, errno.EINVAL), READ_ALL])
    offset = fitting_offset(s, 0)
    ticket = s.post(0, 2048, offset)
    s.run()
    assert s.status(ticket) == Status.OK
    s.assert_only(offset, DATA[:2048])
    s.assert_at_rest()


def test_neighbours_do_not_borrow_from_what_goes_straight(straight: Any) -> None:
    s = straight(DATA, merge_bytes=BUFFER)
    offset = fitting_offset(s, 0)
    first = s.post(0, 1024, offset)
    second = s.post(1024, 1124, 3000)
    third = s.post(1124, 1224, 3100)
    s.run()
    assert [s.status(t) for t in (first, second, third)] == [Status.OK] * 3
    assert (s.bytes[offset : offset + 1024] == DATA[:1024]).all()
    assert (s.bytes[3000:3200] == DATA[1024:1224]).all()
    s.assert_at_rest()


def test_what_borrows_is_staged_although_it_might_go_straight(straight: Any) -> None:
    s = straight(DATA, merge_bytes=BUFFER)
    first = s.post(100, 200, 5000)
    offset = fitting_offset(s, 512)
    second = s.post(512, 1536, offset)
    s.run()
    assert [s.status(t) for t in (first, second)] == [Status.OK] * 2
    assert s.poller.statistics[records.STATISTICS_MERGED] == 1
    assert (s.bytes[offset : offset + 1024] == DATA[512:1536]).all()
    assert (s.bytes[5000:5100] == DATA[100:200]).all()
    s.assert_at_rest()


def test_after_an_abort_the_destination_is_kept_until_the_read_is_over(straight: Any) -> None:
    s = straight(DATA)
    s.reader.words[readers.GATE] = 1
    s.post(0, 2048, fitting_offset(s, 0))
    s.step()
    records.raise_state(s.queue.control, int(State.ABORTED))
    s.step()
    assert s.queue.control[STATE] == State.ABORTED
    assert s.destinations.in_flight(s.destination) == 1
    s.reader.words[readers.GATE] = 0
    s.run()
    assert s.destinations.in_flight(s.destination) == 0
    s.assert_at_rest()


@given(
    start=st.integers(0, 5000),
    length=st.integers(1, 9000),
    shift=st.integers(0, 600),
    is_fitting=st.booleans(),
    is_direct=st.booleans(),
    results=st.lists(
        st.one_of(
            st.just(READ_ALL),
            st.tuples(st.just(readers.READ), st.integers(0, 4096)),
            st.tuples(st.just(readers.FAIL), st.sampled_from([errno.EIO, errno.EINTR])),
        ),
        max_size=8,
    ),
    size=st.integers(0, 15_000),
    least=st.sampled_from([1, 512, 2048]),
)
def test_no_byte_beside_the_requests_own_is_ever_written(
    start: int, length: int, shift: int, is_fitting: bool, is_direct: bool, results: list[Any],
    size: int, least: int,
) -> None:  # fmt: skip
    s = Stepper(
        DATA[:size],
        [*results, READ_ALL],
        direct=is_direct,
        must_be_direct=is_direct,
        straight_bytes=least,
    )
    try:
        offset = fitting_offset(s, start) + ALIGNMENT * (shift % 3) if is_fitting else shift
        ticket = s.post(start, start + length, offset)
        s.run()
        status = s.status(ticket)
        room = s.bytes.copy()
        room[offset : offset + length] = GUARD
        assert (room == GUARD).all()
        if status == Status.OK:
            assert start + length <= size
            s.assert_only(offset, DATA[start : start + length])
        else:
            assert status in (Status.END_OF_FILE, Status.READ_FAILED)
            assert start + length > size or results
        s.assert_at_rest()
    finally:
        s.close()


@given(
    start=st.integers(0, 1 << 40),
    length=st.integers(1, 1 << 24),
    address=st.integers(1 << 12, 1 << 46),
    alignment=st.sampled_from([1, 512, 4096]),
    least=st.integers(1, 1 << 20),
    most=st.sampled_from([4096, 1 << 19]),
)
def test_what_goes_straight_is_whole_blocks_within_the_request(
    start: int, length: int, address: int, alignment: int, least: int, most: int
) -> None:
    got = straight_bytes(start, start + length, address, alignment, least, most)
    if got > 0:
        assert start % alignment == address % alignment == got % alignment == 0
        assert got <= min(length, most)
    elif got < 0:
        assert (start - got) % alignment == (address - got) % alignment == 0
        assert -got < alignment
        assert -got + least <= length


@pytest.mark.parametrize("file_offset", [0, 128, 4095, 8192 + 72])
@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "S3"])
def test_elements_are_placed_where_the_processor_wants_them(dtype: str, file_offset: int) -> None:
    kind = np.dtype(dtype)
    memory = Region(8 * kind.itemsize, file_offset).memory.view(kind)
    assert memory.ctypes.data % 4096 == file_offset % 4096
    assert can_be_placed(kind, file_offset) == memory.flags.aligned


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "S3"])
@pytest.mark.parametrize("shape", [3, (70_000,), (300, 500), (0, 9), ()])
def test_a_placed_array_is_an_array_like_any_other(shape: Any, dtype: str) -> None:
    array = placed_empty(shape, dtype)
    plain = np.empty(shape, dtype)
    assert (array.shape, array.dtype, array.strides) == (plain.shape, plain.dtype, plain.strides)
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert array.flags.writeable
    array[...] = 1
    if array.nbytes >= 1 << 16:
        assert array.ctypes.data % 4096 == 0


@pytest.mark.parametrize(
    "shape", [[300, 500], np.array([300, 500]), np.int64(150_000), range(9, 12)]
)
@pytest.mark.parametrize("dtype", ["u1", ("f4", (4,)), "S0"])
def test_a_shape_is_whatever_numpy_takes_for_one(shape: Any, dtype: Any) -> None:
    # It was taken for a tuple or a number, so that a list of large lengths was a TypeError.
    array, plain = placed_empty(shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.dtype) == (plain.shape, plain.dtype)


def test_a_real_file_comes_right_however_it_lies(
    mode: Any, make_loader: Callable[..., gpuq.Loader], tmp_path: Path
) -> None:
    data = np.random.default_rng(5).integers(0, 256, 3_000_017, dtype=np.uint8)
    path = tmp_path / "data"
    data.tofile(path)
    loader = make_loader(
        reader=mode.reader, direct=mode.direct, staging_bytes=1 << 17, straight_bytes=1 << 16
    )
    source = loader.open(path)
    for start, end, shift in [
        (0, len(data), 0), (0, 1 << 20, 0), (77, 900_000, 77), (77, 900_000, 78),
        (4096, 2_999_999, 4096), (2_000_000, 3_000_017, 2_000_000 % 4096),
    ]:  # fmt: skip
        array = placed_empty(end - start + 4096, np.uint8)
        array[:] = GUARD
        destination = loader.register(array)
        offset = shift % 4096
        got = Compiled.pull_at(
            loader.queue, source.handle, destination.handle, offset, start, end, 0
        )
        assert got == Status.OK
        np.testing.assert_array_equal(array[offset : offset + end - start], data[start:end])
        assert (array[:offset] == GUARD).all()
        assert (array[offset + end - start :] == GUARD).all()
        destination.unregister()
    statistics = loader.statistics()
    assert statistics.straight > 0
    assert statistics.bytes >= statistics.straight
    print(f"{mode}: {statistics.straight} of {statistics.bytes} bytes went straight")


def test_direct_reads_are_staged_where_a_fork_could_part_them_from_their_memory(
    straight: Any,
) -> None:
    s = straight(DATA)
    s.sources.words[(s.source & 0xFFFFFFFF) * tables.SOURCE_WORDS + tables.ONLY_STAGED] = 1
    ticket = s.post(0, 2048, fitting_offset(s, 0))
    s.run()
    assert s.status(ticket) == Status.OK
    assert went_straight(s) == 0
    s.assert_only(fitting_offset(s, 0), DATA[:2048])
    s.assert_at_rest()


@pytest.mark.parametrize(
    ("release", "says", "pins"),
    [
        ("6.5.0", (4, 512), True),
        ("6.18.44-fc", (512, 4096), True),
        ("10.0", (4, 512), True),
        ("6.4.99", (4, 512), False),
        ("5.15.0-generic", (4, 512), False),
        ("unheard of", (4, 512), False),
        ("6.5.0", None, False),
        ("6.5.0", (0, 0), False),
    ],
)
def test_memory_is_pinned_by_new_systems_and_block_devices(
    monkeypatch: pytest.MonkeyPatch, release: str, says: Any, pins: bool
) -> None:
    uname = os.uname()
    changed = type(uname)((uname.sysname, uname.nodename, release, uname.version, uname.machine))
    monkeypatch.setattr(direct_file.os, "uname", lambda: changed)
    assert direct_file.pins_memory(says) is pins


FORKING = """
import os, sys, threading
import numpy as np
import gpuq
from gpuq.host.pages import Region, can_be_placed, placed_empty

path, direct = sys.argv[1:]
data = np.fromfile(path, np.uint8)
with gpuq.Loader(target="cpu", straight_bytes=4096) as loader:
    source = loader.open(path, direct=direct)
    array = placed_empty(len(data), np.uint8)
    for _ in range(30):
        array[:] = 0
        future = loader.read_async(source, out=array)
        child = os.fork()
        if child == 0:
            os._exit(0 if len(array) else 1)
        assert os.waitpid(child, 0)[1] == 0
        future.result()
        assert (array == data).all()
    print(loader.statistics().straight)
"""


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_fork_while_bytes_go_straight_takes_none_of_them(tmp_path: Path, direct: str) -> None:
    path = tmp_path / "data"
    np.random.default_rng(6).integers(0, 256, 8 << 20, dtype=np.uint8).tofile(path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, path, direct],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(f"{direct}: {int(done.stdout):,} bytes went straight")

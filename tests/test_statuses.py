"""Every status that the host gives, by the real readers; the poller goes on after each."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Mode, note_path
from kernels import Compiled

import gpuq
from gpuq.kernels.queue import claim
from gpuq.layout import OPTIONS, SEQUENCE, SUBMISSION_WORDS, Status
from gpuq.ordering import store_release

GUARD = 0xEE
ROOM = 20_000
TOP = 1 << 64


class Setting:
    """A loader with one source and one destination between guard bytes."""

    def __init__(self, mode: Mode, path: Path) -> None:
        self.loader = gpuq.Loader(
            target="cpu", reader=mode.reader, direct=mode.direct, slots=4,
            staging_buffers=2, staging_bytes=4096,
        )  # fmt: skip
        self.source = self.loader.open(path)
        note_path(self.loader, self.source)
        self.array = np.full(ROOM + 128, GUARD, dtype=np.uint8)
        self.destination = self.loader.register(self.array[64:-64])

    def pull(self, start: int, end: int, offset: int = 0, **other: int) -> Status:
        """Pull with the compiled kernel functions and look at the guards."""
        numbers = [n - TOP if n >= TOP // 2 else n for n in (offset, start, end)]
        status = Compiled.pull_at(
            self.loader.queue,
            other.get("source", self.source.handle),
            other.get("destination", self.destination.handle),
            *numbers,
            0,
        )
        assert (self.array[:64] == GUARD).all()
        assert (self.array[-64:] == GUARD).all()
        return Status(status)

    def assert_goes_on(self, payload: Any) -> None:
        """The request after a bad one is served, and nothing was written by the bad one."""
        assert (self.array == GUARD).all()
        assert self.pull(5, 105, 7) == Status.OK
        np.testing.assert_array_equal(self.array[71:171], payload[5:105])
        self.array[:] = GUARD


@pytest.fixture(scope="module")
def setting(mode: Mode, payload_path: Path) -> Iterator[Setting]:
    made = Setting(mode, payload_path)
    yield made
    made.loader.close()


def test_ok_brings_the_bytes_and_nothing_else(setting: Setting, payload: Any) -> None:
    assert setting.pull(777, 10_777, 333) == Status.OK
    expected = np.full(ROOM + 128, GUARD, dtype=np.uint8)
    expected[64 + 333 : 64 + 10_333] = payload[777:10_777]
    np.testing.assert_array_equal(setting.array, expected)
    setting.array[:] = GUARD


@pytest.mark.parametrize("at", [0, 1, 100_003, 100_004, 1 << 40])
def test_an_empty_range_is_ok_without_a_read(setting: Setting, at: int) -> None:
    reads = setting.loader.statistics().reads
    assert setting.pull(at, at, ROOM) == Status.OK
    assert setting.loader.statistics().reads == reads
    assert (setting.array == GUARD).all()


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (100_000, 100_004),
        (100_003, 100_004),
        (100_352, 100_353),  # the next block of 512
        (102_400, 102_500),  # the next block of 4096
        (99_000, 101_000),
        (95_000, 100_004),  # two pieces
        (85_000, 101_000),  # five pieces
        (1 << 40, (1 << 40) + 1),
        ((1 << 62) - 10, (1 << 62)),
        ((1 << 62) - 10_000, (1 << 62)),
    ],
)
def test_end_of_file_copies_nothing(setting: Setting, payload: Any, start: int, end: int) -> None:
    assert setting.pull(start, end) == Status.END_OF_FILE
    setting.assert_goes_on(payload)


@pytest.mark.parametrize(
    "handle", [0, 1, -1, 1 << 32, 2 << 32, (1 << 32) + 1, (1 << 32) + 5000, 1 << 62, -(1 << 63)]
)
def test_bad_source_and_bad_destination(setting: Setting, payload: Any, handle: int) -> None:
    if handle != setting.source.handle:
        assert setting.pull(0, 10, source=handle) == Status.BAD_SOURCE
    if handle != setting.destination.handle:
        assert setting.pull(0, 10, destination=handle) == Status.BAD_DESTINATION
    setting.assert_goes_on(payload)


@pytest.mark.parametrize("bit", range(64))
def test_a_handle_with_one_wrong_bit_is_bad(setting: Setting, bit: int) -> None:
    source = np.uint64(setting.source.handle ^ 1 << bit).astype(np.int64)
    destination = np.uint64(setting.destination.handle ^ 1 << bit).astype(np.int64)
    assert setting.pull(0, 10, source=int(source)) == Status.BAD_SOURCE
    assert setting.pull(0, 10, destination=int(destination)) == Status.BAD_DESTINATION


@pytest.mark.parametrize(
    ("start", "end"),
    [(1, 0), (100, 99), (TOP - 1, 0), (TOP - 1, TOP - 2), (1 << 63, (1 << 63) - 1), (1 << 62, 5)],
)
def test_bad_range_is_a_start_behind_the_end(
    setting: Setting, payload: Any, start: int, end: int
) -> None:
    assert setting.pull(start, end) == Status.BAD_RANGE
    setting.assert_goes_on(payload)


@pytest.mark.parametrize(
    ("start", "end", "offset"),
    [
        (0, ROOM + 1, 0),
        (0, ROOM, 1),
        (0, 1, ROOM),
        (10, 20, ROOM - 9),
        (0, 0, ROOM + 1),  # no bytes, but the place is outside
        (0, 10, TOP - 1),  # offset + bytes would wrap to 9
        (0, 10, TOP - 10),  # and to 0
        (0, 10, 1 << 63),
        (0, 10, (1 << 63) - 1),
        (0, 10, (1 << 63) - 10),
        (0, 10, (1 << 63) - 5),  # offset + bytes overflows a signed word
        (0, TOP - 1, 0),
        (0, TOP - 1, 1),
        (0, (1 << 63) - 1, 0),
        (0, 1 << 63, 0),
        (TOP - 10, TOP - 1, 0),
        (1 << 63, (1 << 63) + 1, 0),
        ((1 << 63) - 2, (1 << 63) - 1, 0),
        ((1 << 62), (1 << 62) + 1, 0),
        (5, (1 << 62) + 1, 0),
        (TOP - 1, TOP - 1, 0),
    ],
)
def test_out_of_bounds(setting: Setting, payload: Any, start: int, end: int, offset: int) -> None:
    assert setting.pull(start, end, offset) == Status.OUT_OF_BOUNDS
    setting.assert_goes_on(payload)


def test_the_last_byte_of_the_room_may_be_written(setting: Setting, payload: Any) -> None:
    assert setting.pull(3, 4, ROOM - 1) == Status.OK
    assert setting.array[64 + ROOM - 1] == payload[3]
    setting.array[:] = GUARD


def test_out_of_bounds_of_what_the_source_allows(
    setting: Setting, payload: Any, payload_path: Path
) -> None:
    allowed = setting.loader.open(payload_path, start=1000, end=9000)
    try:
        for start, end in [(999, 1001), (0, 1), (8999, 9001), (9000, 9001), (0, 20), (999, 999)]:
            assert setting.pull(start, end, source=allowed.handle) == Status.OUT_OF_BOUNDS
        for start, end in [(1000, 1001), (8999, 9000), (1000, 9000), (9000, 9000)]:
            assert setting.pull(start, end, source=allowed.handle) == Status.OK
            np.testing.assert_array_equal(setting.array[64 : 64 + end - start], payload[start:end])
    finally:
        allowed.close()
        setting.array[:] = GUARD


@pytest.mark.parametrize("options", [1025, 1 << 32, 1 << 63, TOP - 1])
def test_bad_options(setting: Setting, payload: Any, options: int) -> None:
    # There are 1024 counters, numbered from 1 in this word.
    q = setting.loader.queue
    ticket = int(claim(q))
    assert ticket >= 0
    base = ticket % q.capacity * SUBMISSION_WORDS
    q.submissions[base + 1 : base + 7] = [
        setting.source.handle, setting.destination.handle, 0, 10, 0, 0,
    ]  # fmt: skip
    q.submissions[base + OPTIONS] = options
    store_release(q.submissions, base + SEQUENCE, np.uint64(ticket + 1))
    assert Compiled.wait(q, ticket) == Status.BAD_OPTIONS
    setting.assert_goes_on(payload)


def test_an_all_zero_request_is_answered_and_does_not_stall_the_queue(
    setting: Setting, payload: Any
) -> None:
    # MSCCL++ 864: a payload word that doubles as the ready flag. Handle 0 is never given out.
    for _ in range(3 * setting.loader.config.slots):
        assert setting.pull(0, 0, source=0, destination=0) == Status.BAD_SOURCE
    setting.assert_goes_on(payload)


@pytest.mark.parametrize(("flags", "number"), [
    (os.O_WRONLY, errno.EBADF), (os.O_DIRECTORY, errno.EISDIR),
])  # fmt: skip
@pytest.mark.parametrize("nbytes", [100, 3 * 4096])
def test_read_failed_carries_the_systems_errno(
    setting: Setting,
    payload: Any,
    payload_path: Path,
    tmp_path: Path,
    flags: int,
    number: int,
    nbytes: int,
) -> None:
    source = setting.loader.open(payload_path)
    file = source._file
    assert file is not None
    descriptor = file.direct if file.direct >= 0 else file.buffered
    # Behind the loader's back the descriptor becomes one that cannot be read.
    (tmp_path / "other").write_bytes(bytes(20_000))
    other = os.open(tmp_path if flags & os.O_DIRECTORY else tmp_path / "other", flags)
    size_is_asked = nbytes > 4096 and descriptor == file.buffered
    try:
        os.dup2(other, descriptor)
        q = setting.loader.queue
        ticket = Compiled.post(q, source.handle, setting.destination.handle, 0, nbytes, 0)
        status = Compiled.poll(q, ticket)
        while status == Status.PENDING:
            status = Compiled.poll(q, ticket)
        if size_is_asked and flags & os.O_DIRECTORY:
            # A directory's size says something of its own; whatever it is, no byte is copied.
            assert status in (Status.END_OF_FILE, Status.READ_FAILED)
        else:
            assert status == Status.READ_FAILED
            assert Compiled.errno_of(q, ticket) == number
            assert setting.loader.statistics().last_errno == number
        assert Compiled.wait(q, ticket) == status
        setting.assert_goes_on(payload)
    finally:
        os.close(other)
        source.close()


def test_statistics_count_each_status(
    mode: Mode, payload_path: Path, make_loader: Callable[..., gpuq.Loader], opened: Any
) -> None:
    loader = make_loader(reader=mode.reader, direct=mode.direct)
    source = opened(loader, payload_path)
    destination = loader.register(np.zeros(10_000, dtype=np.uint8))
    assert loader.statistics().requests == {}
    q, s, d = loader.queue, source.handle, destination.handle
    wanted = {
        (s, d, 0, 10_000): Status.OK,
        (s, d, 200_000, 200_001): Status.END_OF_FILE,
        (0, d, 0, 1): Status.BAD_SOURCE,
        (s, 0, 0, 1): Status.BAD_DESTINATION,
        (s, d, 2, 1): Status.BAD_RANGE,
        (s, d, 0, 10_001): Status.OUT_OF_BOUNDS,
    }
    for times, (words, status) in enumerate(wanted.items(), start=1):
        for _ in range(times):
            assert Compiled.pull(q, *words, 0) == status
    statistics = loader.statistics()
    assert statistics.requests == {s.name: n for n, s in enumerate(wanted.values(), start=1)}
    assert statistics.bytes == 10_000
    assert statistics.reads == 3 + 2
    assert statistics.short_reads == 2
    assert statistics.outstanding == 0
    assert (statistics.retries, statistics.fallbacks, statistics.last_errno) == (0, 0, 0)
    assert (statistics.target, statistics.reader) == ("cpu", mode.reader)
    assert 1 <= statistics.staging_high_water <= statistics.staging_buffers == 4
    with pytest.raises(AttributeError):
        statistics.bytes = 1  # type: ignore[misc]

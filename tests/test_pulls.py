"""Bytes: what a kernel pulls against what NumPy finds in the file, for both readers and modes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS, Mode, note_path
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Compiled, pull_slices

import gpuq
from gpuq.layout import Status

GUARD = 0xEE
ROOM = 150_000
SIZE = 100_003  # of the payload
BUFFER = 4096


class Pulls:
    """A loader whose staging is far smaller than the file, and a guarded destination."""

    def __init__(self, mode: Mode, path: Path) -> None:
        self.loader = gpuq.Loader(
            target="cpu", reader=mode.reader, direct=mode.direct, slots=16,
            staging_buffers=4, staging_bytes=BUFFER, reader_threads=3,
        )  # fmt: skip
        self.source = self.loader.open(path)
        note_path(self.loader, self.source)
        self.array = np.full(ROOM + 128, GUARD, dtype=np.uint8)
        self.destination = self.loader.register(self.array[64:-64])

    def pull(self, slices: Any, depth: int = 16, source: gpuq.Source | None = None) -> list[Status]:
        """Pull rows of (start, end, offset), `depth` of them in flight."""
        rows = np.array(slices, dtype=np.int64).reshape(-1, 3)
        statuses = np.full(len(rows), -1, dtype=np.int64)
        tickets = np.zeros(depth, dtype=np.int64)
        pull_slices(
            self.loader.queue, (source or self.source).handle, self.destination.handle, rows,
            tickets, statuses,
        )  # fmt: skip
        return [Status(status) for status in statuses]

    def assert_holds(self, slices: Any, data: Any) -> None:
        """Assert that the destination holds these slices of `data` and nothing else; clear it."""
        expected = np.full(ROOM + 128, GUARD, dtype=np.uint8)
        for start, end, offset in slices:
            expected[64 + offset : 64 + offset + end - start] = data[start:end]
        np.testing.assert_array_equal(self.array, expected)
        self.array[:] = GUARD


@pytest.fixture(scope="module")
def pulls(mode: Mode, payload_path: Path) -> Iterator[Pulls]:
    made = Pulls(mode, payload_path)
    yield made
    made.loader.close()


NEAR_AN_EDGE = st.builds(
    lambda block, n, by: max(block * n + by, 0),
    st.sampled_from([512, 4096]),
    st.integers(0, 24),
    st.integers(-2, 2),
)
POSITION = st.one_of(NEAR_AN_EDGE, st.integers(0, SIZE)).map(lambda n: min(n, SIZE))


@st.composite
def slices_apart(draw: Any) -> list[tuple[int, int, int]]:
    """Slices of the payload that do not overlap in the destination."""
    rows = []
    offset = draw(st.integers(0, 600))
    for _ in range(draw(st.integers(1, 12))):
        start, end = sorted((draw(POSITION), draw(POSITION)))
        end = min(end, start + draw(st.sampled_from([1, 700, 5000, 30_000])))
        if offset + (end - start) > ROOM:
            break
        rows.append((start, end, offset))
        offset += end - start + draw(st.sampled_from([0, 0, 1, 511]))
    return rows


@settings(max_examples=120)
@given(slices=slices_apart(), depth=st.sampled_from([1, 3, 16]))
def test_any_slices_arrive_as_numpy_sees_them(
    pulls: Pulls, payload: Any, slices: Any, depth: int
) -> None:
    assert pulls.pull(slices, depth) == [Status.OK] * len(slices)
    pulls.assert_holds(slices, payload)


def test_every_start_and_end_around_a_block_edge(pulls: Pulls, payload: Any) -> None:
    for edge in (512, 4096, 8192):
        rows, offset = [], 0
        for start in range(edge - 3, edge + 4):
            for end in range(max(start, edge - 3), edge + 4):
                rows.append((start, end, offset))
                offset += end - start + 1
        assert pulls.pull(rows) == [Status.OK] * len(rows)
        pulls.assert_holds(rows, payload)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 4095, 4096, 4097, 8191, 8193, 12_289])
def test_a_file_of_any_size_is_whole_to_its_last_byte(
    pulls: Pulls, tmp_path: Path, size: int, payload: Any
) -> None:
    path = tmp_path / "tail.bin"
    payload[:size].tofile(path)
    with pulls.loader.open(path) as source:
        assert source.size == size
        rows = [(0, size, 0), (size - 1, size, size + 10), (size, size, 0)]
        assert pulls.pull(rows, source=source) == [Status.OK] * 3
        pulls.assert_holds(rows, payload)
        beyond = [(0, size + 1, 0), (size, size + 1, 0), (size - 1, size + 512, 0)]
        assert pulls.pull(beyond, source=source) == [Status.END_OF_FILE] * 3
        pulls.assert_holds([], payload)


def test_an_empty_file_has_no_byte(pulls: Pulls, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pulls.loader.open(tmp_path / "empty") as source:
        assert source.size == 0
        statuses = pulls.pull([(0, 0, 0), (0, 1, 0), (0, 9000, 0), (4096, 4097, 0)], source=source)
        assert statuses == [Status.OK, *[Status.END_OF_FILE] * 3]
    pulls.assert_holds([], [])


def test_a_request_of_many_pieces_and_more_pieces_than_buffers(
    pulls: Pulls, tmp_path: Path
) -> None:
    # Buffered reads that need no staging are as long as 32 buffers.
    data = np.random.default_rng(8).integers(0, 256, 5 * 32 * BUFFER + 3, dtype=np.uint8)
    data.tofile(tmp_path / "long.bin")
    array = np.full(len(data) + 256, GUARD, dtype=np.uint8)
    expected = array.copy()
    expected[64 : 64 + len(data) - 1] = data[1:]
    before = pulls.loader.statistics()
    destination = pulls.loader.register(array[64:-64])
    with pulls.loader.open(tmp_path / "long.bin") as source:
        handles = source.handle, destination.handle
        status = Compiled.pull(pulls.loader.queue, *handles, 1, len(data), 0)
    destination.unregister()
    assert status == Status.OK
    np.testing.assert_array_equal(array, expected)
    after = pulls.loader.statistics()
    went_straight = after.straight > before.straight
    assert after.reads - before.reads >= (5 if went_straight else 160)
    assert after.staging_high_water <= after.staging_buffers == 4
    assert after.bytes - before.bytes == len(data) - 1


def test_large_and_small_requests_in_flight_together(pulls: Pulls, payload: Any) -> None:
    rows = [(0, 60_001, 0)]
    rows += [(311 * i, 311 * i + 300, 60_001 + 300 * i) for i in range(40)]
    rows += [(13, 40_000, 80_000)]
    assert pulls.pull(rows) == [Status.OK] * len(rows)
    pulls.assert_holds(rows, payload)


def test_more_requests_than_slots_over_several_laps(pulls: Pulls, payload: Any) -> None:
    rows = [(97 * i % (SIZE - 200), 97 * i % (SIZE - 200) + 150, 150 * i) for i in range(1000)]
    assert pulls.pull(rows) == [Status.OK] * 1000
    pulls.assert_holds(rows, payload)
    assert pulls.loader.queue.tail[0] > 3 * 16


@pytest.mark.parametrize(("slots", "buffers"), [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_the_smallest_queues(
    mode: Mode,
    payload_path: Path,
    payload: Any,
    make_loader: Any,
    opened: Any,
    slots: int,
    buffers: int,
) -> None:
    loader = make_loader(
        reader=mode.reader, direct=mode.direct, slots=slots, staging_buffers=buffers
    )
    source = opened(loader, payload_path)
    array = np.zeros(30_000, dtype=np.uint8)
    destination = loader.register(array)
    rows = np.array([(7 * i, 7 * i + 3000, 3000 * (i % 10)) for i in range(30)], dtype=np.int64)
    statuses = np.full(30, -1, dtype=np.int64)
    tickets = np.zeros(slots, dtype=np.int64)
    pull_slices(loader.queue, source.handle, destination.handle, rows, tickets, statuses)
    assert (statuses == Status.OK).all()
    # Offsets repeat; requests of one batch do not overlap, so the last of each offset stays.
    expected = np.concatenate([payload[7 * i : 7 * i + 3000] for i in range(20, 30)])
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(("threads", "depth"), [(4, 4), (6, 2)])
def test_several_threads_post_to_one_queue(
    pulls: Pulls, payload: Any, threads: int, depth: int
) -> None:
    share = ROOM // threads
    rng = np.random.default_rng(threads)
    plans = []
    for number in range(threads):
        rows, offset = [], number * share
        while offset + 3000 < (number + 1) * share:
            start = int(rng.integers(0, SIZE - 3000))
            size = int(rng.integers(1, 3000))
            rows.append((start, start + size, offset))
            offset += size
        plans.append(rows)
    gate = threading.Barrier(threads)
    results: list[list[Status]] = [[] for _ in range(threads)]

    def run(number: int) -> None:
        gate.wait(WAIT_SECONDS)
        results[number] = pulls.pull(plans[number], depth)

    workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(WAIT_SECONDS)
    assert results == [[Status.OK] * len(rows) for rows in plans]
    pulls.assert_holds([row for rows in plans for row in rows], payload)


def test_more_threads_than_slots_share_them(
    reader: str, payload_path: Path, payload: Any, make_loader: Any, opened: Any
) -> None:
    loader = make_loader(reader=reader, slots=2, staging_buffers=1)
    source = opened(loader, payload_path)
    array = np.zeros(6 * 5000, dtype=np.uint8)
    destination = loader.register(array)
    all_statuses = []

    def run(number: int) -> None:
        rows = np.array(
            [(n, n + 100, 5000 * number + 100 * (n % 50)) for n in range(200)], dtype=np.int64
        )
        statuses = np.full(200, -1, dtype=np.int64)
        all_statuses.append(statuses)
        # One ticket at a time: a thread that held one and waited for another could block all.
        pull_slices(
            loader.queue, source.handle, destination.handle, rows, np.zeros(1, np.int64), statuses
        )

    workers = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(WAIT_SECONDS)
    assert (np.array(all_statuses) == Status.OK).all()
    expected = np.concatenate([payload[n : n + 100] for n in range(150, 200)])
    np.testing.assert_array_equal(array.reshape(6, 5000), np.tile(expected, (6, 1)))


# --- files that change ---------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 1, 4096, 5000, 50_001])
def test_a_source_shortened_after_it_was_opened(
    pulls: Pulls, payload: Any, tmp_path: Path, left: int
) -> None:
    path = tmp_path / "shrinking.bin"
    payload.tofile(path)
    with pulls.loader.open(path) as source:
        os.truncate(path, left)
        gone = [
            (left, left + 1, 0),
            (max(left - 1, 0), left + 1, 0),
            (left, left + 10_000, 0),  # many pieces
            (0, SIZE, 0),
            (max(left - 9000, 0), left + 1, 0),
            (SIZE - 10, SIZE, 0),
        ]
        assert pulls.pull(gone, source=source) == [Status.END_OF_FILE] * len(gone)
        pulls.assert_holds([], payload)
        rows = [(0, left, 0), (max(left - 5, 0), left, 60_000)]
        assert pulls.pull(rows, source=source) == [Status.OK] * 2
        pulls.assert_holds(rows, payload)


def test_a_source_that_grew_is_read_to_its_new_end(
    pulls: Pulls, payload: Any, tmp_path: Path
) -> None:
    path = tmp_path / "growing.bin"
    payload[:1000].tofile(path)
    with pulls.loader.open(path) as source:
        assert pulls.pull([(0, 1001, 0)], source=source) == [Status.END_OF_FILE]
        with path.open("ab") as file:
            file.write(payload[1000:].tobytes())
        assert pulls.pull([(0, SIZE, 0)], source=source) == [Status.OK]
        pulls.assert_holds([(0, SIZE, 0)], payload)


def test_a_source_is_the_file_that_was_opened_not_the_path(
    pulls: Pulls, payload: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.bin"
    payload.tofile(path)
    with pulls.loader.open(path) as old:
        payload[::-1].tofile(tmp_path / "b.bin")
        os.replace(tmp_path / "b.bin", path)
        with pulls.loader.open(path) as new:
            rows = [(1, 9000, 3)]
            assert pulls.pull(rows, source=old) == [Status.OK]
            pulls.assert_holds(rows, payload)
            assert pulls.pull(rows, source=new) == [Status.OK]
            pulls.assert_holds(rows, payload[::-1])


def test_a_sparse_file_beyond_4_gib(pulls: Pulls, tmp_path: Path) -> None:
    path = tmp_path / "sparse.bin"
    size = (5 << 30) + 12_345
    rng = np.random.default_rng(4)
    marks = {}
    try:
        with path.open("wb") as file:
            file.truncate(size)
            for position in ((2 << 30) - 5000, (4 << 30) - 5000, size - 5000):
                marks[position] = rng.integers(0, 256, min(10_000, size - position), dtype=np.uint8)
                file.seek(position)
                file.write(marks[position].tobytes())
    except OSError as error:
        pytest.skip(f"no sparse file of 5 GiB here: {error}")
    with pulls.loader.open(path) as source:
        assert source.size == size
        for position, data in marks.items():
            before, after = 3000, 2000
            start, end = position - before, min(position + len(data) + after, size)
            wanted = np.zeros(end - start, dtype=np.uint8)
            wanted[before : before + len(data)] = data
            rows = [(start, end, 11), (position + 4999, position + 5000, 40_000)]
            assert pulls.pull(rows, source=source) == [Status.OK] * 2
            expected = np.full(ROOM + 128, GUARD, dtype=np.uint8)
            expected[64 + 11 : 64 + 11 + len(wanted)] = wanted
            expected[64 + 40_000] = data[4999]
            np.testing.assert_array_equal(pulls.array, expected)
            pulls.array[:] = GUARD
        beyond = [(size - 1, size + 1, 0), (size - 9000, size + 1, 0), (size, size + 1, 0)]
        assert pulls.pull(beyond, source=source) == [Status.END_OF_FILE] * 3
        pulls.assert_holds([], [])
    path.unlink()


# --- handles -------------------------------------------------------------------------------


def test_the_handle_of_a_closed_source_is_refused_also_when_its_place_is_taken(
    pulls: Pulls, payload: Any, payload_path: Path
) -> None:
    loader = pulls.loader
    old = loader.open(payload_path)
    rows = [(0, 100, 0)]
    assert pulls.pull(rows, source=old) == [Status.OK]
    old.close()
    assert pulls.pull(rows, source=old) == [Status.BAD_SOURCE]
    new = loader.open(payload_path, start=50)
    assert new.handle & 0xFFFFFFFF == old.handle & 0xFFFFFFFF, "the index is used again"
    assert new.handle >> 32 == (old.handle >> 32) + 1
    assert pulls.pull(rows, source=old) == [Status.BAD_SOURCE]
    assert pulls.pull(rows, source=new) == [Status.OUT_OF_BOUNDS]
    assert pulls.pull([(50, 100, 50)], source=new) == [Status.OK]
    pulls.assert_holds(rows, payload)
    new.close()
    new.close()
    assert pulls.pull(rows, source=new) == [Status.BAD_SOURCE]


def test_the_handle_of_an_unregistered_destination_is_refused(pulls: Pulls, payload: Any) -> None:
    loader = pulls.loader
    first = np.full(100, GUARD, dtype=np.uint8)
    second = np.full(100, GUARD, dtype=np.uint8)
    old = loader.register(first)
    loader.unregister(old)
    new = loader.register(second)
    assert new.handle & 0xFFFFFFFF == old.handle & 0xFFFFFFFF
    q, s = loader.queue, pulls.source.handle
    assert Compiled.pull(q, s, old.handle, 0, 100, 0) == Status.BAD_DESTINATION
    assert (first == GUARD).all()
    assert (second == GUARD).all()
    assert Compiled.pull(q, s, new.handle, 0, 100, 0) == Status.OK
    np.testing.assert_array_equal(second, payload[:100])
    new.unregister()
    new.unregister()


def test_handles_stay_apart_over_many_generations(pulls: Pulls, payload_path: Path) -> None:
    seen = set()
    for _ in range(20):
        with pulls.loader.open(payload_path) as source:
            assert source.handle not in seen
            seen.add(source.handle)


@pytest.mark.parametrize(
    "dtype", ["<f8", ">i4", "bool", "S3", "datetime64[s]", [("a", "u1"), ("b", "<f4")]]
)
def test_a_destination_of_any_type_and_shape_takes_raw_bytes(
    pulls: Pulls, payload: Any, dtype: Any
) -> None:
    array = np.zeros((3, 4, 5), dtype=dtype)
    destination = pulls.loader.register(array)
    assert destination.nbytes == array.nbytes
    q, s = pulls.loader.queue, pulls.source.handle
    assert Compiled.pull(q, s, destination.handle, 9, 9 + array.nbytes, 0) == Status.OK
    assert array.tobytes() == payload[9 : 9 + array.nbytes].tobytes()
    destination.unregister()


def test_two_sources_and_two_destinations_are_not_mixed_up(
    pulls: Pulls, payload: Any, tmp_path: Path
) -> None:
    other_data = payload[::-1].copy()
    other_data.tofile(tmp_path / "other.bin")
    arrays = [np.zeros(50_000, dtype=np.uint8) for _ in range(2)]
    destinations = [pulls.loader.register(array) for array in arrays]
    with pulls.loader.open(tmp_path / "other.bin") as other:
        rows = np.array([(i, i + 500, 500 * i) for i in range(100)], dtype=np.int64)
        results = []

        def run(source: gpuq.Source, destination: gpuq.Destination) -> None:
            statuses = np.full(100, -1, dtype=np.int64)
            tickets = np.zeros(8, dtype=np.int64)
            pull_slices(
                pulls.loader.queue, source.handle, destination.handle, rows, tickets, statuses
            )
            results.append(statuses)

        pairs = zip((pulls.source, other), destinations, strict=True)
        workers = [threading.Thread(target=run, args=pair) for pair in pairs]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(WAIT_SECONDS)
        assert (np.array(results) == Status.OK).all()
    for array, data in zip(arrays, (payload, other_data), strict=True):
        expected = np.concatenate([data[i : i + 500] for i in range(100)])
        np.testing.assert_array_equal(array, expected)
    for destination in destinations:
        destination.unregister()


def test_files_in_memory_are_read_too(
    reader: str, payload: Any, make_loader: Callable[..., gpuq.Loader], opened: Any
) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("/dev/shm is not writable here")
    path = shm / f"gpuq-test-{os.getpid()}.bin"
    payload.tofile(path)
    try:
        loader = make_loader(reader=reader)
        source = opened(loader, path)
        array = np.zeros(SIZE, dtype=np.uint8)
        destination = loader.register(array)
        assert Compiled.pull(loader.queue, source.handle, destination.handle, 0, SIZE, 0) == 0
        np.testing.assert_array_equal(array, payload)
    finally:
        path.unlink()

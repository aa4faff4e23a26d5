"""Streams: every row of a walk once and in order, and what a failed tile leaves behind.

All kernels here are one body, `walk`, since each body costs seconds to compile.
"""

from __future__ import annotations

import errno
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import until
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import Stepper
from targets import everywhere, examples, open_loader, run_in_the_simulator

import gpuq
from gpuq.kernels import stream as streams
from gpuq.layout import HEARTBEAT, LINE_WORDS, NO_TICKET, Status
from gpuq.testing import readers

COLUMNS = 7
ROWS = 500
START = 13
TAIL = 3  # bytes behind the last row
ALL = 10_000

# Columns of an order, and of a log.
SOURCE, FIRST, LAST, MOST, IS_LEFT_OPEN = range(5)
LOG_STATUS, LOG_ROW, LOG_ROWS = range(3)


def walk(index, size, q, stream, orders, out, log):
    """Walk as row `index` of `orders` says, add each tile to its rows of `out`, and write it down.

    Thread r of a block takes rows r, r + block size and so on of a tile.
    """
    source, most = orders[index, SOURCE], orders[index, MOST]
    gpuq.stream_open_from(q, stream, index, source, orders[index, FIRST], orders[index, LAST])
    for turn in range(most):
        status, row, tile = gpuq.stream_next(q, stream, index)
        if gpuq.block_rank() == 0:
            log[index, turn, LOG_STATUS] = status
            log[index, turn, LOG_ROW] = row
            log[index, turn, LOG_ROWS] = len(tile)
        if status == gpuq.Status.OK and len(tile) == 0:
            break
        for i in range(gpuq.block_rank(), len(tile), gpuq.block_size()):
            for column in range(tile.shape[1]):
                out[row + i, column] += tile[i, column]
    if not orders[index, IS_LEFT_OPEN]:
        gpuq.stream_close(q, stream, index)


class Walks:
    """A loader, a file of rows, and what the last walk found."""

    def __init__(self, loader: gpuq.Loader, path: Path, data: Any) -> None:
        self.loader = loader
        self.data = data
        self.source = loader.open(path)
        self.out = np.zeros((0, COLUMNS), np.uint16)
        self.log = np.zeros((0, 0, 3), np.int64)

    def stream(self, tile_rows: int, **given: int) -> gpuq.TileStream:
        end = START + len(self.data) * COLUMNS + TAIL
        return self.loader.stream(self.source, (tile_rows, COLUMNS), start=START, end=end, **given)

    def begin(
        self, stream: gpuq.TileStream, ranges: Any, *, most: int = ALL, leave_open: bool = False,
        source: gpuq.Source | None = None, threads: int = 1, rows: int = ROWS,
    ) -> None:  # fmt: skip
        """Launch a worker for each range."""
        orders = np.zeros((len(ranges), 5), np.int64)
        orders[:, SOURCE] = (source or self.source).handle
        orders[:, FIRST : LAST + 1] = ranges
        orders[:, MOST] = most
        orders[:, IS_LEFT_OPEN] = leave_open
        self.out = np.zeros((rows, COLUMNS), np.uint16)
        self.log = np.full((len(ranges), min(most, rows + 1), 3), -1, np.int64)
        self.loader.launch(
            walk, len(ranges), self.loader.queue, stream, orders, self.out, self.log,
            threads_per_block=threads,
        )  # fmt: skip

    def run(self, stream: gpuq.TileStream, ranges: Any, **given: Any) -> None:
        self.begin(stream, ranges, **given)
        self.loader.synchronize()

    def tiles(self, worker: int = 0) -> list[tuple[int, int, int]]:
        """Return (status, first row, rows) of each tile that a worker was handed."""
        return [tuple(map(int, entry)) for entry in self.log[worker] if entry[LOG_STATUS] >= 0]

    def assert_holds(self, *ranges: tuple[int, int]) -> None:
        """Assert that these rows were added once for each time that they are named, no others."""
        expected = np.zeros_like(self.out)
        for first, last in ranges:
            expected[first:last] += self.data[first:last]
        np.testing.assert_array_equal(self.out, expected)

    def assert_at_rest(self) -> None:
        """Assert that no request is on its way and no slot is held."""
        assert self.loader.statistics().outstanding == 0
        tail = int(self.loader.queue.tail[0])
        turns = sorted(int(turn) for turn in self.loader.queue.turns)
        assert turns == list(range(tail, tail + self.loader.config.slots))


def write_rows(path: Path, rows: int = ROWS) -> Any:
    """Write START bytes, rows of random bytes, and TAIL bytes; return the rows."""
    data = np.random.default_rng(rows).integers(1, 256, (rows, COLUMNS), dtype=np.uint8)
    path.write_bytes(bytes(START) + data.tobytes() + bytes(TAIL))
    return data


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walks]:
    path = tmp_path_factory.mktemp("rows") / "rows.bin"
    data = write_rows(path)
    with open_loader(post_timeout_ns=10_000_000_000) as loader:
        yield Walks(loader, path, data)


ROW = st.one_of(st.integers(0, 30), st.integers(0, ROWS))
RANGE = st.tuples(ROW, ROW).map(lambda pair: tuple(sorted(pair)))


@everywhere
@settings(max_examples=examples(60))
@given(
    ranges=st.lists(RANGE, min_size=1, max_size=3),
    tile_rows=st.sampled_from([9, 10, 64, 499, 500, 501, 1000]),
    tiles_in_flight=st.integers(1, 4),
    threads=st.sampled_from([1, 3]),
)
def test_every_row_of_a_walk_comes_once_and_in_order(
    walks: Walks, ranges: Any, tile_rows: int, tiles_in_flight: int, threads: int
) -> None:
    stream = walks.stream(tile_rows, tiles_in_flight=tiles_in_flight, workers=len(ranges))
    assert stream.rows == ROWS
    walks.run(stream, ranges, threads=threads)
    for worker, (first, last) in enumerate(ranges):
        expected = [
            (Status.OK, row, min(tile_rows, last - row)) for row in range(first, last, tile_rows)
        ]
        assert walks.tiles(worker) == [*expected, (Status.OK, last, 0)]
    walks.assert_holds(*ranges)
    walks.assert_at_rest()
    stream.close()


@everywhere
@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_walk_that_is_left_early_can_be_begun_again(walks: Walks, most: int) -> None:
    """More walks than slots: one that kept a slot would stop the queue."""
    stream = walks.stream(10, tiles_in_flight=3)
    for first in range(0, 120, 5):
        walks.run(stream, [(first, ROWS)], most=most)
        assert walks.tiles() == [(Status.OK, first + 10 * turn, 10) for turn in range(most)]
        walks.assert_holds((first, first + 10 * most))
        walks.assert_at_rest()
    stream.close()


@everywhere
def test_a_walk_that_was_never_closed_is_ended_by_the_next_one(walks: Walks) -> None:
    stream = walks.stream(10, tiles_in_flight=3)
    for _ in range(12):
        walks.run(stream, [(0, ROWS)], most=2, leave_open=True)
        walks.assert_holds((0, 20))
    walks.run(stream, [(490, ROWS)])
    walks.assert_holds((490, ROWS))
    walks.assert_at_rest()
    stream.close()


@everywhere
def test_a_truncated_file_fails_the_tiles_that_it_lacks_and_no_other(
    walks: Walks, tmp_path: Path
) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(START) + walks.data[:95].tobytes())
    stream = walks.stream(10, tiles_in_flight=2)
    with walks.loader.open(path) as short:
        walks.run(stream, [(60, 120)], source=short)
    lost = [(Status.END_OF_FILE, row, 0) for row in (90, 100, 110)]
    good = [(Status.OK, row, 10) for row in (60, 70, 80)]
    assert walks.tiles() == [*good, *lost, (Status.OK, 120, 0)]
    walks.assert_holds((60, 90))
    walks.assert_at_rest()
    # The worker's ring serves the next walk, of the stream's own file.
    walks.run(stream, [(60, 120)])
    walks.assert_holds((60, 120))
    stream.close()


@everywhere
def test_ranges_that_are_none_are_a_status(walks: Walks) -> None:
    stream = walks.stream(10, workers=3)
    walks.run(stream, [(7, 3), (-20, -5), (495, 505)], rows=600)
    assert walks.tiles(0) == [(Status.BAD_RANGE, 7, 0), (Status.OK, 7, 0)]
    # Rows that the stream has not: in front of its begin, and behind its end.
    assert walks.tiles(1) == [
        (Status.OUT_OF_BOUNDS, -20, 0),
        (Status.OUT_OF_BOUNDS, -10, 0),
        (Status.OK, -5, 0),
    ]
    assert walks.tiles(2) == [(Status.OUT_OF_BOUNDS, 495, 0), (Status.OK, 505, 0)]
    walks.assert_holds()
    stream.close()


@pytest.mark.parametrize("given", [{"tile": 2.5}, {"tile": (2, 0.5)}, {"start": 0.5, "end": 9.5}])
def test_a_stream_of_broken_numbers_is_refused(walks: Walks, given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="integer"):
        walks.loader.stream(walks.source, **{"tile": 4} | given)


def test_a_tile_may_be_a_number_of_numpy(walks: Walks) -> None:
    stream = walks.loader.stream(walks.source, np.int64(4))  # type: ignore[arg-type]
    assert stream.handle.tiles.shape == (1, 3, 4)
    stream.close()


@everywhere
def test_a_worker_that_the_stream_has_no_tiles_for_gets_none(walks: Walks) -> None:
    """Blocks more than workers: their rings would lie behind the stream's arrays."""
    stream = walks.stream(10, workers=2)
    before = stream.handle.words.copy()
    walks.run(stream, [(0, 20), (20, 40), (40, 60), (60, 80)], most=3)
    walks.assert_holds((0, 20), (20, 40))
    for worker in (2, 3):
        assert {status for status, _, _ in walks.tiles(worker)} == {Status.BAD_OPTIONS}
    assert stream.handle.words.shape == before.shape
    stream.close()


@everywhere
@pytest.mark.parametrize(
    ("tile", "dtype", "shape", "rows"),
    [
        (100, "uint8", (100,), START + ROWS * COLUMNS + TAIL),
        (100, "<u2", (100,), (START + ROWS * COLUMNS + TAIL) // 2),
        ((4, 3, 2), "float32", (4, 3, 2), (START + ROWS * COLUMNS + TAIL) // 24),
    ],
)
def test_a_stream_has_the_rows_of_the_whole_file_by_default(
    walks: Walks, tile: Any, dtype: str, shape: tuple[int, ...], rows: int
) -> None:
    stream = walks.loader.stream(walks.source, tile, dtype, workers=2)
    assert stream.rows == rows
    assert stream.handle.tiles.shape == (2, 3, *shape)
    assert stream.handle.tiles.dtype == np.dtype(dtype)
    assert stream.handle.row_bytes == np.dtype(dtype).itemsize * int(np.prod(shape[1:]))
    stream.close()


def test_a_stream_of_a_source_with_limits_lies_within_them(walks: Walks) -> None:
    with walks.loader.open(walks.source.path, start=40, end=100) as limited:
        whole = walks.loader.stream(limited, (1, 10)).handle
        assert (whole.start, whole.rows) == (40, 6)
        part = walks.loader.stream(limited, (1, 10), start=45, end=65).handle
        assert (part.start, part.rows) == (45, 2)


@pytest.mark.parametrize(
    ("tile", "given", "says"),
    [
        (10, {"tiles_in_flight": 16}, "17 slots; there are 16"),
        (10, {"tiles_in_flight": 3, "workers": 5}, "20 slots; there are 16"),
        (10, {"tiles_in_flight": 0}, "at least 1"),
        (10, {"workers": 0}, "at least 1"),
        (0, {}, "no rows"),
        (-1, {}, "no rows"),
        ((), {}, "no rows"),
        ((4, 0), {}, "no rows"),
        (1 << 32, {}, "too many"),
        (10, {"start": 4000}, "the range 4000 to 3516 is none"),
        (10, {"start": -1}, "the range -1 to 3516 is none"),
        (10, {"start": 9, "end": 8}, "the range 9 to 8 is none"),
        (10, {"end": 1 << 70}, "is none"),
        ((4, -2, -3), {}, "no rows"),
    ],
)
def test_a_stream_that_cannot_be_is_refused(
    walks: Walks, tile: Any, given: dict[str, int], says: str
) -> None:
    known = len(walks.loader._destinations)
    with pytest.raises(gpuq.ConfigError, match=says):
        walks.loader.stream(walks.source, tile, **given)
    assert len(walks.loader._destinations) == known


def test_as_many_tiles_as_slots_are_taken(walks: Walks) -> None:
    stream = walks.stream(1, tiles_in_flight=15)
    walks.run(stream, [(0, 50)])
    walks.assert_holds((0, 50))
    stream.close()


def test_tiles_are_borrowed_and_never_freed(walks: Walks) -> None:
    """A view that compiled code returns without counting it is given back once too often."""
    stream = walks.stream(1)
    tiles = stream.handle.tiles
    before = sys.getrefcount(tiles)
    for _ in range(3):
        walks.run(stream, [(0, ROWS)])
        walks.assert_holds((0, ROWS))
    assert sys.getrefcount(tiles) == before
    stream.close()


# --- on the CPU only: what a scripted reader decides ---------------------------------------------


def scripted(make_scripted: Any, tmp_path: Path, script: Any, **given: Any) -> Any:
    """Return walks over a scripted reader and the reader; the file has rows and nothing else."""
    path = tmp_path / "rows.bin"
    data = write_rows(path)
    loader, reader = make_scripted(np.fromfile(path, np.uint8), script, **given)
    return Walks(loader, path, data), reader


def test_a_read_that_fails_is_the_status_of_its_tile(make_scripted: Any, tmp_path: Path) -> None:
    good, bad = (readers.READ, -1), (readers.FAIL, errno.EIO)
    walks, _ = scripted(make_scripted, tmp_path, [good, good, bad, good, bad, good])
    walks.run(walks.stream(10, tiles_in_flight=2), [(0, 60)])
    failed = {20: Status.READ_FAILED, 40: Status.READ_FAILED}
    expected = [
        (failed.get(row, Status.OK), row, 0 if row in failed else 10) for row in range(0, 60, 10)
    ]
    assert walks.tiles() == [*expected, (Status.OK, 60, 0)]
    walks.assert_holds((0, 20), (30, 40), (50, 60))
    walks.assert_at_rest()


@pytest.mark.parametrize("tiles_in_flight", [1, 2, 4])
def test_so_many_tiles_are_in_flight_while_one_is_worked_on(
    make_scripted: Any, tmp_path: Path, tiles_in_flight: int
) -> None:
    """Reads are answered one by one, as `LISTED` lets them."""
    walks, reader = scripted(make_scripted, tmp_path, [(readers.READ, -1)])
    reader.order[:6] = range(6)
    reader.words[readers.ORDER] = readers.BY_LIST
    control = walks.loader.queue.control
    walks.begin(walks.stream(10, tiles_in_flight=tiles_in_flight), [(0, 60)])
    for answered in range(7):
        expected = min(tiles_in_flight + answered, 6)
        until(lambda expected=expected: reader.words[readers.SUBMITTED] >= expected, "a read")
        passes = int(control[HEARTBEAT])
        until(lambda passes=passes: control[HEARTBEAT] > passes + 100, "passes")
        assert reader.words[readers.SUBMITTED] == expected
        # One read is never answered before those that are let go: OLDEST_FIRST would answer all.
        assert reader.words[readers.ANSWERED] == answered
        reader.words[readers.LISTED] = answered + 1
    walks.loader.synchronize()
    walks.assert_holds((0, 60))


def test_an_abort_ends_a_walk_that_waits(make_scripted: Any, tmp_path: Path) -> None:
    walks, reader = scripted(make_scripted, tmp_path, [(readers.READ, -1)], gate=1)
    stream = walks.stream(10, tiles_in_flight=2)
    walks.begin(stream, [(0, 60)], most=1)
    until(lambda: reader.words[readers.SUBMITTED] == 2, "reads")
    walks.loader.abort()
    walks.loader.synchronize()
    assert walks.tiles() == [(Status.ABORTED, 0, 0)]
    assert (np.asarray(stream.handle.tickets) == NO_TICKET).all()


# --- step by step --------------------------------------------------------------------------------


def stepped_stream(stepper: Stepper, tile_rows: int, ring: int) -> streams.Stream:
    """Return a stream of one-byte rows over a stepper's source and destination."""
    nbytes = ring * tile_rows
    return streams.Stream(
        source=stepper.source,
        destination=stepper.destination,
        start=0,
        rows=len(stepper.data),
        row_bytes=1,
        tiles=stepper.bytes[:nbytes].reshape(1, ring, tile_rows),
        tickets=np.full((1, ring), NO_TICKET, np.int64),
        words=np.zeros((1, LINE_WORDS), np.int64),
    )


def test_a_stream_does_not_wait_for_a_slot_that_it_holds_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four slots; the stream's oldest answer is in slot 0, and others have passed it by.

    The next ticket needs slot 0. A stream that spins for it there waits for itself until the
    queue's time is over, and hands out a tile that was never asked for.
    """

    def spin_for_a_slot(*_: Any) -> Any:
        raise AssertionError("it spins for a slot while it holds tickets")

    monkeypatch.setattr(streams, "await_slot", spin_for_a_slot)
    data = np.arange(60, dtype=np.uint8)
    stepper = Stepper(data, capacity=4)
    q, stream = stepper.queue, stepped_stream(stepper, 10, 3)
    seen = []
    gpuq.stream_open(q, stream, 0, 0, 60)
    for _ in range(6):
        stepper.run()
        while (other := int(gpuq.try_post(q, 0, 0, 0, 0, 0))) >= 0:
            stepper.run()
            stepper.consume(other)
        status, row, tile = gpuq.stream_next(q, stream, 0)
        assert (status, row) == (Status.OK, len(seen))
        seen.extend(tile)
    np.testing.assert_array_equal(seen, data)
    status, row, tile = gpuq.stream_next(q, stream, 0)
    assert (status, row, len(tile)) == (Status.OK, 60, 0)
    stepper.assert_at_rest()
    stepper.close()


def test_where_others_hold_every_slot_the_tile_says_so_and_the_walk_goes_on() -> None:
    stepper = Stepper(np.arange(60, dtype=np.uint8), capacity=2)
    q, stream = stepper.queue, stepped_stream(stepper, 10, 3)
    others = [stepper.post(0, 1, 1000), stepper.post(0, 1, 1001)]
    gpuq.stream_open(q, stream, 0, 0, 60)
    status, row, tile = gpuq.stream_next(q, stream, 0)
    assert (status, row, len(tile)) == (Status.NO_SLOT, 0, 0)
    stepper.run()
    for other in others:
        stepper.consume(other)
    # Nothing was asked for meanwhile; one more that waits in vain, and the walk is itself again.
    gpuq.stream_close(q, stream, 0)
    gpuq.stream_open(q, stream, 0, 10, 60)
    stepper.run()
    status, row, tile = gpuq.stream_next(q, stream, 0)
    assert (status, row, list(tile)) == (Status.OK, 10, list(range(10, 20)))
    stepper.run()
    gpuq.stream_close(q, stream, 0)
    stepper.assert_at_rest()
    stepper.close()


@given(total=st.integers(0, 1 << 40), workers=st.integers(1, 1000), data=st.data())
def test_shares_cover_everything_once_and_differ_by_one(
    total: int, workers: int, data: Any
) -> None:
    ends = [tuple(map(int, gpuq.share(total, worker, workers))) for worker in range(workers)]
    assert ends[0][0] == 0
    assert ends[-1][1] == total
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    sizes = {last - first for first, last in ends}
    assert max(sizes) - min(sizes) <= 1


def test_marked_tests_hold_in_the_simulator() -> None:
    run_in_the_simulator(__file__, __name__)

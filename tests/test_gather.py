"""Gathering rows by index: what arrives, how many requests it costs, and a status for each row."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import until
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stepping import COUNTERS, bare_queue
from targets import everywhere, examples, open_loader, run_in_the_simulator

import gpuq
from gpuq.kernels import gathering
from gpuq.layout import State, Status
from gpuq.testing import readers

ROWS, COLUMNS = 300, 13
START, TAIL = 11, 5
ROOM = 80
UNTOUCHED = 77


def gather_share(index, size, q, table, indices, row, statuses, outcomes):
    first, last = gpuq.share(len(indices), index, size)
    outcomes[index, gpuq.block_rank()] = gpuq.gather(
        q, table, index, indices[first:last], row + first, statuses[first:last]
    )


class Gathers:
    """A loader, a file that holds a table, and a destination."""

    def __init__(self, loader: gpuq.Loader, path: Path, rows: int = ROWS) -> None:
        self.loader = loader
        self.data = np.random.default_rng(3).integers(0, 256, (ROWS, COLUMNS), dtype=np.uint8)
        path.write_bytes(bytes(START) + self.data[:rows].tobytes() + bytes(TAIL))
        self.source = loader.open(path)
        self.out = np.zeros((ROOM, COLUMNS), np.uint8)
        self.destination = loader.register(self.out)
        self.statuses = np.zeros(0, np.int64)
        self.outcomes = np.zeros((0, 0), np.int64)

    def table(self, workers: int = 1) -> Any:
        end = START + ROWS * COLUMNS + 3
        return self.loader.table(
            self.source, self.destination, COLUMNS, start=START, end=end, workers=workers
        )

    def begin(self, table: Any, indices: Any, row: int = 0, threads: int = 1) -> None:
        self.out[:] = UNTOUCHED
        self.statuses = np.full(len(indices), -1, np.int64)
        self.outcomes = np.full((table.workers, threads), -1, np.int64)
        self.loader.launch(
            gather_share, table.workers, self.loader.queue, table, np.asarray(indices, np.int64),
            row, self.statuses, self.outcomes, threads_per_block=threads,
        )  # fmt: skip

    def run(self, *given: Any, **named: Any) -> int:
        """Gather; return how many requests it took."""
        before = sum(self.loader.statistics().requests.values())
        self.begin(*given, **named)
        self.loader.synchronize()
        return sum(self.loader.statistics().requests.values()) - before

    def assert_holds(self, indices: Any, statuses: Any, row: int = 0) -> None:
        """Assert that each row has its status, and those that are OK their bytes."""
        assert list(self.statuses) == list(statuses)
        expected = np.full_like(self.out, UNTOUCHED)
        for i, index in enumerate(indices):
            if statuses[i] == Status.OK:
                expected[row + i] = self.data[index]
        np.testing.assert_array_equal(self.out, expected)


@pytest.fixture(scope="module")
def gathers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gathers]:
    with open_loader(counters=1 << 12) as loader:
        yield Gathers(loader, tmp_path_factory.mktemp("table") / "table.bin")


RUN = st.tuples(st.integers(-3, ROWS + 3), st.integers(1, 6)).map(
    lambda run: list(range(run[0], run[0] + run[1]))
)
INDICES = st.lists(
    st.one_of(st.integers(0, ROWS - 1).map(lambda i: [i]), RUN,
              st.sampled_from([[-1], [ROWS], [1 << 40], [-(1 << 63)], [(1 << 63) - 1]])),
    max_size=12,
).map(lambda runs: [index for run in runs for index in run])  # fmt: skip


def runs_of(indices: list[int]) -> int:
    """Count runs of consecutive rows that the table has."""
    known = [0 <= index < ROWS for index in indices]
    return sum(
        known[i] and not (i > 0 and known[i - 1] and indices[i] == indices[i - 1] + 1)
        for i in range(len(indices))
    )


@everywhere
@settings(max_examples=examples(80))
@given(
    indices=INDICES, workers=st.integers(1, 3), threads=st.sampled_from([1, 3]),
    row=st.integers(0, 8),
)  # fmt: skip
@example(indices=[ROWS - 2, ROWS - 1, ROWS, ROWS + 1, 3, 4], workers=1, threads=1, row=0)
@example(indices=[-1, 0, 1], workers=2, threads=1, row=0)
def test_any_indices_are_gathered_as_numpy_does(
    gathers: Gathers, indices: list[int], workers: int, threads: int, row: int
) -> None:
    requests = gathers.run(gathers.table(workers), indices, row, threads)
    statuses = [Status.OK if 0 <= i < ROWS else Status.OUT_OF_BOUNDS for i in indices]
    gathers.assert_holds(indices, statuses, row)
    expected = 0
    for worker in range(workers):
        first, last = gpuq.share(len(indices), worker, workers)
        failed = [status for status in statuses[first:last] if status != Status.OK]
        assert set(gathers.outcomes[worker]) <= {failed[0] if failed else Status.OK, -1}
        assert gathers.outcomes[worker, 0] != -1
        expected += runs_of(indices[first:last])
    assert requests == expected


@everywhere
def test_more_rows_than_slots_are_gathered(gathers: Gathers) -> None:
    indices = list(range(0, 2 * ROOM, 2))
    assert gathers.run(gathers.table(), indices) == ROOM > gathers.loader.config.slots
    gathers.assert_holds(indices, [Status.OK] * ROOM)


@everywhere
def test_each_row_of_a_run_over_the_end_of_the_file_has_its_own_status(tmp_path: Path) -> None:
    indices = [5, 97, 98, 99, 100, 101, 7, 200, 8]
    lost = Status.END_OF_FILE
    statuses = [0, 0, 0, 0, lost, lost, 0, lost, 0]
    with open_loader() as loader:
        # TAIL bytes behind row 99, fewer than a row.
        gathers = Gathers(loader, tmp_path / "short.bin", rows=100)
        table = gathers.table()
        for _ in range(3):
            gathers.run(table, indices)
            gathers.assert_holds(indices, statuses)
            assert list(gathers.outcomes[0]) == [lost]
        gathers.run(table, [1, 2, 3])
        gathers.assert_holds([1, 2, 3], [Status.OK] * 3)


@pytest.mark.parametrize("given", [{"row_bytes": 2.5}, {"workers": 2.0}, {"end": 9.0}])
def test_a_broken_number_of_workers_does_not_break_the_counters(
    gathers: Gathers, given: Any
) -> None:
    """It was added to the number of the next counter, whose handle no kernel took from then on."""
    with pytest.raises(TypeError, match="integer"):
        gathers.loader.table(
            gathers.source, gathers.destination, given.pop("row_bytes", COLUMNS), **given
        )
    assert type(gathers.loader.counter().handle) is int


@everywhere
@pytest.mark.parametrize("row", [2**61, -(2**61), 2**61 - 1, 2**63 - 1, -(2**63)])
def test_a_row_whose_place_overflows_is_not_put_elsewhere(gathers: Gathers, row: int) -> None:
    """2**61 rows of 8 bytes are 2**64, which is 0 in a word: the rows came to the begin, OK."""
    table = gathers.loader.table(gathers.source, gathers.destination, 8)
    gathers.begin(table, [3, 9, 10], row)
    gathers.loader.synchronize()
    # The last row in front of the destination is followed by its first one, if it is 0.
    assert list(gathers.statuses) == [Status.OUT_OF_BOUNDS] * 3
    assert (gathers.out == UNTOUCHED).all()


@everywhere
def test_rows_that_the_destination_has_no_room_for_say_so(gathers: Gathers) -> None:
    indices = [10, 11, 12, 13]
    gathers.run(gathers.table(), indices, ROOM - 2)
    statuses = [Status.OK, Status.OK, Status.OUT_OF_BOUNDS, Status.OUT_OF_BOUNDS]
    gathers.assert_holds(indices, statuses, ROOM - 2)


def gather_wrongly(index, size, q, table, worker, indices, statuses, outcomes):
    outcomes[index] = gpuq.gather(q, table, worker, indices, 0, statuses)


@everywhere
@pytest.mark.parametrize(("worker", "statuses"), [(-1, 4), (2, 4), (0, 3)])
def test_what_cannot_be_told_apart_is_not_read(
    gathers: Gathers, worker: int, statuses: int
) -> None:
    """A worker's counter that is another's, and a row without a place for its status."""
    table, noted, outcomes = gathers.table(2), np.full(statuses, -1), np.zeros(1, np.int64)
    before = gathers.loader.statistics().requests
    gathers.loader.launch(
        gather_wrongly, 1, gathers.loader.queue, table, worker, np.arange(4), noted, outcomes
    )
    gathers.loader.synchronize()
    assert outcomes[0] == Status.BAD_OPTIONS
    assert (noted == -1).all()
    assert gathers.loader.statistics().requests == before


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"row_bytes": 0}, "rows of 0 bytes"),
        ({"workers": 0}, "for 0 workers"),
        ({"start": -1}, "from -1"),
        ({"end": 2**70}, "to 1180591620717411303424"),
        ({"start": 8000}, "from 8000 to"),
        ({"start": 9, "end": 8}, "from 9 to 8"),
        ({"workers": 5000}, "5000 more were"),
    ],
)
def test_a_table_that_cannot_be_is_refused(gathers: Gathers, given: Any, says: str) -> None:
    row_bytes = given.get("row_bytes", COLUMNS)
    rest = {name: value for name, value in given.items() if name != "row_bytes"}
    with pytest.raises(gpuq.ConfigError, match=says):
        gathers.loader.table(gathers.source, gathers.destination, row_bytes, **rest)


def test_workers_have_counters_of_their_own(gathers: Gathers) -> None:
    first, second = gathers.table(3), gathers.table(2)
    assert second.counter == first.counter + 3
    assert gathers.loader.counter().handle == second.counter + 2


# --- on the CPU only: what a scripted reader decides ---------------------------------------------


def test_a_read_that_succeeds_when_tried_again_is_ok(
    make_scripted: Callable[..., Any], tmp_path: Path
) -> None:
    """The second of four runs fails once; a counter does not say which, so all are read again."""
    data = np.random.default_rng(3).integers(0, 256, START + ROWS * COLUMNS, dtype=np.uint8)
    good, bad = (readers.READ, -1), (readers.FAIL, errno.EIO)
    loader, reader = make_scripted(data, [good, bad, good])
    gathers = Gathers(loader, tmp_path / "table.bin")
    gathers.data = data[START:].reshape(ROWS, COLUMNS)
    indices = [3, 9, 10, 50, 20]
    gathers.begin(gathers.table(), indices)
    loader.synchronize()
    gathers.assert_holds(indices, [Status.OK] * 5)
    assert reader.words[readers.SUBMITTED] == 8


def test_a_row_that_cannot_be_read_is_the_only_one_lost(
    make_scripted: Callable[..., Any], tmp_path: Path
) -> None:
    """Of reads 0 to 3 the second fails, a run of two rows; again as a run, then its first row."""
    data = np.random.default_rng(3).integers(0, 256, START + ROWS * COLUMNS, dtype=np.uint8)
    good, bad = (readers.READ, -1), (readers.FAIL, errno.EIO)
    loader, _ = make_scripted(data, [good, bad, good, good, good, bad, bad, good])
    gathers = Gathers(loader, tmp_path / "table.bin")
    gathers.data = data[START:].reshape(ROWS, COLUMNS)
    indices = [3, 9, 10, 50, 20]
    gathers.begin(gathers.table(), indices)
    loader.synchronize()
    gathers.assert_holds(indices, [0, Status.READ_FAILED, 0, 0, 0])
    assert list(gathers.outcomes[0]) == [Status.READ_FAILED]


def test_an_abort_ends_a_gather(make_scripted: Callable[..., Any], tmp_path: Path) -> None:
    loader, reader = make_scripted(np.zeros(1 << 13, np.uint8), gate=1)
    gathers = Gathers(loader, tmp_path / "table.bin")
    gathers.begin(gathers.table(), [3, 9, 10, ROWS, 20])
    until(lambda: reader.words[readers.SUBMITTED] == 3, "reads")
    loader.abort()
    loader.synchronize()
    aborted = Status.ABORTED
    assert list(gathers.statuses) == [aborted, aborted, aborted, Status.OUT_OF_BOUNDS, aborted]
    assert list(gathers.outcomes[0]) == [aborted]


# --- plain ---------------------------------------------------------------------------------------


def test_where_no_slot_comes_free_it_is_not_tried_for_every_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = bare_queue(1, post_timeout_ns=0)
    gpuq.try_post(q, 0, 0, 0, 0, 0)
    tries = []
    real = gathering.post_counted_at

    def count(*arguments: Any) -> Any:
        tries.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(gathering, "post_counted_at", count)
    table = gathering.Table(1, 1, 0, ROWS, COLUMNS, 0, COUNTERS)
    statuses = np.full(4, -1, np.int64)
    assert gpuq.gather(q, table, 0, np.array([1, 5, -2, 9]), 0, statuses) == Status.NO_SLOT
    expected = [Status.NO_SLOT, Status.NO_SLOT, Status.OUT_OF_BOUNDS, Status.NO_SLOT]
    assert list(statuses) == expected
    assert len(tries) == 1


def test_on_a_queue_that_ended_every_row_says_so() -> None:
    q = bare_queue(2, state=State.ABORTED)
    table = gathering.Table(1, 1, 0, ROWS, COLUMNS, 0, COUNTERS)
    statuses = np.full(4, -1, np.int64)
    assert gpuq.gather(q, table, 3, np.array([1, 3, 5, 7]), 0, statuses) == Status.ABORTED
    assert list(statuses) == [Status.ABORTED] * 4


def test_marked_tests_hold_in_the_simulator() -> None:
    run_in_the_simulator(__file__, __name__)

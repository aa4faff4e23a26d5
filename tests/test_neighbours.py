"""Neighbours: requests that one read serves, each still judged, copied and answered by itself."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import Compiled
from stepping import BUFFER, DATA, Stepper

import gpuq
from gpuq.host import records, tables
from gpuq.host import staging as leases
from gpuq.layout import STATE, State, Status
from gpuq.testing import copiers, readers

READ_ALL = (readers.READ, -1)


@pytest.fixture
def merging(stepper: Any) -> Callable[..., Stepper]:
    """Make steppers that join neighbours up to a buffer."""
    return lambda *given, **named: stepper(*given, **{"merge_bytes": BUFFER} | named)


def reads_of(s: Stepper) -> list[tuple[int, int]]:
    """Return (offset, bytes) of all reads so far."""
    return [(int(row[readers.OFFSET]), int(row[readers.NBYTES])) for row in s.log()]


def merged(s: Stepper) -> int:
    return int(s.poller.statistics[records.STATISTICS_MERGED])


def test_rows_of_one_block_are_read_once(merging: Any) -> None:
    s = merging(DATA)
    tickets = [s.post(100 * i, 100 * i + 100, 100 * i) for i in range(4)]
    s.run()
    assert reads_of(s) == [(0, 512)]
    assert merged(s) == 3
    assert [s.status(t) for t in tickets] == [Status.OK] * 4
    s.assert_only(0, DATA[:400])
    s.assert_at_rest()


def test_blocks_that_touch_are_read_together_and_others_alone(merging: Any) -> None:
    s = merging(DATA)
    ranges = [(0, 512), (512, 1024), (2000, 2010), (1024, 1030)]
    for i, (start, end) in enumerate(ranges):
        s.post(start, end, 600 * i)
    s.run()
    # 2000 begins in the block from 1536, and nobody asked for what is before it.
    assert sorted(reads_of(s)) == [(0, 1536), (1536, 512)]
    for i, (start, end) in enumerate(ranges):
        assert (s.bytes[600 * i : 600 * i + end - start] == DATA[start:end]).all()
    s.assert_at_rest()


def test_a_read_for_neighbours_is_not_longer_than_the_setting_says(merging: Any) -> None:
    s = merging(DATA, merge_bytes=1024)
    for i in range(4):
        s.post(512 * i, 512 * i + 512, 512 * i)
    s.run()
    assert sorted(reads_of(s)) == [(0, 1024), (1024, 1024)]
    s.assert_only(0, DATA[:2048])


def test_without_the_setting_each_is_read_alone(merging: Any) -> None:
    s = merging(DATA, merge_bytes=0)
    for i in range(4):
        s.post(100 * i, 100 * i + 100, 100 * i)
    s.run()
    assert reads_of(s) == [(0, 512)] * 4
    assert merged(s) == 0


def test_a_request_of_many_pieces_neither_lends_nor_borrows(merging: Any) -> None:
    s = merging(DATA, buffers=8)
    s.post(0, 2 * BUFFER)
    s.post(100, 200, 2 * BUFFER)
    s.post(2 * BUFFER, 4 * BUFFER, 3 * BUFFER)
    s.run()
    assert merged(s) == 0
    s.assert_at_rest()


def test_a_few_strangers_between_neighbours_do_not_part_them(merging: Any) -> None:
    s = merging(DATA, capacity=16, buffers=8)
    s.post(0, 10, 0)
    for i in range(3):
        s.post(4000 * (i + 1), 4000 * (i + 1) + 10, 100 * (i + 1))
    s.post(10, 20, 10)
    s.run()
    assert len(s.log()) == 4
    assert merged(s) == 1
    assert (s.bytes[:20] == DATA[:20]).all()
    assert [int(r[0]) for r in reads_of(s)] == [0, 3584, 7680, 11776]
    s.assert_at_rest()


def test_files_are_not_mixed_up(merging: Any) -> None:
    s = merging(DATA)
    words = range(tables.DIRECT_DESCRIPTOR, tables.IS_PROVEN + 1)
    other = s.sources.publish(
        s.sources.reserve(), {word: s.sources.word(s.source, word) for word in words}
    )
    s.post(0, 100)
    s.post(100, 200, 100, source=other)
    s.run()
    assert merged(s) == 0
    assert len(s.log()) == 2


def test_a_bad_block_fails_only_who_wants_it(merging: Any) -> None:
    s = merging(DATA, [(readers.FAIL, errno.EIO), (readers.FAIL, errno.EIO), READ_ALL])
    tickets = [s.post(0, 100), s.post(600, 700, 100)]
    s.run()
    # Together, then the borrower, which fails again, then the lender.
    assert reads_of(s) == [(0, 1024), (512, 512), (0, 512)]
    assert [s.status(t) for t in tickets] == [Status.OK, Status.READ_FAILED]
    s.assert_only(0, DATA[:100])
    s.assert_at_rest()


@pytest.mark.parametrize("number", [errno.EIO, errno.EINTR, errno.EAGAIN])
def test_a_read_that_fails_for_all_is_done_again_for_each(merging: Any, number: int) -> None:
    # One bad block must not fail the request for the good one beside it.
    s = merging(DATA, [(readers.FAIL, number), READ_ALL], must_be_direct=True)
    first = s.post(0, 100)
    second = s.post(600, 700, 100)
    s.run()
    assert reads_of(s)[0] == (0, 1024)
    assert s.status(first) == Status.OK
    assert s.status(second) == Status.OK
    assert (s.bytes[100:200] == DATA[600:700]).all()
    s.assert_at_rest()


def test_each_is_judged_alone_at_the_end_of_the_file(merging: Any) -> None:
    size = 700
    s = merging(DATA[:size])
    tickets = [s.post(a, b, a) for a, b in ((500, 600), (600, 700), (690, 701), (699, 700))]
    s.run()
    missing = Status.END_OF_FILE
    assert [s.status(t) for t in tickets] == [Status.OK, Status.OK, missing, Status.OK]
    assert (s.bytes[500:700] == DATA[500:700]).all()
    assert (s.bytes[701:900] == s.room[0]).all(), "nothing is written behind what there is"
    s.assert_at_rest()


def test_a_short_read_for_all_is_no_end_of_the_file(merging: Any) -> None:
    s = merging(DATA, [(readers.READ, 512), READ_ALL])
    tickets = [s.post(300 * i, 300 * i + 300, 300 * i) for i in range(3)]
    s.run()
    assert [s.status(t) for t in tickets] == [Status.OK] * 3
    s.assert_only(0, DATA[:900])
    s.assert_at_rest()


def test_a_refusal_of_direct_reads_is_met_by_each_on_its_own(merging: Any) -> None:
    s = merging(DATA, [(readers.FAIL, errno.EINVAL)] * 3 + [READ_ALL])
    tickets = [s.post(300 * i, 300 * i + 300, 300 * i) for i in range(3)]
    s.run()
    assert [s.status(t) for t in tickets] == [Status.OK] * 3
    s.assert_only(0, DATA[:900])
    s.assert_at_rest()


def lender_and_borrower(s: Stepper) -> tuple[int, int]:
    """Return the leases of two neighbours on their way."""
    records_of = s.staging.leases
    lender = next(i for i in range(len(records_of)) if records_of[i, leases.BORROWERS] == 1)
    borrower = next(
        i for i in range(len(records_of)) if i != lender and records_of[i, leases.LENDER] == lender
    )
    return lender, borrower


def test_a_lenders_buffer_is_not_read_into_while_a_borrowers_copy_is_under_way(
    merging: Any,
) -> None:
    s = merging(DATA, copies=[copiers.LATE, copiers.LATE, copiers.AT_ONCE], buffers=2)
    first, second = s.post(0, 100), s.post(100, 200, 100)
    s.run()
    lender, borrower = lender_and_borrower(s)
    third = s.post(4000, 4100, 200)
    s.copier.ends[lender] = 1
    s.run()
    assert [s.status(t) for t in (first, second, third)] == [
        Status.OK,
        Status.PENDING,
        Status.PENDING,
    ]
    assert s.staging.leases[lender, leases.PHASE] == leases.LENDING
    assert len(s.log()) == 1, "both buffers are taken"
    s.copier.ends[borrower] = 1
    s.run()
    assert [s.status(t) for t in (second, third)] == [Status.OK, Status.OK]
    s.assert_only(0, np.concatenate([DATA[:200], DATA[4000:4100]]))
    s.assert_at_rest()


def test_a_lender_outlives_its_borrowers_too(merging: Any) -> None:
    s = merging(DATA, copies=[copiers.LATE])
    first, second = s.post(0, 100), s.post(100, 200, 100)
    s.run()
    lender, borrower = lender_and_borrower(s)
    s.copier.ends[borrower] = 1
    s.run()
    assert (s.status(first), s.status(second)) == (Status.PENDING, Status.OK)
    assert s.free_leases == 3
    s.copier.ends[lender] = 1
    s.run()
    assert s.status(first) == Status.OK
    s.assert_only(0, DATA[:200])
    s.assert_at_rest()


@pytest.mark.parametrize("how", [copiers.REFUSED, copiers.LATE_FAILURE])
@pytest.mark.parametrize("which", [0, 1])
def test_a_copy_that_fails_fails_its_own_request(merging: Any, how: int, which: int) -> None:
    copies = [copiers.AT_ONCE, copiers.AT_ONCE]
    copies[which] = how
    s = merging(DATA, copies=copies)
    tickets = [s.post(0, 100), s.post(100, 200, 100)]
    s.run()
    s.copier.ends[:] = 1
    s.run()
    statuses = [s.status(t) for t in tickets]
    assert sorted(statuses) == [Status.OK, Status.COPY_FAILED]
    right = statuses.index(Status.OK)
    s.assert_only(100 * right, DATA[100 * right : 100 * right + 100])
    s.assert_at_rest()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", [copiers.UNCERTAIN, copiers.LATE_UNCERTAIN])
def test_a_buffer_with_an_uncertain_copy_stays_out_of_use(
    merging: Any, how: int, which: int
) -> None:
    copies = [copiers.AT_ONCE, copiers.AT_ONCE]
    copies[which] = how
    s = merging(DATA, copies=copies)
    s.post(0, 100)
    s.post(100, 200, 100)
    for _ in range(3):
        s.step()
        s.copier.ends[:] = 1
    assert s.queue.control[STATE] == State.ABORTED
    lender = int(s.log()[0, readers.LEASE])
    assert s.staging.leases[lender, leases.PHASE] != leases.FREE


def test_an_abort_between_read_and_arrival_fails_all_and_gives_all_back(merging: Any) -> None:
    s = merging(DATA)
    s.reader.words[readers.GATE] = 1
    tickets = [s.post(0, 100), s.post(100, 200, 100)]
    s.step()
    records.raise_state(s.queue.control, int(State.ABORTED))
    s.reader.words[readers.GATE] = 0
    s.run()
    assert [s.status(t) for t in tickets] == [Status.ABORTED] * 2
    s.assert_only(0, DATA[:0])
    s.assert_at_rest()


@given(
    rows=st.lists(st.tuples(st.integers(0, 6000), st.integers(1, 1500)), min_size=1, max_size=16),
    results=st.lists(
        st.one_of(
            st.just(READ_ALL),
            st.tuples(st.just(readers.READ), st.integers(0, 4096)),
            st.tuples(st.just(readers.FAIL), st.sampled_from([errno.EIO, errno.EINTR])),
        ),
        max_size=12,
    ),
    buffers=st.integers(1, 6),
    size=st.integers(0, 7500),
)
def test_whatever_the_reads_bring_each_gets_its_bytes_or_its_status(
    rows: list[tuple[int, int]], results: list[Any], buffers: int, size: int
) -> None:
    s = Stepper(
        DATA[:size],
        [*results, READ_ALL],
        buffers=buffers,
        capacity=16,
        merge_bytes=BUFFER,
        must_be_direct=True,
    )
    try:
        offsets = np.cumsum([0, *(n for _, n in rows)]).tolist()
        tickets = [s.post(a, a + n, o) for (a, n), o in zip(rows, offsets, strict=False)]
        s.run()
        broken = sum(what == readers.FAIL and v == errno.EIO for what, v in results)
        failed = 0
        for ticket, (start, n), offset in zip(tickets, rows, offsets, strict=False):
            status = s.status(ticket)
            if status == Status.OK:
                assert start + n <= size
                assert (s.bytes[offset : offset + n] == DATA[start : start + n]).all()
            elif status == Status.READ_FAILED:
                failed += 1
            else:
                # A script that brings nothing looks like the end of a file, too.
                assert status == Status.END_OF_FILE
                assert start + n > size or any(what == readers.READ for what, _ in results)
        assert failed <= broken
        s.assert_at_rest()
    finally:
        s.close()


def test_rows_of_a_real_file_come_right_however_they_are_read(
    mode: Any, make_loader: Callable[..., gpuq.Loader], tmp_path: Path
) -> None:
    path = tmp_path / "rows"
    DATA.tofile(path)
    rows, row_bytes = 190, 100
    loader = make_loader(
        reader=mode.reader, direct=mode.direct, slots=256, staging_buffers=64, merge_bytes=65536
    )
    source = loader.open(path)
    array = np.zeros(rows * row_bytes, np.uint8)
    destination = loader.register(array)
    order = np.random.default_rng(3).permutation(rows)
    q = loader.queue
    tickets = [
        Compiled.post_at(
            q, source.handle, destination.handle, int(row) * row_bytes, int(row) * row_bytes,
            (int(row) + 1) * row_bytes, 0,
        )
        for row in order
    ]  # fmt: skip
    assert [Compiled.wait(q, ticket) for ticket in tickets] == [Status.OK] * rows
    np.testing.assert_array_equal(array, DATA[: rows * row_bytes])
    statistics = loader.statistics()
    assert statistics.reads + statistics.merged >= rows

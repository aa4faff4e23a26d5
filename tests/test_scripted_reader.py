"""The poller step by step: reads that end in a chosen order, short, or with an errno.

Nothing here runs in a second thread. Each test posts, lets the poller do single passes, and looks.
"""

from __future__ import annotations

import errno
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepping import ALIGNMENT, BUFFER, DATA, DIRECT_NUMBER, Stepper

import gpuq
from gpuq.host import records, tables
from gpuq.layout import Status
from gpuq.testing import copiers, readers
from gpuq.testing.readers import FAIL, READ

WHOLE = (READ, -1)


def assert_reads_keep_the_rules(s: Stepper) -> None:
    """Direct reads are aligned in file, memory and length; no read leaves its lease's buffer."""
    size = s.staging.buffer_bytes
    for entry in s.log():
        base = s.staging_address + entry[readers.LEASE] * size
        assert base <= entry[readers.ADDRESS]
        assert entry[readers.ADDRESS] + entry[readers.NBYTES] <= base + size
        assert entry[readers.NBYTES] > 0
        if entry[readers.DESCRIPTOR] == DIRECT_NUMBER:
            assert entry[readers.OFFSET] % ALIGNMENT == 0
            assert entry[readers.ADDRESS] % ALIGNMENT == 0
            assert entry[readers.NBYTES] % ALIGNMENT == 0


# --- order -------------------------------------------------------------------------------------


@given(order=st.permutations(range(5)), start=st.integers(0, 700))
def test_pieces_may_arrive_in_any_order(order: list[int], start: int) -> None:
    s = Stepper(DATA, buffers=6)
    try:
        ticket = s.post(start, start + 4 * BUFFER + 100, offset=9)
        s.reader.words[readers.ORDER] = readers.BY_LIST
        s.reader.order[:5] = order
        s.step()
        assert len(s.log()) == 5
        for arrived in range(5):
            assert s.status(ticket) == Status.PENDING
            s.reader.words[readers.LISTED] = arrived + 1
            s.step()
        assert s.status(ticket) == Status.OK
        assert list(s.log()[order, readers.RANK]) == [1, 2, 3, 4, 5]
        s.assert_only(9, DATA[start : start + 4 * BUFFER + 100])
        s.assert_at_rest()
    finally:
        s.close()


@pytest.mark.parametrize("order", [readers.OLDEST_FIRST, readers.NEWEST_FIRST])
def test_requests_are_answered_in_the_order_of_their_reads(stepper: Any, order: int) -> None:
    s = stepper(DATA)
    s.reader.words[readers.ORDER] = order
    s.reader.words[readers.GATE] = 1
    tickets = [s.post(1000 * i, 1000 * i + 10, offset=10 * i) for i in range(4)]
    s.step()
    assert [s.status(t) for t in tickets] == [Status.PENDING] * 4
    s.reader.words[readers.GATE] = 0
    s.run()
    assert [s.consume(t) for t in tickets] == [Status.OK] * 4
    ranks = list(s.log()[:, readers.RANK])
    assert ranks == ([1, 2, 3, 4] if order == readers.OLDEST_FIRST else [4, 3, 2, 1])
    s.assert_only(0, np.concatenate([DATA[1000 * i : 1000 * i + 10] for i in range(4)]))


def test_a_small_request_does_not_wait_for_a_large_one(stepper: Any) -> None:
    s = stepper(DATA, buffers=2)
    s.reader.words[readers.ORDER] = readers.BY_LIST
    s.reader.order[:3] = [0, 1, 2]
    large = s.post(0, 4 * BUFFER)
    small = s.post(0, 10, offset=5 * BUFFER)
    s.step()
    # Two leases: one piece of each, although the large request came first.
    assert list(s.log()[:, readers.NBYTES]) == [BUFFER, ALIGNMENT]
    s.reader.order[0] = 1
    s.reader.words[readers.LISTED] = 1
    s.step()
    assert (s.status(small), s.status(large)) == (Status.OK, Status.PENDING)


def test_more_pieces_than_buffers_take_turns(stepper: Any) -> None:
    s = stepper(DATA, buffers=2)
    tickets = [s.post(3, 3 + 3 * BUFFER, 0), s.post(77, 77 + 4 * BUFFER, 3 * BUFFER)]
    s.run()
    assert [s.consume(t) for t in tickets] == [Status.OK] * 2
    s.assert_only(0, np.concatenate([DATA[3 : 3 + 3 * BUFFER], DATA[77 : 77 + 4 * BUFFER]]))
    s.assert_at_rest()
    assert s.poller.statistics[records.STATISTICS_HIGH_WATER] == 2


# --- short reads -------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("start", "end"), [(0, 1100), (700, 1531), (511, 513), (512, 1024)])
def test_a_short_read_of_every_length_is_read_on(
    stepper: Any, direct: bool, start: int, end: int
) -> None:
    alignment = ALIGNMENT if direct else 1
    span = start - start % alignment
    need = end - span
    for got in range(0, need + 1, 1 if need < 300 else 7):
        s = stepper(DATA, [(READ, got), WHOLE], direct=direct)
        ticket = s.post(start, end, 5)
        s.run()
        if got == 0:
            # No progress on the first read: the file ends here, and nothing was copied.
            assert s.flag(ticket) == (Status.END_OF_FILE, 0)
            s.assert_only(0, [])
        else:
            assert s.flag(ticket) == (Status.OK, 0), got
            s.assert_only(5, DATA[start:end])
        log = s.log()
        assert len(log) == (2 if 0 < got < need else 1)
        if len(log) == 2:
            resumed = span + got - got % alignment
            assert log[1, readers.OFFSET] == resumed
            assert log[1, readers.OFFSET] + log[1, readers.NBYTES] == (
                log[0, readers.OFFSET] + log[0, readers.NBYTES]
            )
        assert_reads_keep_the_rules(s)
        s.assert_at_rest()


def model_of_short_reads(lengths: list[int], need: int, span: int, alignment: int) -> Status:
    """Play the end-of-file rule by hand: each read goes on at the last aligned boundary."""
    filled = 0
    for length in itertools.chain(lengths, itertools.repeat(span)):
        resumed = filled // alignment * alignment
        reached = resumed + min(length, span - resumed)
        if reached >= need:
            return Status.OK
        if reached <= filled:
            return Status.END_OF_FILE
        filled = reached
    raise AssertionError("unreachable")


@given(
    lengths=st.lists(st.integers(0, 1200), max_size=8),
    start=st.integers(0, 600),
    size=st.integers(1, 1500),
    direct=st.booleans(),
)
def test_any_run_of_short_reads_ends_right(
    lengths: list[int], start: int, size: int, direct: bool
) -> None:
    alignment = ALIGNMENT if direct else 1
    begin = start - start % alignment
    need = start + size - begin
    span = -(-need // alignment) * alignment
    s = Stepper(DATA, [*((READ, n) for n in lengths), WHOLE], direct=direct)
    try:
        ticket = s.post(start, start + size, 3)
        s.run()
        expected = model_of_short_reads(lengths, need, span, alignment)
        assert s.status(ticket) == expected
        s.assert_only(3, DATA[start : start + size] if expected == Status.OK else [])
        assert_reads_keep_the_rules(s)
        s.assert_at_rest()
    finally:
        s.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_in_the_last_block(stepper: Any, direct: bool) -> None:
    for end in range(1025, 1537, 73):
        s = stepper(DATA[:end], direct=direct)
        whole, beyond = s.post(1000, end), s.post(1000, end + 1, 1000)
        s.run()
        assert (s.status(whole), s.status(beyond)) == (Status.OK, Status.END_OF_FILE)
        s.assert_only(0, DATA[1000:end])
        s.assert_at_rest()


def test_a_file_that_shrinks_between_two_pieces_is_end_of_file(stepper: Any) -> None:
    # The size was asked for and was enough; then a read of the second piece finds less.
    s = stepper(DATA, [WHOLE, (READ, 0), WHOLE])
    ticket = s.post(0, 2 * BUFFER)
    s.run()
    assert s.status(ticket) == Status.END_OF_FILE
    s.assert_at_rest()


def test_many_pieces_beyond_the_end_read_and_copy_nothing(stepper: Any) -> None:
    s = stepper(DATA, size=3 * BUFFER)
    ticket = s.post(0, 3 * BUFFER + 1)
    s.run()
    assert s.status(ticket) == Status.END_OF_FILE
    assert len(s.log()) == 0
    s.assert_only(0, [])
    s.assert_at_rest()


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("times", [1, 2, 17, 500])
def test_an_interrupted_read_is_done_again(stepper: Any, number: int, times: int) -> None:
    s = stepper(DATA, [*[(FAIL, number)] * times, WHOLE])
    ticket = s.post(100, 200)
    s.run()
    assert s.status(ticket) == Status.OK
    s.assert_only(0, DATA[100:200])
    assert len(s.log()) == times + 1
    assert len({tuple(row[1:5]) for row in s.log().tolist()}) == 1
    assert s.poller.statistics[records.STATISTICS_RETRIES] == times


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_a_read_that_is_interrupted_for_ever_fails(stepper: Any, number: int) -> None:
    s = stepper(DATA, [(FAIL, number)])
    ticket = s.post(100, 200)
    s.run()
    assert s.flag(ticket) == (Status.READ_FAILED, number)
    s.assert_only(0, [])
    s.assert_at_rest()


def test_interruptions_between_progress_are_counted_anew(stepper: Any) -> None:
    # 600 of them twice are more than the bound, but bytes arrived in between.
    script = [*[(FAIL, errno.EINTR)] * 600, (READ, 600), *[(FAIL, errno.EAGAIN)] * 600, WHOLE]
    s = stepper(DATA, script)
    ticket = s.post(0, 1000)
    s.run()
    assert s.status(ticket) == Status.OK
    s.assert_only(0, DATA[:1000])


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADF, errno.ENXIO, errno.ESTALE, 255])
def test_an_errno_reaches_the_kernel_and_the_poller_goes_on(stepper: Any, number: int) -> None:
    s = stepper(DATA, [(FAIL, number), WHOLE])
    bad = s.post(0, 100)
    s.run()
    assert s.flag(bad) == (Status.READ_FAILED, number)
    assert gpuq.errno_of(s.queue, bad) == number
    s.assert_only(0, [])
    assert s.poller.statistics[records.STATISTICS_LAST_ERRNO] == number
    good = s.post(0, 100)
    s.run()
    assert s.flag(good) == (Status.OK, 0)
    s.assert_at_rest()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_piece_fails_its_request_after_the_others_are_in(
    stepper: Any, failing: int
) -> None:
    script = [WHOLE, WHOLE, WHOLE]
    script[failing] = (FAIL, errno.EIO)
    s = stepper(DATA, script)
    s.reader.words[readers.ORDER] = readers.BY_LIST
    others = [i for i in range(3) if i != failing]
    s.reader.order[:3] = [failing, *others]
    ticket = s.post(0, 3 * BUFFER)
    s.step()
    for answered in (1, 2):
        s.reader.words[readers.LISTED] = answered
        s.step()
        # Reads of this request are in flight, so it is not answered yet.
        assert s.status(ticket) == Status.PENDING
    s.reader.words[readers.LISTED] = 3
    s.step()
    assert s.flag(ticket) == (Status.READ_FAILED, errno.EIO)
    s.assert_only(0, [])
    s.assert_at_rest()


def test_the_first_failure_is_the_one_that_counts(stepper: Any) -> None:
    s = stepper(DATA, [(FAIL, errno.EIO), (FAIL, errno.ENXIO), WHOLE])
    ticket = s.post(0, 2 * BUFFER)
    s.run()
    assert s.flag(ticket) == (Status.READ_FAILED, errno.EIO)


def test_a_copy_that_fails_after_a_read_did_does_not_count(stepper: Any) -> None:
    script = [WHOLE, (FAIL, errno.EIO), WHOLE]
    s = stepper(DATA, script, copies=[copiers.LATE_FAILURE])
    ticket = s.post(0, 2 * BUFFER)
    s.run()
    assert s.status(ticket) == Status.PENDING, "its copy is under way"
    s.copier.ends[:] = 1
    s.run()
    assert s.flag(ticket) == (Status.READ_FAILED, errno.EIO)
    s.assert_at_rest()


def test_a_failed_request_with_pieces_left_to_issue_is_answered_once(stepper: Any) -> None:
    # Five pieces, two leases: it fails while it still stands in the ring of requests to issue.
    s = stepper(DATA, [(FAIL, errno.EIO), WHOLE], buffers=2, capacity=2)
    bad = s.post(0, 4 * BUFFER + 1)
    s.run()
    assert s.flag(bad) == (Status.READ_FAILED, errno.EIO)
    assert len(s.log()) <= 3
    s.assert_at_rest()
    s.consume(bad)
    tickets = [s.post(0, 10), s.post(0, 2 * BUFFER)]
    s.run()
    assert [s.consume(t) for t in tickets] == [Status.OK, Status.OK]
    s.assert_at_rest()


# --- O_DIRECT refused at the read ------------------------------------------------------------


def test_einval_of_a_direct_read_falls_back_to_buffered(stepper: Any) -> None:
    s = stepper(DATA, [(FAIL, errno.EINVAL), WHOLE])
    first = s.post(100, 200)
    s.run()
    second = s.post(300, 400, 100)
    s.run()
    assert (s.status(first), s.status(second)) == (Status.OK, Status.OK)
    s.assert_only(0, np.concatenate([DATA[100:200], DATA[300:400]]))
    # What never took a direct read is not asked for one again.
    assert list(s.log()[:, readers.DESCRIPTOR]) == [DIRECT_NUMBER, s.buffered, s.buffered]
    assert s.sources.word(s.source, tables.IS_DIRECT) == 0
    assert s.sources.word(s.source, tables.FALLBACK_ERRNO) == errno.EINVAL
    assert s.poller.statistics[records.STATISTICS_FALLBACKS] == 1


def test_einval_of_one_read_of_a_proven_source_leaves_the_others_direct(stepper: Any) -> None:
    s = stepper(DATA, [WHOLE, (FAIL, errno.EINVAL), WHOLE])
    for i in range(3):
        s.post(100 * i, 100 * i + 50, 50 * i)
        s.run()
    assert list(s.log()[:, readers.DESCRIPTOR]) == [
        DIRECT_NUMBER, DIRECT_NUMBER, s.buffered, DIRECT_NUMBER,
    ]  # fmt: skip
    s.assert_only(0, np.concatenate([DATA[100 * i : 100 * i + 50] for i in range(3)]))


def test_einval_of_many_direct_reads_in_flight(stepper: Any) -> None:
    s = stepper(DATA, [*[(FAIL, errno.EINVAL)] * 4, WHOLE], buffers=5)
    ticket = s.post(5, 5 + 3 * BUFFER + 700)
    s.run()
    assert s.status(ticket) == Status.OK
    s.assert_only(0, DATA[5 : 5 + 3 * BUFFER + 700])
    assert s.poller.statistics[records.STATISTICS_FALLBACKS] == 4
    s.assert_at_rest()


def test_einval_after_a_short_direct_read_reads_the_span_again(stepper: Any) -> None:
    s = stepper(DATA, [(READ, 600), (FAIL, errno.EINVAL), WHOLE])
    ticket = s.post(100, 1200)
    s.run()
    assert s.status(ticket) == Status.OK
    s.assert_only(0, DATA[100:1200])
    assert s.log()[2, readers.OFFSET] == s.log()[0, readers.OFFSET]


def test_the_buffered_read_after_einval_may_be_shorter_than_the_direct_one_was(
    stepper: Any,
) -> None:
    # What the direct read brought does not count: 300 bytes are progress, not the end of the file.
    s = stepper(DATA, [(READ, 600), (FAIL, errno.EINVAL), (READ, 300), WHOLE])
    ticket = s.post(100, 1200)
    s.run()
    assert s.status(ticket) == Status.OK
    s.assert_only(0, DATA[100:1200])


def test_einval_of_a_buffered_read_is_a_failed_read(stepper: Any) -> None:
    s = stepper(DATA, [(FAIL, errno.EINVAL)])
    ticket = s.post(100, 200)
    s.run()
    assert s.flag(ticket) == (Status.READ_FAILED, errno.EINVAL)
    assert len(s.log()) == 2
    s.assert_at_rest()


def test_einval_where_direct_is_required_is_a_failed_read(stepper: Any) -> None:
    s = stepper(DATA, [(FAIL, errno.EINVAL), WHOLE], must_be_direct=True)
    ticket = s.post(100, 200)
    s.run()
    assert s.flag(ticket) == (Status.READ_FAILED, errno.EINVAL)
    assert s.sources.word(s.source, tables.IS_DIRECT) == 1
    assert list(s.log()[:, readers.DESCRIPTOR]) == [DIRECT_NUMBER]


def test_a_large_request_leaves_a_lease_to_a_small_one(stepper: Any) -> None:
    s = stepper(DATA, buffers=4)
    s.reader.words[readers.GATE] = 1
    large = s.post(0, 4 * BUFFER)
    s.step()
    small = s.post(17_000, 17_100, 5 * BUFFER)
    s.step()
    offsets = [int(offset) for offset in s.log()[:, readers.OFFSET]]
    assert offsets == [0, BUFFER, 2 * BUFFER, 16_896]
    s.reader.words[readers.GATE] = 0
    s.run()
    assert [s.status(ticket) for ticket in (large, small)] == [Status.OK] * 2
    assert (s.bytes[5 * BUFFER : 5 * BUFFER + 100] == DATA[17_000:17_100]).all()
    s.assert_at_rest()

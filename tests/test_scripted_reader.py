"""The poller step by step: reads and copies that end in a chosen order, short, or with an errno.

Nothing here runs in a second thread. Each test posts, lets the poller do single passes, and looks.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepping import ALIGNMENT, DIRECT_NUMBER, Stepper

import gpuq
from gpuq.host import poller as serving
from gpuq.host import tables
from gpuq.layout import STATE, SUBMISSION_WORDS, State, Status
from gpuq.testing import copiers, readers
from gpuq.testing.readers import FAIL, READ

DATA = np.random.default_rng(7).integers(0, 256, 20_011, dtype=np.uint8)
BUFFER = 4096
WHOLE = (READ, -1)


@pytest.fixture
def stepper() -> Iterator[Callable[..., Stepper]]:
    made = []

    def make(*arguments: Any, **given: Any) -> Stepper:
        made.append(Stepper(*arguments, **given))
        return made[-1]

    yield make
    for one in made:
        one.close()


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
    s = Stepper(DATA, buffers=5)
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
    assert s.poller.statistics[serving.STATISTICS_HIGH_WATER] == 2


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
    assert s.poller.statistics[serving.STATISTICS_RETRIES] == times


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
    assert s.poller.statistics[serving.STATISTICS_LAST_ERRNO] == number
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
    assert s.poller.statistics[serving.STATISTICS_FALLBACKS] == 1


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
    s = stepper(DATA, [*[(FAIL, errno.EINVAL)] * 4, WHOLE])
    ticket = s.post(5, 5 + 3 * BUFFER + 700)
    s.run()
    assert s.status(ticket) == Status.OK
    s.assert_only(0, DATA[5 : 5 + 3 * BUFFER + 700])
    assert s.poller.statistics[serving.STATISTICS_FALLBACKS] == 4
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


# --- copies ------------------------------------------------------------------------------------


def test_a_request_is_answered_when_its_last_copy_was_seen_complete(stepper: Any) -> None:
    s = stepper(DATA, copies=[copiers.LATE])
    ticket = s.post(0, 3 * BUFFER)
    s.run()
    leases = list(s.log()[:, readers.LEASE])
    assert len(set(leases)) == 3
    for lease in reversed(leases):
        assert s.status(ticket) == Status.PENDING
        s.copier.ends[lease] = 1
        s.run()
    assert s.status(ticket) == Status.OK
    s.assert_only(0, DATA[: 3 * BUFFER])
    s.assert_at_rest()


def test_a_buffer_is_not_read_into_while_its_own_copy_is_under_way(stepper: Any) -> None:
    # DALI 6623: the end of one copy must not free the buffer of another.
    s = stepper(DATA, copies=[copiers.LATE, copiers.LATE, copiers.AT_ONCE], buffers=2)
    slow = s.post(0, 100)
    fast = s.post(1000, 1100, 100)
    third = s.post(2000, 2100, 200)
    s.run()
    slow_lease, fast_lease = s.log()[:, readers.LEASE]
    assert len(s.log()) == 2, "both leases are held by copies"
    s.copier.ends[fast_lease] = 1
    s.run()
    assert s.log()[2, readers.LEASE] == fast_lease
    assert [s.status(t) for t in (slow, fast, third)] == [Status.PENDING, Status.OK, Status.OK]
    s.copier.ends[slow_lease] = 1
    s.run()
    assert s.status(slow) == Status.OK
    s.assert_only(0, np.concatenate([DATA[0:100], DATA[1000:1100], DATA[2000:2100]]))
    s.assert_at_rest()


@given(
    sizes=st.lists(st.integers(1, 3 * BUFFER), min_size=1, max_size=6),
    choices=st.lists(st.integers(0, 3), min_size=40, max_size=40),
)
def test_late_copies_in_any_order_bring_the_right_bytes(
    sizes: list[int], choices: list[int]
) -> None:
    s = Stepper(DATA, copies=[copiers.LATE], buffers=3)
    try:
        offsets = np.cumsum([0, *sizes]).tolist()
        starts = [(37 * i) % 5000 for i in range(len(sizes))]
        tickets = [
            s.post(a, a + n, o) for a, n, o in zip(starts, sizes, offsets, strict=False)
        ]
        picks = iter(choices * 10)
        for _ in range(400):
            s.run()
            copying = s.poller.copying[: s.poller.cursor[serving.COPIES]]
            if len(copying) == 0:
                break
            s.copier.ends[copying[next(picks) % len(copying)]] = 1
        assert [s.status(t) for t in tickets] == [Status.OK] * len(sizes)
        s.assert_only(
            0, np.concatenate([DATA[a : a + n] for a, n in zip(starts, sizes, strict=True)])
        )
        s.assert_at_rest()
    finally:
        s.close()


@pytest.mark.parametrize("how", [copiers.REFUSED, copiers.LATE_FAILURE])
def test_a_failed_copy_fails_its_request_only(stepper: Any, how: int) -> None:
    s = stepper(DATA, copies=[how, copiers.AT_ONCE])
    bad = s.post(0, 100)
    s.run()
    s.copier.ends[:] = 1
    s.run()
    s.copier.ends[:] = 0
    good = s.post(0, 100)
    s.run()
    assert (s.status(bad), s.status(good)) == (Status.COPY_FAILED, Status.OK)
    s.assert_at_rest()


@pytest.mark.parametrize("how", [copiers.UNCERTAIN, copiers.LATE_UNCERTAIN])
def test_a_copy_that_cannot_be_seen_to_end_costs_its_buffer_and_the_queue(
    stepper: Any, how: int
) -> None:
    s = stepper(DATA, copies=[how])
    ticket = s.post(0, 100)
    s.step()
    s.step()
    lease = s.log()[0, readers.LEASE]
    s.copier.ends[:] = 1
    s.step()
    assert s.queue.control[STATE] == State.ABORTED
    # It is never answered by the poller, for its bytes may still be moving.
    assert s.status(ticket) == Status.PENDING
    assert gpuq.wait(s.queue, ticket) == Status.ABORTED
    assert serving.serve(s.poller) == errno.EIO
    assert lease not in s.staging.free[: s.free_leases]
    assert s.poller.statistics[serving.STATISTICS_QUARANTINED] == 1
    assert s.destinations.in_flight(s.destination) == 1


# --- admission -----------------------------------------------------------------------------


def test_a_claimed_ticket_that_is_never_published_holds_up_its_slot_only(stepper: Any) -> None:
    from gpuq.kernels.queue import claim

    s = stepper(DATA, capacity=4)
    lost = claim(s.queue)
    assert lost == 0
    for lap in range(5):
        tickets = []
        while (ticket := gpuq.try_post(s.queue, s.source, s.destination, 0, 50, 0)) >= 0:
            tickets.append(ticket)
        assert len(tickets) == (3 if lap == 0 else 0)
        for _ in range(4):
            s.step()
        assert [s.consume(t) for t in tickets] == [Status.OK] * len(tickets)
    # The slot of the lost ticket is the next to be claimed, and the wait for it is bounded.
    assert gpuq.try_post(s.queue, s.source, s.destination, 0, 50, 0) == -Status.NO_SLOT


def test_submissions_published_out_of_order_are_all_admitted(stepper: Any) -> None:
    from gpuq.kernels.queue import claim, publish

    s = stepper(DATA, capacity=8)
    for _ in range(3):
        tickets = [int(claim(s.queue)) for _ in range(8)]
        for ticket in reversed(tickets):
            publish(s.queue, ticket, s.source, s.destination, 10 * (ticket % 8), 100, 110, 0)
            s.run()
        assert [s.consume(t) for t in tickets] == [Status.OK] * 8
        assert s.poller.cursor[serving.HEAD] == tickets[-1] + 1
    s.assert_only(0, np.tile(DATA[100:110], 8))


@pytest.mark.parametrize("word", range(SUBMISSION_WORDS))
@pytest.mark.parametrize("value", [0, 1, 5000, (1 << 64) - 1])
def test_what_a_kernel_rewrites_after_admission_changes_nothing(
    stepper: Any, word: int, value: int
) -> None:
    # One buffer and three pieces: two are issued after the words were rewritten.
    s = stepper(DATA, capacity=2, buffers=1)
    s.reader.words[readers.GATE] = 1
    ticket = s.post(100, 100 + 2 * BUFFER + 9, 10)
    s.step()
    s.queue.submissions[ticket % 2 * SUBMISSION_WORDS + word] = value
    s.step()
    s.reader.words[readers.GATE] = 0
    s.run()
    assert s.status(ticket) == Status.OK
    s.assert_only(10, DATA[100 : 100 + 2 * BUFFER + 9])


@pytest.mark.parametrize("capacity", [1, 2, 8])
def test_only_the_awaited_sequence_is_admitted(stepper: Any, capacity: int) -> None:
    s = stepper(DATA, capacity=capacity)
    words = s.queue.submissions
    for wrong in (0, capacity + 1, 2, (1 << 64) - 1, 1 << 63, 1 << 47):
        words[0] = wrong
        for _ in range(3):
            assert s.step() == 0
    words[0] = 0
    ticket = s.post(0, 10)
    s.run()
    assert s.status(ticket) == Status.OK
    # The same submission published again is not served again.
    admitted = s.poller.statistics[Status.OK]
    words[0] = ticket + 1
    s.run()
    assert s.poller.statistics[Status.OK] == admitted


def test_a_submission_for_a_slot_in_use_waits_for_the_answer(stepper: Any) -> None:
    # A kernel that breaks the protocol publishes the next lap before it has its answer.
    s = stepper(DATA, capacity=1)
    s.reader.words[readers.GATE] = 1
    ticket = s.post(0, 10)
    s.step()
    s.queue.submissions[0] = ticket + 2
    for _ in range(3):
        s.step()
    assert s.poller.cursor[serving.REQUESTS] == 1
    s.reader.words[readers.GATE] = 0
    s.run()
    assert s.poller.statistics[Status.OK] == 2
    s.assert_at_rest()


WORD = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.integers(-5000, -1).map(lambda n: n + (1 << 64)),
    st.sampled_from([1 << 62, (1 << 63) - 1, 1 << 63, 1 << 32, (1 << 64) - 1]),
)
HANDLE = st.one_of(st.just(-1), st.just(-1), WORD, st.integers(0, 5))
# Near the size of the data and of the destination, mostly.
NUMBER = st.one_of(st.integers(0, 20_100), st.integers(65_000, 66_000), st.just(0), WORD)


@given(
    rows=st.lists(
        st.tuples(HANDLE, HANDLE, NUMBER, NUMBER, NUMBER, WORD, st.one_of(st.just(0), WORD)),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_stands_in_the_queue_the_host_stays_within_bounds(rows: list[Any]) -> None:
    """Random words; -1 stands for the right handle, so that the checks behind it are reached."""
    s = Stepper(DATA, size=1 << 50)
    try:
        for ticket, row in enumerate(rows):
            source = s.source if row[0] == -1 else row[0]
            destination = s.destination if row[1] == -1 else row[1]
            base = ticket * SUBMISSION_WORDS
            s.queue.submissions[base + 1 : base + 8] = [source, destination, *row[2:]]
            s.queue.submissions[base] = ticket + 1
        s.queue.tail[0] = len(rows)
        s.run()
        for ticket in range(len(rows)):
            assert s.status(ticket) != Status.PENDING
            s.consume(ticket)
        assert (s.room[:64] == 0xEE).all()
        assert (s.room[-64:] == 0xEE).all()
        good = s.post(100, 200)
        s.run()
        assert s.status(good) == Status.OK
        np.testing.assert_array_equal(s.bytes[:100], DATA[100:200])
        s.assert_at_rest()
    finally:
        s.close()


def test_a_retracted_source_is_refused_and_the_admitted_request_finishes(stepper: Any) -> None:
    s = stepper(DATA)
    s.reader.words[readers.GATE] = 1
    first = s.post(0, 2 * BUFFER + 1)
    s.step()
    s.sources.retract(s.source)
    second = s.post(0, 10)
    s.step()
    assert (s.status(first), s.status(second)) == (Status.PENDING, Status.BAD_SOURCE)
    assert s.sources.in_flight(s.source) == 1
    s.reader.words[readers.GATE] = 0
    s.run()
    assert s.status(first) == Status.OK
    s.assert_at_rest()


# --- the end -------------------------------------------------------------------------------


def test_serve_drains_what_was_posted_and_then_closes(stepper: Any) -> None:
    s = stepper(DATA, buffers=2)
    tickets = [s.post(i, i + 2 * BUFFER, 10) for i in range(8)]
    serving.raise_state(s.queue.control, int(State.CLOSING))
    assert serving.serve(s.poller) == 0
    assert s.queue.control[STATE] == State.CLOSED
    assert [s.consume(t) for t in tickets] == [Status.OK] * 8
    late = s.post(0, 1)
    assert gpuq.wait(s.queue, late) == Status.ABORTED
    assert gpuq.poll(s.queue, late) == Status.ABORTED


def test_an_aborted_queue_issues_nothing_and_waits_for_reads_in_flight(stepper: Any) -> None:
    s = stepper(DATA, buffers=2)
    s.reader.words[readers.GATE] = 1
    large, posted = s.post(0, 4 * BUFFER), s.post(0, 10)
    s.step()
    assert len(s.log()) == 2
    serving.raise_state(s.queue.control, int(State.ABORTED))
    later = s.post(0, 10)
    # The kernel is released now, while reads are in flight.
    assert [gpuq.wait(s.queue, t) for t in (large, posted, later)] == [Status.ABORTED] * 3
    s.step()
    assert s.poller.cursor[serving.READS] == 2
    s.reader.words[readers.GATE] = 0
    assert serving.serve(s.poller) == 0
    assert s.poller.cursor[serving.READS] == 0
    assert len(s.log()) == 2
    s.assert_only(0, [])
    assert s.free_leases == 2


def test_an_answer_before_the_abort_is_still_an_answer(stepper: Any) -> None:
    s = stepper(DATA)
    ticket = s.post(0, 10)
    s.run()
    serving.raise_state(s.queue.control, int(State.ABORTED))
    assert gpuq.wait(s.queue, ticket) == Status.OK


def test_a_flush_that_fails_aborts_the_queue(stepper: Any) -> None:
    s = stepper(DATA)
    s.reader.words[readers.FLUSH_ERRNO] = errno.EBADF
    ticket = s.post(0, 10)
    assert serving.serve(s.poller) == errno.EBADF
    assert s.queue.control[STATE] == State.ABORTED
    assert s.poller.cursor[serving.READS] == 1
    assert gpuq.wait(s.queue, ticket) == Status.ABORTED
    # The lease of the read that may still happen is not free.
    assert s.free_leases == 3


def test_an_exception_in_a_reader_leaves_serve(stepper: Any) -> None:
    s = stepper(DATA, [(readers.RAISE, 0)])
    s.post(0, 10)
    with pytest.raises(RuntimeError, match="the script says so"):
        serving.serve(s.poller)


def test_states_only_rise() -> None:
    control = np.zeros(16, dtype=np.uint64)
    for state in (State.RUNNING, State.CLOSING, State.ABORTED, State.CLOSED, State.RUNNING):
        before = control[STATE]
        serving.raise_state(control, int(state))
        assert control[STATE] == max(int(before), state)

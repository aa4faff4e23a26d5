"""The poller step by step: what is admitted, whatever a kernel writes, and how serving ends."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepping import BUFFER, DATA, Stepper

import gpuq
from gpuq.host import poller as serving
from gpuq.host import records
from gpuq.layout import STATE, SUBMISSION_WORDS, State, Status
from gpuq.testing import readers

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
        assert s.poller.cursor[records.HEAD] == tickets[-1] + 1
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
    assert s.poller.cursor[records.REQUESTS] == 1
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
    records.raise_state(s.queue.control, int(State.CLOSING))
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
    records.raise_state(s.queue.control, int(State.ABORTED))
    later = s.post(0, 10)
    # The kernel is released now, while reads are in flight.
    assert [gpuq.wait(s.queue, t) for t in (large, posted, later)] == [Status.ABORTED] * 3
    s.step()
    assert s.poller.cursor[records.READS] == 2
    s.reader.words[readers.GATE] = 0
    assert serving.serve(s.poller) == 0
    assert s.poller.cursor[records.READS] == 0
    assert len(s.log()) == 2
    s.assert_only(0, [])
    assert s.free_leases == 2


def test_an_answer_before_the_abort_is_still_an_answer(stepper: Any) -> None:
    s = stepper(DATA)
    ticket = s.post(0, 10)
    s.run()
    records.raise_state(s.queue.control, int(State.ABORTED))
    assert gpuq.wait(s.queue, ticket) == Status.OK


def test_a_flush_that_fails_aborts_the_queue(stepper: Any) -> None:
    s = stepper(DATA)
    s.reader.words[readers.FLUSH_ERRNO] = errno.EBADF
    ticket = s.post(0, 10)
    assert serving.serve(s.poller) == errno.EBADF
    assert s.queue.control[STATE] == State.ABORTED
    assert s.poller.cursor[records.READS] == 1
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
        records.raise_state(control, int(state))
        assert control[STATE] == max(int(before), state)

"""The kernel's half of the protocol over a queue that nobody serves: every status it can give.

The test writes the answers itself, so each step happens when it says. Every test runs the plain
functions, as the simulator does, and the same functions compiled for the CPU.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS
from hypothesis import given
from hypothesis import strategies as st
from kernels import Compiled, Plain, wait_in_steps
from stepping import answer, bare_queue, submission

from gpuq.layout import (
    DESTINATION,
    END,
    MAX_TICKET,
    OFFSET,
    OPTIONS,
    SEQUENCE,
    SOURCE,
    START,
    STATE,
    TAG,
    Queue,
    State,
    Status,
)

SECOND = 1_000_000_000
both = pytest.mark.parametrize("k", [Plain, Compiled], ids=lambda k: k.name)


def start_at(queue: Queue, ticket: int) -> Queue:
    """Let a queue look as if `ticket` requests had been posted and consumed."""
    queue.tail[0] = ticket
    for t in range(ticket, ticket + queue.capacity):
        queue.turns[t & (queue.capacity - 1)] = t
    return queue


def everything(queue: Queue) -> list[Any]:
    return [array.copy() for array in queue if isinstance(array, np.ndarray)]


def assert_untouched(queue: Queue, before: list[Any]) -> None:
    for now, then in zip(everything(queue), before, strict=True):
        np.testing.assert_array_equal(now, then)


# --- post --------------------------------------------------------------------------------------


@both
def test_post_writes_each_word_and_publishes_its_ticket(k: Any) -> None:
    q = bare_queue(4)
    assert k.post_at(q, 11, 22, 33, 44, 55, 66) == 0
    words = submission(q, 0)
    assert words[SEQUENCE] == 1
    assert (words[SOURCE], words[DESTINATION]) == (11, 22)
    assert (words[OFFSET], words[START], words[END]) == (33, 44, 55)
    assert (words[TAG], words[OPTIONS]) == (66, 0)


@both
def test_post_without_an_offset_posts_to_the_begin(k: Any) -> None:
    q = bare_queue(4)
    assert k.post(q, 11, 22, 44, 55, 66) == 0
    assert k.try_post(q, 11, 22, 44, 55, 66) == 1
    for ticket in (0, 1):
        assert submission(q, ticket) == [ticket + 1, 11, 22, 44, 55, 0, 66, 0]


@both
def test_an_all_zero_payload_is_published(k: Any) -> None:
    q = bare_queue(4)
    assert k.post_at(q, 0, 0, 0, 0, 0, 0) == 0
    assert submission(q, 0) == [1, 0, 0, 0, 0, 0, 0, 0]


@both
def test_words_of_64_bits_arrive_whole(k: Any) -> None:
    q = bare_queue(4)
    k.post_at(q, -1, (1 << 63) - 1, -(1 << 63), 1 << 62, -5, -2)
    assert submission(q, 0) == [
        1, (1 << 64) - 1, (1 << 63) - 1, 1 << 62, (1 << 64) - 5, 1 << 63, (1 << 64) - 2, 0,
    ]  # fmt: skip


@both
@pytest.mark.parametrize("capacity", [1, 2, 8])
@pytest.mark.parametrize("first", [0, 5, MAX_TICKET - 100])
def test_tickets_count_up_over_the_laps(k: Any, capacity: int, first: int) -> None:
    q = start_at(bare_queue(capacity), first)
    for ticket in range(first, first + 5 * capacity):
        assert k.post(q, 1, 2, 3, 4, ticket) == ticket
        assert submission(q, ticket)[TAG] == ticket
        assert k.poll(q, ticket) == Status.PENDING
        answer(q, ticket, Status.END_OF_FILE)
        assert k.poll(q, ticket) == Status.END_OF_FILE
        assert k.wait(q, ticket) == Status.END_OF_FILE


@both
def test_a_full_queue_refuses_and_leaves_nothing_behind(k: Any) -> None:
    q = bare_queue(4)
    tickets = [k.post(q, 1, 2, 3, 4, 0) for _ in range(4)]
    before = everything(q)
    for refuse in (k.try_post, k.post):
        assert refuse(q, 9, 9, 9, 9, 9) == -Status.NO_SLOT
    for refuse in (k.try_post_at, k.post_at):
        assert refuse(q, 9, 9, 9, 9, 9, 9) == -Status.NO_SLOT
    assert_untouched(q, before)
    # A later post works, in the slot that came free, and with the next ticket.
    answer(q, tickets[0], Status.OK)
    assert k.try_post(q, 9, 9, 9, 9, 9) == -Status.NO_SLOT, "answered is not free"
    assert k.wait(q, tickets[0]) == Status.OK
    assert k.post(q, 5, 6, 7, 8, 9) == 4
    assert submission(q, 4) == [5, 5, 6, 7, 8, 0, 9, 0]
    assert k.try_post(q, 9, 9, 9, 9, 9) == -Status.NO_SLOT


@both
def test_the_bound_of_post_is_the_queues(k: Any) -> None:
    q = bare_queue(1, post_timeout_ns=2_000_000)
    k.post(q, 1, 2, 3, 4, 0)
    before = everything(q)
    assert k.post(q, 1, 2, 3, 4, 0) == -Status.NO_SLOT
    assert_untouched(q, before)


@both
def test_a_slot_that_is_free_out_of_turn_does_not_help(k: Any) -> None:
    # Slots are taken in ticket order; the slot of the next ticket is the one that must be free.
    q = bare_queue(2)
    first, second = k.post(q, 1, 2, 3, 4, 0), k.post(q, 1, 2, 3, 4, 0)
    answer(q, second, Status.OK)
    assert k.wait(q, second) == Status.OK
    assert k.try_post(q, 1, 2, 3, 4, 0) == -Status.NO_SLOT
    answer(q, first, Status.OK)
    assert k.wait(q, first) == Status.OK
    assert [k.try_post(q, 1, 2, 3, 4, 0) for _ in range(2)] == [2, 3]


@both
def test_one_held_ticket_stops_all_posts_when_the_others_have_gone_round(k: Any) -> None:
    """Why a thread that holds a ticket must not block in `post`, though most slots are free."""
    q = bare_queue(4)
    held = k.post(q, 1, 2, 3, 4, 0)
    answer(q, held, Status.OK)
    for _ in range(3):
        other = k.post(q, 1, 2, 3, 4, 0)
        answer(q, other, Status.OK)
        assert k.wait(q, other) == Status.OK
    assert k.try_post(q, 1, 2, 3, 4, 0) == -Status.NO_SLOT
    assert k.post(q, 1, 2, 3, 4, 0) == -Status.NO_SLOT
    assert k.wait(q, held) == Status.OK
    assert k.post(q, 1, 2, 3, 4, 0) == 4


@pytest.mark.parametrize("state", [s for s in State if s != State.RUNNING])
@both
def test_post_to_a_full_queue_that_ended_is_aborted_at_once(k: Any, state: State) -> None:
    q = bare_queue(2, post_timeout_ns=3600 * SECOND)
    for _ in range(2):
        k.post(q, 1, 2, 3, 4, 0)
    q.control[STATE] = state
    before = everything(q)
    assert k.post(q, 1, 2, 3, 4, 0) == -Status.ABORTED
    assert k.pull(q, 1, 2, 3, 4, 0) == Status.ABORTED
    assert_untouched(q, before)


def test_a_post_that_waits_goes_on_when_a_slot_comes_free() -> None:
    q = bare_queue(1, post_timeout_ns=3600 * SECOND)
    first = Compiled.post(q, 1, 2, 3, 4, 0)
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(Compiled.post(q, 1, 2, 3, 4, 7)))
    thread.start()
    answer(q, first, Status.OK)
    assert Compiled.wait(q, first) == Status.OK
    thread.join(WAIT_SECONDS)
    assert results == [1]
    assert submission(q, 1)[TAG] == 7


def test_a_post_that_waits_is_released_by_an_abort() -> None:
    q = bare_queue(1, post_timeout_ns=3600 * SECOND)
    Compiled.post(q, 1, 2, 3, 4, 0)
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(Compiled.post(q, 1, 2, 3, 4, 7)))
    thread.start()
    q.control[STATE] = State.ABORTED
    thread.join(WAIT_SECONDS)
    assert results == [-Status.ABORTED]


# --- poll and wait -----------------------------------------------------------------------------

ANSWERS = [s for s in Status if s.name not in ("PENDING", "STALE", "TIMED_OUT", "NO_SLOT")]


@both
@pytest.mark.parametrize("status", ANSWERS)
def test_every_answer_of_the_host_comes_through(k: Any, status: Status) -> None:
    q = bare_queue(2)
    ticket = k.post(q, 1, 2, 3, 4, 0)
    assert k.poll(q, ticket) == Status.PENDING
    assert k.errno_of(q, ticket) == 0
    answer(q, ticket, status, errno=77)
    for _ in range(2):
        assert k.poll(q, ticket) == status
        assert k.errno_of(q, ticket) == 77
    assert k.wait(q, ticket) == status


@both
def test_a_ticket_that_was_consumed_is_stale(k: Any) -> None:
    q = bare_queue(2)
    ticket = k.post(q, 1, 2, 3, 4, 0)
    answer(q, ticket, Status.OK)
    assert k.wait(q, ticket) == Status.OK
    before = everything(q)
    assert k.wait(q, ticket) == Status.STALE
    assert k.wait_for(q, ticket, 0) == Status.STALE
    assert k.wait_for(q, ticket, 3600 * SECOND) == Status.STALE
    assert_untouched(q, before)
    # Also while the next lap's request stands in the slot, unanswered and answered.
    k.post(q, 1, 2, 3, 4, 0)
    later = k.post(q, 1, 2, 3, 4, 0)
    assert later == ticket + 2
    assert k.wait(q, ticket) == Status.STALE
    answer(q, later, Status.OK)
    assert k.wait(q, ticket) == Status.STALE
    assert k.poll(q, ticket) == Status.STALE
    assert k.errno_of(q, ticket) == 0
    assert k.wait(q, later) == Status.OK


@both
@pytest.mark.parametrize("garbage", [0, 3, 4, 1000, MAX_TICKET, 1 << 62, (1 << 63) - 1])
def test_a_ticket_that_was_never_given_out_is_stale(k: Any, garbage: int) -> None:
    q = bare_queue(4)
    for posted in (0, 3):
        while q.tail[0] < posted:
            k.post(q, 1, 2, 3, 4, 0)
        if garbage < posted:
            continue
        before = everything(q)
        assert k.poll(q, garbage) == Status.STALE
        assert k.wait(q, garbage) == Status.STALE
        assert k.wait_for(q, garbage, 3600 * SECOND) == Status.STALE
        assert_untouched(q, before)


@both
def test_a_negative_ticket_hands_its_status_back(k: Any) -> None:
    q = bare_queue(2)
    before = everything(q)
    for status in (Status.NO_SLOT, Status.ABORTED):
        assert k.wait(q, -status) == status
        assert k.poll(q, -status) == status
        assert k.wait_for(q, -status, 5) == status
        assert k.errno_of(q, -status) == 0
    assert_untouched(q, before)


@both
@pytest.mark.parametrize("timeout_ns", [0, 1, -1, -(1 << 63), 1_000_000])
def test_a_time_out_leaves_the_ticket_valid(k: Any, timeout_ns: int) -> None:
    q = bare_queue(2)
    ticket = k.post(q, 1, 2, 3, 4, 0)
    before = everything(q)
    for _ in range(2):
        assert k.wait_for(q, ticket, timeout_ns) == Status.TIMED_OUT
    assert_untouched(q, before)
    answer(q, ticket, Status.OK)
    assert k.wait_for(q, ticket, timeout_ns) == Status.OK
    assert k.wait(q, ticket) == Status.STALE


def test_a_time_out_beyond_the_end_of_the_clock_is_not_over_at_once() -> None:
    # now + timeout_ns overflowed a signed word and was in the past.
    q = bare_queue(2)
    ticket = Compiled.post(q, 1, 2, 3, 4, 0)
    timeouts = np.zeros(1, dtype=np.uint64)
    results: list[int] = []
    assert wait_in_steps(q, -Status.NO_SLOT, 1, timeouts) == Status.NO_SLOT, "compiled by now"
    thread = threading.Thread(
        target=lambda: results.append(wait_in_steps(q, ticket, (1 << 63) - 1, timeouts))
    )
    thread.start()
    # It spins; had it timed out, it would count that over and over.
    thread.join(0.1)
    answer(q, ticket, Status.OK)
    thread.join(WAIT_SECONDS)
    assert results == [Status.OK]
    assert timeouts[0] == 0


@both
@pytest.mark.parametrize("state", [State.NEW, State.CLOSED, State.ABORTED])
def test_a_wait_that_nobody_will_answer_is_aborted(k: Any, state: State) -> None:
    q = bare_queue(2)
    ticket = k.post(q, 1, 2, 3, 4, 0)
    q.control[STATE] = state
    assert k.wait(q, ticket) == Status.ABORTED
    assert k.wait_for(q, ticket, 3600 * SECOND) == Status.ABORTED
    assert k.poll(q, ticket) == Status.ABORTED


@both
def test_an_answer_that_came_before_the_end_is_given(k: Any) -> None:
    q = bare_queue(2)
    ticket = k.post(q, 1, 2, 3, 4, 0)
    answer(q, ticket, Status.OK)
    q.control[STATE] = State.ABORTED
    assert k.poll(q, ticket) == Status.OK
    assert k.wait(q, ticket) == Status.OK
    assert k.wait(q, ticket) == Status.STALE


@both
def test_a_closing_queue_still_answers(k: Any) -> None:
    q = bare_queue(2)
    ticket = k.post(q, 1, 2, 3, 4, 0)
    q.control[STATE] = State.CLOSING
    assert k.poll(q, ticket) == Status.PENDING
    assert k.wait_for(q, ticket, 0) == Status.TIMED_OUT
    answer(q, ticket, Status.OK)
    assert k.wait(q, ticket) == Status.OK


def test_a_waiting_thread_is_released_by_an_abort() -> None:
    q = bare_queue(2)
    ticket = Compiled.post(q, 1, 2, 3, 4, 0)
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(Compiled.wait(q, ticket)))
    thread.start()
    q.control[STATE] = State.ABORTED
    thread.join(WAIT_SECONDS)
    assert results == [Status.ABORTED]


@pytest.mark.parametrize("kind", [np.uint64, np.int64, np.int32, np.uint32])
def test_tickets_kept_in_an_array_of_any_integer_type_work(kind: Any) -> None:
    """A kernel that keeps tickets in uint64 words got floats, and STALE for NO_SLOT."""
    q = bare_queue(2)
    ticket = Compiled.post(q, 1, 2, 3, 4, 0)
    for function in (Compiled.poll, Compiled.errno_of):
        assert isinstance(function(q, kind(ticket)), int)
    assert isinstance(Compiled.wait_for(q, kind(ticket), kind(5)), int)
    answer(q, ticket, Status.READ_FAILED, 5)
    assert Compiled.errno_of(q, kind(ticket)) == 5
    assert Compiled.poll(q, kind(ticket)) == Status.READ_FAILED
    status = Compiled.wait(q, kind(ticket))
    assert isinstance(status, int)
    assert status == Status.READ_FAILED
    if np.dtype(kind).itemsize == 8 or np.dtype(kind).kind == "i":
        refused = np.array([-Status.NO_SLOT]).astype(kind)[0]
        assert Compiled.wait(q, refused) == Status.NO_SLOT
        assert Compiled.poll(q, refused) == Status.NO_SLOT
        assert Compiled.wait_for(q, refused, 0) == Status.NO_SLOT


# --- against a model -----------------------------------------------------------------------


@given(
    capacity=st.sampled_from([1, 2, 4]),
    first=st.sampled_from([0, 3, MAX_TICKET - 200]),
    steps=st.lists(
        st.tuples(st.sampled_from(["post", "answer", "wait", "poll", "end"]), st.integers(0, 9)),
        max_size=60,
    ),
    k=st.sampled_from([Plain, Compiled]),
)
def test_any_sequence_of_calls_does_what_a_simple_model_says(
    capacity: int, first: int, steps: list[tuple[str, int]], k: Any
) -> None:
    """The model: a dict of what each ticket is, and the rule for when a slot is free."""
    q = start_at(bare_queue(capacity), first)
    tickets: dict[int, str] = {}
    given_out: list[int] = []
    ended = False
    for action, number in steps:
        pick = given_out[number % len(given_out)] if given_out else first + number
        what = tickets.get(pick, "unknown")
        if action == "post":
            slot_before = first + len(given_out) - capacity
            free = slot_before < first or tickets[slot_before] == "consumed"
            got = k.try_post(q, 1, 2, 3, 4, number)
            assert got == (first + len(given_out) if free else -Status.NO_SLOT)
            if free:
                tickets[got] = "posted"
                given_out.append(got)
        elif action == "answer" and what == "posted":
            answer(q, pick, Status.OK)
            tickets[pick] = "answered"
        elif action == "wait":
            if ended and what == "posted":
                expected = Status.ABORTED
            else:
                expected = {
                    "posted": Status.TIMED_OUT,
                    "answered": Status.OK,
                    "consumed": Status.STALE,
                    "unknown": Status.STALE,
                }[what]
            assert k.wait_for(q, pick, 0) == expected
            if what == "answered":
                tickets[pick] = "consumed"
        elif action == "poll":
            overwritten = any(
                t > pick and (t - pick) % capacity == 0 and tickets[t] != "posted" for t in tickets
            )
            if what == "unknown" or (what == "consumed" and overwritten):
                expected = Status.STALE
            elif what == "posted":
                expected = Status.ABORTED if ended else Status.PENDING
            else:
                expected = Status.OK
            assert k.poll(q, pick) == expected
        elif action == "end" and number == 0:
            q.control[STATE] = State.ABORTED
            ended = True

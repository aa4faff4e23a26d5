"""Counted requests: slots that free themselves, failures in their order, waits that add up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS, until
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import COUNTERS, Stepper, bare_queue
from targets import everywhere, open_loader, run_in_the_simulator

import gpuq
from gpuq.kernels import counters
from gpuq.layout import (
    COUNTED,
    COUNTER_WORDS,
    COUNTS,
    COUNTS_FAILED_MASK,
    COUNTS_SHIFT,
    HISTORY_WORDS,
    LINE_WORDS,
    STATE,
    State,
    Status,
)
from gpuq.testing import readers

COUNTER = 2
OUTCOMES = (Status.OK, Status.BAD_SOURCE, Status.BAD_DESTINATION, Status.BAD_RANGE)


def post_to_get(stepper: Stepper, status: Status, position: int = 0) -> int:
    """Post a counted request that will be answered with a status; read byte `position`."""
    source = 0 if status == Status.BAD_SOURCE else stepper.source
    destination = 0 if status == Status.BAD_DESTINATION else stepper.destination
    start = position + 2 if status == Status.BAD_RANGE else position
    return int(
        gpuq.post_counted_at(
            stepper.queue, COUNTER, source, destination, position, start, position + 1, 0
        )
    )


def answer(stepper: Stepper, *outcomes: Status) -> None:
    """Have requests answered, one behind the other."""
    for outcome in outcomes:
        assert post_to_get(stepper, outcome) == Status.OK
        stepper.run()


def taken(q: gpuq.Queue, counter: int = COUNTER) -> int:
    return int(q.taken[counter * LINE_WORDS]) >> COUNTS_SHIFT


@pytest.fixture
def stepper() -> Iterator[Stepper]:
    made = Stepper(np.arange(256, dtype=np.uint8), capacity=4)
    yield made
    made.close()


# --- slots ---------------------------------------------------------------------------------------

ACTIONS = st.sampled_from(["post", "counted", "counted", "step", "consume"])


@settings(max_examples=150)
@given(
    actions=st.lists(ACTIONS, min_size=20, max_size=80),
    capacity=st.sampled_from([1, 2, 4]),
    which=st.data(),
)
def test_counted_and_waited_requests_share_the_slots(
    actions: list[str], capacity: int, which: Any
) -> None:
    """A slot is free when its answer was consumed, or, of a counted request, when it is there."""
    stepper = Stepper(np.arange(256, dtype=np.uint8), capacity=capacity)
    waited: list[int] = []
    counted: dict[int, int] = {}  # ticket: position of its byte
    answered: set[int] = set()
    consumed: set[int] = set()
    ticket = 0
    for action in actions:
        before = ticket - capacity
        is_free = before < 0 or before in consumed or (before in counted and before in answered)
        if action == "post":
            got = int(gpuq.try_post_at(stepper.queue, stepper.source, stepper.destination,
                                       ticket, ticket, ticket + 1, 0))  # fmt: skip
            assert got == (ticket if is_free else -Status.NO_SLOT)
            if is_free:
                waited.append(ticket)
        elif action == "counted":
            got = post_to_get(stepper, Status.OK, ticket)
            assert got == (Status.OK if is_free else Status.NO_SLOT)
            if is_free:
                counted[ticket] = ticket
        elif action == "step":
            stepper.run()
            answered |= set(waited) | set(counted)
        elif ready := [t for t in waited if t in answered and t not in consumed]:
            chosen = which.draw(st.sampled_from(ready))
            assert stepper.consume(chosen) == Status.OK
            consumed.add(chosen)
        ticket = len(waited) + len(counted)
        assert gpuq.poll_counter(stepper.queue, COUNTER) == len(answered & set(counted))
    stepper.run()
    assert gpuq.wait_counter(stepper.queue, COUNTER, len(counted)) == Status.OK
    stepper.assert_only(0, np.arange(ticket, dtype=np.uint8))
    stepper.close()


def test_a_counted_request_cannot_be_waited_for(stepper: Stepper) -> None:
    """Who guesses its ticket must not free the slot while its answer is on its way."""
    answer(stepper, Status.OK)
    assert gpuq.wait(stepper.queue, 0) == Status.STALE
    assert stepper.queue.turns[0] == COUNTED
    assert post_to_get(stepper, Status.OK) == Status.OK


def test_where_no_slot_comes_free_nothing_is_counted(stepper: Stepper) -> None:
    for _ in range(4):
        stepper.post(0, 1)
    assert post_to_get(stepper, Status.OK) == Status.NO_SLOT
    stepper.run()
    assert gpuq.poll_counter(stepper.queue, COUNTER) == 0
    assert int(stepper.queue.tail[0]) == 4


# --- failures ------------------------------------------------------------------------------------


def first_known(failures: list[Status]) -> Status:
    return failures[-HISTORY_WORDS:][0] if failures else Status.OK


@settings(max_examples=150)
@given(
    groups=st.lists(st.lists(st.sampled_from(OUTCOMES), max_size=9), max_size=8),
    failed=st.sampled_from([0, COUNTS_FAILED_MASK - 3]),
    done=st.sampled_from([0, (1 << 39) - 5, (1 << 40) - 5]),
)
def test_a_wait_for_all_says_the_first_failure(
    groups: list[list[Status]], failed: int, done: int
) -> None:
    """Both counts may be about to wrap around."""
    stepper = Stepper(np.zeros(16, np.uint8), capacity=4)
    words = np.uint64(done << COUNTS_SHIFT | failed)
    stepper.queue.counters[COUNTER * COUNTER_WORDS + COUNTS] = words
    stepper.queue.taken[COUNTER * LINE_WORDS] = words
    for outcomes in groups:
        answer(stepper, *outcomes)
        assert gpuq.poll_counter(stepper.queue, COUNTER) == len(outcomes)
        failures = [outcome for outcome in outcomes if outcome != Status.OK]
        status = gpuq.wait_counter(stepper.queue, COUNTER, len(outcomes))
        assert Status(status) == first_known(failures)
        assert gpuq.poll_counter(stepper.queue, COUNTER) == 0
    stepper.close()


@settings(max_examples=150)
@given(rounds=st.lists(st.tuples(st.lists(st.sampled_from(OUTCOMES), max_size=6),
                                 st.integers(0, 6)), max_size=12))  # fmt: skip
def test_no_wait_says_ok_over_a_missing_slice(rounds: list[tuple[list[Status], int]]) -> None:
    """A wait for fewer than are there reports their failures, and leaves them for the next."""
    stepper = Stepper(np.zeros(16, np.uint8), capacity=4)
    unseen: list[Status] = []
    there = 0
    for outcomes, most in rounds:
        answer(stepper, *outcomes)
        there += len(outcomes)
        unseen += [outcome for outcome in outcomes if outcome != Status.OK]
        count = min(most, there)
        status = Status(gpuq.wait_counter_for(stepper.queue, COUNTER, count, 0))
        assert status == first_known(unseen)
        if count == there:
            unseen.clear()
        there -= count
        assert gpuq.poll_counter(stepper.queue, COUNTER) == there
    stepper.close()


@pytest.mark.parametrize("failures", range(1, HISTORY_WORDS + 3))
def test_the_history_holds_the_newest_failures(stepper: Stepper, failures: int) -> None:
    outcomes = [OUTCOMES[1 + i % 3] for i in range(failures)]
    answer(stepper, *outcomes)
    assert gpuq.wait_counter(stepper.queue, COUNTER, failures) == first_known(outcomes)


def test_counters_are_not_mixed_up(stepper: Stepper) -> None:
    answer(stepper, Status.BAD_RANGE, Status.OK)
    for counter in range(COUNTERS):
        expected = 2 if counter == COUNTER else 0
        assert gpuq.poll_counter(stepper.queue, counter) == expected
    gpuq.post_counted(stepper.queue, 3, stepper.source, stepper.destination, 0, 1, 0)
    stepper.run()
    assert gpuq.wait_counter(stepper.queue, 3, 1) == Status.OK
    assert gpuq.wait_counter(stepper.queue, COUNTER, 2) == Status.BAD_RANGE


# --- handles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("counter", [-1, COUNTERS, 1 << 40, -(1 << 63), np.uint64((1 << 64) - 1)])
def test_a_handle_that_is_none_posts_and_takes_nothing(stepper: Stepper, counter: Any) -> None:
    q, s, d = stepper.queue, stepper.source, stepper.destination
    assert gpuq.post_counted(q, counter, s, d, 0, 1, 0) == Status.BAD_OPTIONS
    assert gpuq.wait_counter(q, counter, 0) == Status.BAD_OPTIONS
    assert gpuq.wait_counter_for(q, counter, 1, 0) == Status.BAD_OPTIONS
    assert gpuq.poll_counter(q, counter) == 0
    assert not q.tail.any()
    assert not q.taken.any()


def test_a_negative_count_takes_nothing(stepper: Stepper) -> None:
    """It would hand answers back that nobody gave."""
    answer(stepper, Status.OK)
    assert gpuq.wait_counter(stepper.queue, COUNTER, -1) == Status.BAD_OPTIONS
    assert gpuq.poll_counter(stepper.queue, COUNTER) == 1


def test_a_loader_gives_each_counter_out_once() -> None:
    with open_loader(counters=3) as loader:
        assert {loader.counter().handle for _ in range(3)} == {0, 1, 2}
        with pytest.raises(gpuq.ConfigError, match="3 of 3 counters"):
            loader.counter()
    with pytest.raises(gpuq.ClosedError):
        loader.counter()


# --- several waiters, time-outs and ends ---------------------------------------------------------


def outrun(monkeypatch: pytest.MonkeyPatch, q: gpuq.Queue, count: int) -> list[Status]:
    """Let another waiter take `count` answers just before the first swap of a wait."""
    real = counters.compare_exchange
    others: list[Status] = []

    def swap(*arguments: Any) -> Any:
        monkeypatch.setattr(counters, "compare_exchange", real)
        others.append(Status(gpuq.wait_counter(q, COUNTER, count)))
        return real(*arguments)

    monkeypatch.setattr(counters, "compare_exchange", swap)
    return others


def test_no_answer_is_taken_twice(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(stepper, Status.OK, Status.OK, Status.OK)
    others = outrun(monkeypatch, stepper.queue, 2)
    assert gpuq.wait_counter_for(stepper.queue, COUNTER, 2, 0) == Status.TIMED_OUT
    assert others == [Status.OK]
    assert gpuq.poll_counter(stepper.queue, COUNTER) == 1


@pytest.mark.parametrize("load", ["load_acquire", "load_acquire_device"])
def test_answers_that_were_taken_between_two_loads_are_not_there(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    """Fewer seem answered than taken; as a number without a sign that is very many."""
    real = getattr(counters, load)
    answer(stepper, Status.OK)
    others = []

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(counters, load, real)
        seen = real(*arguments)
        answer(stepper, Status.OK)
        others.append(gpuq.wait_counter(stepper.queue, COUNTER, 2))
        return seen

    monkeypatch.setattr(counters, load, late)
    assert gpuq.wait_counter_for(stepper.queue, COUNTER, 1, 0) == Status.TIMED_OUT
    assert others == [Status.OK]
    assert taken(stepper.queue) == 2


@pytest.mark.parametrize("state", [State.CLOSED, State.ABORTED])
def test_an_outrun_waiter_gets_what_is_left_when_the_queue_has_ended(
    stepper: Stepper, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    """Its last look was lost to the other; the answers that it waits for are there all the same."""
    answer(stepper, Status.OK, Status.OK, Status.OK)
    stepper.queue.control[STATE] = state
    real = counters.take_counts
    looks = []

    def take(q: Any, counter: Any, count: Any) -> Any:
        looks.append(count)
        if len(looks) == 1:
            return Status.PENDING  # an answer that comes between this look and that at STATE
        if len(looks) == 2:
            outrun(monkeypatch, q, 1)
        return real(q, counter, count)

    monkeypatch.setattr(counters, "take_counts", take)
    assert gpuq.wait_counter(stepper.queue, COUNTER, 2) == Status.OK
    assert looks == [2, 2, 1, 2]


def test_a_wait_in_vain_takes_nothing(stepper: Stepper) -> None:
    answer(stepper, Status.BAD_RANGE)
    for timeout_ns in (0, -5, 1000):
        status = gpuq.wait_counter_for(stepper.queue, COUNTER, 2, timeout_ns)
        assert status == Status.TIMED_OUT
    answer(stepper, Status.OK)
    assert gpuq.wait_counter_for(stepper.queue, COUNTER, 2, 1 << 63) == Status.BAD_RANGE


@pytest.mark.parametrize("state", [State.CLOSED, State.ABORTED])
def test_an_ended_queue_still_hands_out_what_was_answered(stepper: Stepper, state: State) -> None:
    answer(stepper, Status.BAD_RANGE, Status.OK)
    stepper.queue.control[STATE] = state
    assert gpuq.wait_counter(stepper.queue, COUNTER, 3) == Status.ABORTED
    assert gpuq.wait_counter(stepper.queue, COUNTER, 2) == Status.BAD_RANGE
    assert gpuq.wait_counter(stepper.queue, COUNTER, 1) == Status.ABORTED


def test_a_queue_that_ended_refuses_where_it_would_have_to_wait() -> None:
    q = bare_queue(1, state=State.ABORTED)
    assert gpuq.post_counted(q, COUNTER, 0, 0, 0, 0, 0) == Status.OK
    assert gpuq.post_counted(q, COUNTER, 0, 0, 0, 0, 0) == Status.ABORTED
    assert gpuq.wait_counter(q, COUNTER, 1) == Status.ABORTED


# --- kernels -------------------------------------------------------------------------------------

POST_STATUS, WAIT_STATUS, LEFT = range(3)


def pull_counted(index, size, q, counters, source, destination, slices, ways, statuses):
    """Post this block's share of `slices` to its counter, and wait for so many.

    `ways` says how many of them are waited for at a time.
    """
    counter = counters[index]
    first, last = gpuq.share(len(slices), index, size)
    for row in range(first, last):
        start, end, offset = slices[row]
        status = gpuq.post_counted_at(q, counter, source, destination, offset, start, end, row)
        if status != gpuq.Status.OK:
            statuses[index, POST_STATUS] = status
            last = row
            break
    while first < last:
        count = min(ways, last - first)
        status = gpuq.wait_counter(q, counter, count)
        if status != gpuq.Status.OK:
            statuses[index, WAIT_STATUS] = status
            break
        first += count
    statuses[index, LEFT] = last - first


def slices_of(nbytes: int, step: int) -> Any:
    starts = np.arange(0, nbytes, step)
    return np.stack((starts, np.minimum(starts + step, nbytes), starts), axis=1)


@everywhere
@pytest.mark.parametrize("shared", [False, True])
def test_counters_serve_launch_after_launch(payload: Any, payload_path: Path, shared: bool) -> None:
    """Three blocks pull more slices than there are slots, five times, on the same counters."""
    with open_loader(slots=8) as loader:
        source, out = loader.open(payload_path), np.zeros(20_001, np.uint8)
        destination = loader.register(out)
        handles = [loader.counter().handle for _ in range(3)]
        numbers = np.array([handles[0]] * 3 if shared else handles, np.int64)
        for launch in range(5):
            statuses = np.zeros((3, 3), np.int64)
            slices = slices_of(len(out), 701 + launch)
            loader.launch(
                pull_counted, 3, loader.queue, numbers, source, destination, slices,
                1 if shared else len(slices), statuses, threads=3,
            )  # fmt: skip
            loader.synchronize()
            assert not statuses.any()
            np.testing.assert_array_equal(out, payload[: len(out)])
            for handle in handles:
                assert gpuq.poll_counter(loader.queue, handle) == 0
            out[:] = 0


@everywhere
def test_a_file_that_is_too_short_ends_the_wait_when_all_are_answered(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(5_000))
    with open_loader() as loader:
        source, out = loader.open(tmp_path / "short"), np.ones(9_000, np.uint8)
        numbers = np.array([loader.counter().handle], np.int64)
        statuses = np.zeros((1, 3), np.int64)
        slices = slices_of(9_000, 1000)
        loader.launch(
            pull_counted, 1, loader.queue, numbers, source, loader.register(out), slices,
            len(slices), statuses,
        )  # fmt: skip
        loader.synchronize()
        assert list(statuses[0]) == [Status.OK, Status.END_OF_FILE, 9]
        assert loader.statistics().outstanding == 0
        assert gpuq.poll_counter(loader.queue, numbers[0]) == 0
    assert not out[:5_000].any()
    assert out[5_000:].all()


def launch_and_let_wait(make_scripted: Callable[..., Any], payload: Any, path: Path) -> Any:
    """Launch a kernel that waits for four counted reads, which the reader does not answer yet."""
    loader, reader = make_scripted(payload, gate=1)
    out, statuses = np.zeros(4_000, np.uint8), np.zeros((1, 3), np.int64)
    numbers = np.array([loader.counter().handle], np.int64)
    loader.launch(
        pull_counted, 1, loader.queue, numbers, loader.open(path), loader.register(out),
        slices_of(4_000, 1000), 4, statuses,
    )  # fmt: skip
    until(lambda: reader.words[readers.SUBMITTED] == 4, "reads")
    return loader, reader, out, statuses


def test_an_abort_ends_a_wait(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> None:
    loader, _, _, statuses = launch_and_let_wait(make_scripted, payload, payload_path)
    loader.abort()
    loader.synchronize()
    assert list(statuses[0]) == [Status.OK, Status.ABORTED, 4]


def test_closing_serves_what_is_waited_for(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> None:
    loader, reader, out, statuses = launch_and_let_wait(make_scripted, payload, payload_path)
    closing = threading.Thread(target=loader.close)
    closing.start()
    until(lambda: loader.state == State.CLOSING, "closing begins")
    reader.words[readers.GATE] = 0
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive()
    loader.synchronize()
    assert list(statuses[0]) == [Status.OK, Status.OK, 0]
    np.testing.assert_array_equal(out, payload[:4_000])


def test_marked_tests_hold_in_the_simulator() -> None:
    run_in_the_simulator(__file__, __name__)

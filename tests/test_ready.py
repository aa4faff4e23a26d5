"""The ready-made kernel: what it asks for, in which order it may wait, and what it notes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS
from hypothesis import given
from hypothesis import strategies as st
from numba import types
from ptx import INTEGERS, QUEUE, accesses_at_fault, compiled_body
from stepping import answer, bare_queue

import gpuq
from gpuq.kernels import queue, ready
from gpuq.layout import OFFSET, SUBMISSION_WORDS, TAG, State, Status


def tables(count: int, tickets: int) -> tuple[Any, Any, Any]:
    """Slices numbered by their offset, tickets that nobody gave out, answers that nobody gave."""
    slices = np.zeros((count, ready.SLICE_WORDS), np.int64)
    slices[:, ready.SLICE_OFFSET] = np.arange(count) + 100
    return (
        slices,
        np.full(tickets, -99, np.int64),
        np.full((count, ready.ANSWER_WORDS), -1, np.int64),
    )


class Host:
    """Answers a ticket of a bare queue when the kernel first looks for its answer."""

    def __init__(self, q: gpuq.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        self.q = q
        self.seen: list[tuple[int, int]] = []  # (tag, offset) of each request, as answered
        self.most_held = 0
        self.say: Callable[[int], tuple[int, int]] = lambda tag: (Status.OK, 0)
        self._freed = 0
        monkeypatch.setattr(ready, "poll", self.poll)
        monkeypatch.setattr(ready, "wait", self.wait)

    def poll(self, q: gpuq.Queue, ticket: int) -> int:
        if ticket >= 0:
            base = (ticket & (q.capacity - 1)) * SUBMISSION_WORDS
            tag = int(q.submissions[base + TAG])
            self.seen.append((tag, int(q.submissions[base + OFFSET])))
            self.most_held = max(self.most_held, int(q.tail[0]) - self._freed)
            answer(q, ticket, *self.say(tag))
        return int(gpuq.poll(q, ticket))

    def wait(self, q: gpuq.Queue, ticket: int) -> int:
        self._freed += 1
        return int(gpuq.wait(q, ticket))


@given(
    count=st.integers(0, 40),
    workers=st.integers(1, 5),
    window=st.integers(1, 9),
    capacity=st.sampled_from([1, 2, 8, 64]),
)
def test_workers_ask_for_each_slice_once(
    count: int, workers: int, window: int, capacity: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        q = bare_queue(capacity)
        host = Host(q, monkeypatch)
        slices, tickets, answers = tables(count, workers * window)
        for worker in range(workers):
            ready.pull_slices(q, worker, workers, slices, tickets, answers, window)
    assert sorted(host.seen) == [(row, row + 100) for row in range(count)]
    assert (answers == [Status.OK, 0]).all()
    assert host.most_held <= min(window, capacity)
    assert host.most_held == min(window, capacity, -(-count // workers))


def test_a_failed_slice_is_noted_with_its_errno_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = bare_queue(4)
    faults = {2: (Status.END_OF_FILE, 0), 5: (Status.READ_FAILED, errno.EIO)}
    host = Host(q, monkeypatch)
    host.say = lambda tag: faults.get(tag, (Status.OK, 0))
    slices, tickets, answers = tables(9, 4)
    ready.pull_slices(q, 0, 1, slices, tickets, answers, 4)
    expected = np.zeros_like(answers)
    expected[2] = Status.END_OF_FILE, 0
    expected[5] = Status.READ_FAILED, errno.EIO
    np.testing.assert_array_equal(answers, expected)


def test_a_worker_does_not_wait_for_a_slot_that_it_holds_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two slots; ours is slot 0, and somebody else takes slot 1 before our second post.

    The next ticket needs slot 0. A kernel that posted with `post_at` here would wait for itself
    until the time is over, though all tickets together are no more than the slots.
    """
    q = bare_queue(2, post_timeout_ns=0)
    Host(q, monkeypatch)
    theirs: list[int] = []

    def somebody_is_faster(*arguments: Any) -> Any:
        if not theirs:
            theirs.append(gpuq.try_post(q, 0, 0, 0, 0, 77))
        elif q.turns[1] == 1:
            answer(q, 1, Status.OK)
            gpuq.wait(q, theirs[0])
        return gpuq.try_post_at(*arguments)

    monkeypatch.setattr(ready, "try_post_at", somebody_is_faster)
    slices, tickets, answers = tables(6, 2)
    ready.pull_slices(q, 0, 1, slices, tickets, answers, 2)
    assert theirs == [1]
    assert (answers[:, ready.ANSWER_STATUS] == Status.OK).all()


def test_an_aborted_queue_answers_every_slice() -> None:
    q = bare_queue(4, state=State.ABORTED)
    slices, tickets, answers = tables(11, 3)
    ready.pull_slices(q, 0, 1, slices, tickets, answers, 3)
    assert (answers[:, ready.ANSWER_STATUS] == Status.ABORTED).all()
    assert (answers[:, ready.ANSWER_ERRNO] == 0).all()


def test_where_no_slot_comes_free_every_slice_says_so() -> None:
    q = bare_queue(1)
    queue.claim(q)
    slices, tickets, answers = tables(3, 2)
    ready.pull_slices(q, 0, 1, slices, tickets, answers, 2)
    assert (answers[:, ready.ANSWER_STATUS] == Status.NO_SLOT).all()


@pytest.mark.parametrize("slots", [2, 4, 64])
def test_compiled_workers_share_a_queue_smaller_than_their_windows(
    make_loader: Callable[..., gpuq.Loader], payload: Any, payload_path: Path, slots: int
) -> None:
    workers, window, nbytes = 3, 4, 977
    loader = make_loader(slots=slots)
    source = loader.open(payload_path)
    out = np.zeros_like(payload)
    destination = loader.register(out)
    starts = np.arange(0, len(payload), nbytes)
    slices, tickets, answers = tables(len(starts), workers * window)
    slices[:, ready.SLICE_SOURCE] = source.handle
    slices[:, ready.SLICE_DESTINATION] = destination.handle
    slices[:, ready.SLICE_OFFSET] = slices[:, ready.SLICE_START] = starts
    slices[:, ready.SLICE_END] = np.minimum(starts + nbytes, len(payload))
    threads = [
        threading.Thread(
            target=ready.pull_slices_on_cpu,
            args=(loader.queue, worker, workers, slices, tickets, answers, window),
        )
        for worker in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    assert (answers == [Status.OK, 0]).all()
    np.testing.assert_array_equal(out, payload)


@pytest.mark.parametrize("capability", [(7, 5), (12, 0)], ids=str)
def test_the_body_compiles_to_ptx(capability: tuple[int, int]) -> None:
    table = types.Array(types.int64, 2, "C")
    arguments = {
        "q": QUEUE, "slices": table, "tickets": INTEGERS, "answers": table, "window": types.int64,
    }  # fmt: skip
    compiled = compiled_body(ready.pull_share, arguments)
    assert accesses_at_fault(compiled.ptx(capability)) == []
    assert compiled.cubin(capability).startswith(b"\x7fELF")

"""The kernel's half of the protocol by two threads: at once, and one in the middle of the other."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS
from kernels import Plain, post_many, wait_many
from stepping import answer, bare_queue, submission

from gpuq.kernels import queue as protocol
from gpuq.layout import Queue, Status

# --- at once -----------------------------------------------------------------------------------


def run_at_once(kernel: Any, q: Queue, outputs: list[Any]) -> None:
    """Run a compiled kernel in one thread for each output; the kernel lets them meet."""
    meeting = np.array([len(outputs), 0], dtype=np.uint64)
    threads = [threading.Thread(target=kernel, args=(q, meeting, output)) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_post_at_once_get_different_tickets(threads: int) -> None:
    for _ in range(10):
        q = bare_queue(16_384)
        tickets = [np.zeros(5000, dtype=np.int64) for _ in range(threads)]
        run_at_once(post_many, q, tickets)
        assert sorted(np.concatenate(tickets)) == list(range(5000 * threads))
        assert q.tail[0] == 5000 * threads
        assert (np.diff(tickets) > 0).all()


def test_of_many_waiters_for_one_ticket_one_gets_the_answer() -> None:
    tickets = 4096
    q = bare_queue(tickets)
    for ticket in range(tickets):
        answer(q, ticket, Status.OK)
    q.tail[0] = tickets
    statuses = np.zeros((2, tickets), dtype=np.int64)
    run_at_once(wait_many, q, list(statuses))
    assert (np.sort(statuses, axis=0).T == [Status.OK, Status.STALE]).all()
    np.testing.assert_array_equal(q.turns, np.arange(tickets, 2 * tickets))


# --- one call in the middle of another -----------------------------------------------------


class Interruption:
    """Runs `act` once, right before the n-th memory operation of the plain protocol."""

    OPERATIONS = (
        "compare_exchange",
        "load_acquire",
        "load_acquire_device",
        "load_relaxed",
        "store_release",
        "store_release_device",
    )

    def __init__(self, patch: pytest.MonkeyPatch, n: int, act: Any) -> None:
        self.left = n
        self.act = act
        self.came = False
        for name in self.OPERATIONS:
            patch.setattr(protocol, name, self._wrap(getattr(protocol, name)))

    def _wrap(self, operation: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.came = True
                self.act()
            return operation(*arguments)

        return wrapped


def interrupted_everywhere(monkeypatch: pytest.MonkeyPatch, step: Any) -> int:
    """Call ``step(interrupt)`` for every place where its call can be interrupted."""
    for n in itertools.count(1):
        with monkeypatch.context() as patch:
            came = step(lambda act, n=n, patch=patch: Interruption(patch, n, act))
        if not came:
            return n - 1
    raise AssertionError("unreachable")


def test_a_waiter_amid_another_gets_the_answer_or_leaves_it(monkeypatch: Any) -> None:
    def step(interrupt: Any) -> bool:
        q = bare_queue(2)
        ticket = Plain.post(q, 1, 2, 3, 4, 0)
        answer(q, ticket, Status.OK)
        seen = []
        interruption = interrupt(lambda: seen.append(Plain.wait(q, ticket)))
        seen.append(Plain.wait(q, ticket))
        assert sorted(seen) == ([Status.OK, Status.STALE] if interruption.came else [Status.OK])
        assert [int(turn) for turn in q.turns] == [2, 1]
        return interruption.came

    assert interrupted_everywhere(monkeypatch, step) >= 2


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_a_post_amid_another_takes_another_ticket_or_none(monkeypatch: Any, capacity: int) -> None:
    def step(interrupt: Any) -> bool:
        q = bare_queue(capacity)
        seen = []
        interruption = interrupt(lambda: seen.append(Plain.try_post(q, 5, 6, 7, 8, 9)))
        seen.append(Plain.try_post(q, 1, 2, 3, 4, 0))
        expected = [0, 1 if capacity > 1 else -Status.NO_SLOT] if interruption.came else [0]
        assert sorted(seen, reverse=True) == sorted(expected, reverse=True)
        assert q.tail[0] == sum(ticket >= 0 for ticket in seen)
        payloads = [[5, 6, 7, 8, 0, 9, 0], [1, 2, 3, 4, 0, 0, 0]][-len(seen) :]
        for ticket, payload in zip(seen, payloads, strict=True):
            if ticket >= 0:
                assert submission(q, ticket) == [ticket + 1, *payload]
        return interruption.came

    assert interrupted_everywhere(monkeypatch, step) >= 4


def test_a_whole_lap_amid_a_wait_does_not_free_the_wrong_slot(monkeypatch: Any) -> None:
    """NCCL 2389: a late step of one turn must not undo the next."""

    def step(interrupt: Any) -> bool:
        q = bare_queue(1)
        ticket = Plain.post(q, 1, 2, 3, 4, 0)
        answer(q, ticket, Status.OK)

        def lap() -> None:
            assert Plain.wait(q, ticket) == Status.OK
            later = Plain.post(q, 1, 2, 3, 4, 0)
            assert later == ticket + 1
            answer(q, later, Status.END_OF_FILE)

        interruption = interrupt(lap)
        status = Plain.wait(q, ticket)
        if interruption.came:
            assert status == Status.STALE
            assert Plain.try_post(q, 1, 2, 3, 4, 0) == -Status.NO_SLOT
            assert Plain.wait(q, ticket + 1) == Status.END_OF_FILE
        return interruption.came

    assert interrupted_everywhere(monkeypatch, step) >= 2

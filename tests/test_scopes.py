"""Block and warp forms: who asks, which slice is whose, and that all get one status.

On the CPU a block is one thread; blocks of several run in the simulator, where a warp is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import TARGET, everywhere, open_loader, run_in_the_simulator

import gpuq
from gpuq.compiling import SIMULATED
from gpuq.kernels import scopes
from gpuq.layout import NO_TICKET, Status

START, END = 1001, 2024
THREADS = [1, 3, 8] if SIMULATED else [1]

# What `ask` does.
PULL_BLOCK, PULL_BLOCK_AT, PULL_WARP, PULL_WARP_AT, POST_BLOCK, POST_BLOCK_AT, BY_COUNTER = range(7)
# What its threads get.
STATUS, SUM, TICKET = range(3)


def ask(index, size, q, how, source, destination, counter, offset, start, end, out, answers):
    """Ask for a range in one of the ways; every thread sums up all bytes that came.

    Of threads that do not talk to the queue, no argument is right.
    """
    rank, threads = gpuq.block_rank(), gpuq.block_size()
    wrong = 0 if rank == 0 else 1 << 40
    status = 0
    ticket = 0
    if how == PULL_BLOCK:
        status = gpuq.pull_block(q, source, destination + wrong, start + wrong, end, wrong)
    elif how == PULL_BLOCK_AT:
        status = gpuq.pull_block_at(
            q, source + wrong, destination, offset + wrong, start, end + wrong, wrong
        )
    elif how == PULL_WARP:
        status = gpuq.pull_warp(q, source, destination, start, end, rank)
    elif how == PULL_WARP_AT:
        status = gpuq.pull_warp_at(q, source, destination, offset, start, end, rank)
    elif how == BY_COUNTER:
        for i in range(rank, end - start, threads):
            at = start + i
            gpuq.post_counted_at(q, counter, source, destination, offset + i, at, at + 1, i)
        status = gpuq.wait_counter_block(q, counter + wrong, end - start + wrong)
    else:
        if how == POST_BLOCK:
            ticket = gpuq.post_block(q, source, destination, start, end, rank)
        else:
            ticket = gpuq.post_block_at(q, source, destination, offset, start, end, rank)
        status = gpuq.wait_block(q, ticket)
    total = 0
    for i in range(len(out)):
        total += int(out[i])
    answers[index, rank, STATUS] = status
    answers[index, rank, SUM] = total
    answers[index, rank, TICKET] = ticket


class Asking:
    """A loader with a file and a destination, and what the threads of the last block got."""

    def __init__(self, loader: gpuq.Loader, path: Path) -> None:
        self.loader = loader
        self.source = loader.open(path)
        self.out = np.zeros(END - START + 100, np.uint8)
        self.destination = loader.register(self.out)
        self.counter = loader.counter()
        self.answers = np.zeros((0, 0, 3), np.int64)

    def ask(
        self, how: int, threads: int, start: int = START, end: int = END, offset: int = 7
    ) -> int:
        """Run one block; return how many requests it made."""
        self.out[:] = 0
        self.answers = np.full((1, threads, 3), -1, np.int64)
        before = sum(self.loader.statistics().requests.values())
        self.loader.launch(
            ask, 1, self.loader.queue, how, self.source, self.destination, self.counter, offset,
            start, end, self.out, self.answers, threads_per_block=threads,
        )  # fmt: skip
        self.loader.synchronize()
        return sum(self.loader.statistics().requests.values()) - before

    def get(self, column: int) -> list[int]:
        return [int(answer[column]) for answer in self.answers[0]]


@pytest.fixture(scope="module")
def asking(payload_path: Path) -> Iterator[Asking]:
    with open_loader(slots=32) as loader:
        yield Asking(loader, payload_path)


def expected(payload: Any, out: Any, offset: int, start: int, end: int) -> Any:
    whole = np.zeros_like(out)
    whole[offset : offset + end - start] = payload[start:end]
    return whole


@everywhere
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("how", [PULL_BLOCK, PULL_BLOCK_AT])
def test_a_block_pulls_once_and_all_its_threads_may_read(
    asking: Asking, payload: Any, how: int, threads: int
) -> None:
    assert asking.ask(how, threads) == 1
    at = 7 if how == PULL_BLOCK_AT else 0
    np.testing.assert_array_equal(asking.out, expected(payload, asking.out, at, START, END))
    assert asking.get(STATUS) == [Status.OK] * threads
    assert asking.get(SUM) == [int(asking.out.sum())] * threads


@everywhere
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("how", [PULL_WARP, PULL_WARP_AT])
def test_a_warp_pulls(asking: Asking, payload: Any, how: int, threads: int) -> None:
    """In the simulator each thread is a warp."""
    assert asking.ask(how, threads) == threads
    at = 7 if how == PULL_WARP_AT else 0
    np.testing.assert_array_equal(asking.out, expected(payload, asking.out, at, START, END))
    assert asking.get(STATUS) == [Status.OK] * threads


@everywhere
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("how", [POST_BLOCK, POST_BLOCK_AT])
@pytest.mark.parametrize("nbytes", [1, 8, 9, 17, 64, END - START])
def test_a_block_posts_a_slice_for_each_thread(
    asking: Asking, payload: Any, how: int, threads: int, nbytes: int
) -> None:
    requests = asking.ask(how, threads, end=START + nbytes)
    at = 7 if how == POST_BLOCK_AT else 0
    whole = expected(payload, asking.out, at, START, START + nbytes)
    np.testing.assert_array_equal(asking.out, whole)
    assert asking.get(STATUS) == [Status.OK] * threads
    assert asking.get(SUM) == [int(whole.sum())] * threads
    assert requests == sum(ticket != NO_TICKET for ticket in asking.get(TICKET))
    assert requests == min(threads, -(-nbytes // 8)) or nbytes == END - START


@everywhere
@pytest.mark.parametrize("threads", THREADS)
def test_a_block_waits_for_one_counter(asking: Asking, payload: Any, threads: int) -> None:
    assert asking.ask(BY_COUNTER, threads, end=START + 25) == 25
    whole = expected(payload, asking.out, 7, START, START + 25)
    np.testing.assert_array_equal(asking.out, whole)
    assert asking.get(STATUS) == [Status.OK] * threads
    assert asking.get(SUM) == [int(whole.sum())] * threads


@everywhere
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("how", [PULL_BLOCK_AT, PULL_WARP_AT, POST_BLOCK_AT])
@pytest.mark.parametrize(
    ("start", "end", "status"),
    [
        (5, 5, Status.OK),
        (9, 5, Status.BAD_RANGE),
        (-1, -1, Status.OUT_OF_BOUNDS),
        (-(1 << 63), (1 << 63) - 1, Status.BAD_RANGE),
        (0, (1 << 63) - 1, Status.OUT_OF_BOUNDS),
        (100_000, 100_100, Status.END_OF_FILE),
        (0, 2000, Status.OUT_OF_BOUNDS),
    ],
)
def test_all_threads_are_told_what_went_wrong(
    asking: Asking, how: int, threads: int, start: int, end: int, status: Status
) -> None:
    """A range that cannot be divided into slices is still one that is judged."""
    requests = asking.ask(how, threads, start=start, end=end)
    assert asking.get(STATUS) == [status] * threads
    if how == PULL_BLOCK_AT or not 0 < end - start < 1 << 62:
        assert requests == (threads if how == PULL_WARP_AT else 1)


# --- tickets of a block --------------------------------------------------------------------------


def wait_for_own(index, size, q, tickets, answers):
    rank = gpuq.block_rank()
    answers[0, rank] = gpuq.wait_block(q, tickets[rank])
    ticket = NO_TICKET
    if rank == 0 and answers[0, rank] != 0:
        ticket = -answers[0, rank]
    answers[1, rank] = gpuq.wait_warp(q, ticket)


@everywhere
@pytest.mark.parametrize(
    ("tickets", "status"),
    [
        ([NO_TICKET] * 4, Status.OK),
        ([NO_TICKET, -Status.NO_SLOT, -Status.ABORTED, NO_TICKET], Status.NO_SLOT),
        ([NO_TICKET, NO_TICKET, NO_TICKET, -Status.ABORTED], Status.ABORTED),
        ([-Status.ABORTED, -Status.NO_SLOT, NO_TICKET, NO_TICKET], Status.ABORTED),
        ([1 << 40, -Status.NO_SLOT, NO_TICKET, NO_TICKET], Status.STALE),
    ],
)
def test_of_several_failures_that_of_the_lowest_rank_is_told(
    asking: Asking, tickets: list[int], status: Status
) -> None:
    threads = 4
    if TARGET == "cpu":
        threads, status = 1, Status(gpuq.wait(asking.loader.queue, tickets[0]))
    answers = np.full((2, threads), -1, np.int64)
    asking.loader.launch(
        wait_for_own, 1, asking.loader.queue, np.array(tickets, np.int64), answers,
        threads_per_block=threads,
    )  # fmt: skip
    asking.loader.synchronize()
    assert list(answers[0]) == [status] * threads
    assert list(answers[1]) == [status] + [Status.OK] * (threads - 1)


# --- division ------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    start=st.integers(0, 1 << 61),
    nbytes=st.one_of(st.integers(0, 5000), st.integers(0, 1 << 61)),
    threads=st.integers(1, 1024),
    offset=st.integers(0, 1 << 40),
)
def test_slices_cover_the_range_once(start: int, nbytes: int, threads: int, offset: int) -> None:
    slices = []

    def note(_q: Any, _source: Any, _destination: Any, *where: int) -> int:
        slices.append(where[:3])
        return 0

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(scopes, "post_at", note)
        monkeypatch.setattr(scopes, "block_size", lambda: threads)
        for rank in range(threads):
            monkeypatch.setattr(scopes, "block_rank", lambda rank=rank: rank)
            before = len(slices)
            ticket = scopes.post_block_at(None, 1, 2, offset, start, start + nbytes, 0)
            assert (ticket == NO_TICKET) == (len(slices) == before)
    assert slices[0][1] == start
    assert slices[-1][2] == start + nbytes
    for before, after in itertools.pairwise(slices):
        assert before[2] == after[1]
    for at, first, last in slices:
        assert at - offset == first - start
        assert last > first or nbytes == 0
    sizes = [last - first for _, first, last in slices]
    assert all(size == sizes[0] and size % 8 == 0 for size in sizes[:-1])
    assert sizes[-1] <= sizes[0]


@pytest.mark.skipif(SIMULATED, reason="the simulator takes any integers")
def test_unsigned_numbers_are_divided_as_integers(asking: Asking, payload: Any) -> None:
    """Numba makes floating-point numbers of signed and unsigned integers together."""
    start, end = np.uint64(START), np.uint64(END)
    asking.ask(POST_BLOCK_AT, 1, start=start, end=end, offset=np.uint64(7))  # type: ignore[arg-type]
    assert asking.get(STATUS) == [Status.OK]
    np.testing.assert_array_equal(asking.out, expected(payload, asking.out, 7, START, END))


def test_marked_tests_hold_in_the_simulator() -> None:
    run_in_the_simulator(__file__, __name__)

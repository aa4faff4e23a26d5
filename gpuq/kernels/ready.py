"""Ready-made kernels: pull many slices, with many of them in flight.

`pull_slices` is one body for all targets. A kernel of one's own may call it like the rest of
`gpuq.kernels`; `pull_slices_on_cpu` and `pull_slices_kernel` are the body made ready to launch.
"""

from __future__ import annotations

from typing import Any

from numba import cuda

from gpuq.compiling import compiled, protocol
from gpuq.kernels.cooperation import block_rank
from gpuq.kernels.queue import errno_of, poll, post_at, try_post_at, wait
from gpuq.layout import Status
from gpuq.ordering import as_word, relax

# Columns of a slice, in the order of `post_at`'s parameters.
SLICE_SOURCE = 0
SLICE_DESTINATION = 1
SLICE_OFFSET = 2
SLICE_START = 3
SLICE_END = 4
SLICE_WORDS = 5

# Columns of an answer.
ANSWER_STATUS = 0
ANSWER_ERRNO = 1
ANSWER_WORDS = 2

_PENDING = int(Status.PENDING)


@protocol
def post_slice(q: Any, slices: Any, row: Any, may_block: Any) -> Any:
    """Post one row of `slices`, tagged with its number; spin for a slot only if `may_block`."""
    source = slices[row, SLICE_SOURCE]
    destination = slices[row, SLICE_DESTINATION]
    offset = slices[row, SLICE_OFFSET]
    start = slices[row, SLICE_START]
    end = slices[row, SLICE_END]
    if may_block:
        return post_at(q, source, destination, offset, start, end, row)
    return try_post_at(q, source, destination, offset, start, end, row)


@protocol
def settle_answer(q: Any, ticket: Any) -> Any:
    """Wait for a ticket and free its slot; return its status and errno."""
    spins = 0
    # The errno stands in the flag, which is this thread's to read only until `wait`.
    while poll(q, ticket) == _PENDING:
        relax(spins)
        spins += 1
    errno = errno_of(q, ticket)
    return wait(q, ticket), errno


@protocol
def take_answer(q: Any, ticket: Any, answers: Any, row: Any) -> None:
    """Wait for a ticket, free its slot, and note status and errno in a row of `answers`."""
    answers[row, ANSWER_STATUS], answers[row, ANSWER_ERRNO] = settle_answer(q, ticket)


@protocol
def pull_slices(
    q: Any, worker: Any, workers: Any, slices: Any, tickets: Any, answers: Any, window: Any
) -> None:
    """Pull every slice of which ``row % workers == worker``, up to `window` of them in flight.

    A slice that fails is noted and the rest is pulled all the same. Returns when each has its
    answer; an aborted queue answers all that is left with ``Status.ABORTED``.

    Parameters
    ----------
    q : Queue
        ``loader.queue``.
    worker, workers : int
        Number of this thread among all that share the slices, from 0, and how many they are.
    slices : array of int64, shape (n, SLICE_WORDS)
        Source, destination, offset, start and end of each, as `post_at` takes them.
    tickets : array of int64, shape (workers * window,)
        Scratch memory; each worker has `window` words of it.
    answers : array of int64, shape (n, ANSWER_WORDS)
        Receives the `Status` of each slice, and the errno where it is ``READ_FAILED``.
    window : int
        Slices in flight per worker, at least 1. More than ``capacity / workers`` is of no use.

    Notes
    -----
    A worker that holds tickets never spins for a slot. Slots are given out in order, so the next
    may be one that this worker itself holds, however few it holds: others have passed it by.
    It takes its oldest answer instead, which frees a slot and lets whoever waits for it go on.
    """
    ours = worker * window
    count = (slices.shape[0] - worker + workers - 1) // workers
    posted = 0
    answered = 0
    while answered < count:
        held = posted - answered
        if posted < count and held < window:
            ticket = post_slice(q, slices, worker + posted * workers, held == 0)
            if ticket >= 0 or held == 0:
                tickets[ours + posted % window] = ticket
                posted += 1
                continue
        ticket = tickets[ours + answered % window]
        take_answer(q, ticket, answers, worker + answered * workers)
        answered += 1


pull_slices_on_cpu = compiled(pull_slices)
"""`pull_slices` for the CPU target: each worker is a call, in a thread of its own."""


@cuda.jit
def pull_slices_kernel(q: Any, slices: Any, tickets: Any, answers: Any, window: Any) -> None:
    """Run `pull_slices` in each thread of a one-dimensional launch, on a GPU or in the simulator.

    The simulator runs blocks one after another: give it one block.
    """
    pull_slices(q, cuda.grid(1), cuda.gridsize(1), slices, tickets, answers, window)


def pull_request(index: Any, size: Any, q: Any, requests: Any, answers: Any) -> None:
    """Pull one slice in each block: a body for `gpuq.Loader.launch`.

    Parameters
    ----------
    index, size : int
        Number of the block, and how many there are.
    q : Queue
    requests : array of uint64, ``size * SLICE_WORDS``
    answers : array of uint64, ``size * ANSWER_WORDS``
    """
    if block_rank() == 0:
        base = index * SLICE_WORDS
        ticket = post_at(
            q,
            requests[base + SLICE_SOURCE],
            requests[base + SLICE_DESTINATION],
            requests[base + SLICE_OFFSET],
            requests[base + SLICE_START],
            requests[base + SLICE_END],
            index,
        )
        status, errno = settle_answer(q, ticket)
        answers[index * ANSWER_WORDS + ANSWER_STATUS] = as_word(status)
        answers[index * ANSWER_WORDS + ANSWER_ERRNO] = as_word(errno)

"""Ready-made kernels: pull many slices, and work on a stream while its next tiles arrive.

`pull_slices` is one body for all targets. A kernel of one's own may call it like the rest of
`gpuq.kernels`; `pull_slices_on_cpu` and `pull_share` are the body made ready to launch.

The others are bodies for `gpuq.Loader.launch`, and short enough to be copied and changed:

======================  =========================================================================
`checksum`              one number for all elements of a stream and their order
`reduce_columns`        sum, least and greatest of every column of a matrix
`histogram`             how often each value stands in a stream of integers
`gather_rows`           rows of a table by an array of indices
`pull_request`          one slice in each block
======================  =========================================================================

In those that walk a stream, each block takes a share of the rows. A walk ends at the first tile
that cannot be read; ``statuses[block]`` says why, and what the block found so far is no result.
"""

from __future__ import annotations

import math
from typing import Any

from gpuq.compiling import compiled, protocol
from gpuq.kernels.cooperation import block_rank, block_size
from gpuq.kernels.gathering import gather
from gpuq.kernels.queue import errno_of, poll, post_at, try_post_at, wait
from gpuq.kernels.sharing import share
from gpuq.kernels.stream import stream_close, stream_next, stream_open
from gpuq.layout import Status
from gpuq.ordering import as_signed, as_word, relax

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

_OK = int(Status.OK)
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


def pull_share(
    index: Any, size: Any, q: Any, slices: Any, tickets: Any, answers: Any, window: Any
) -> None:
    """Run `pull_slices` in each thread: a body for `gpuq.Loader.launch`.

    The simulator runs blocks one after another: give it one block.
    """
    threads = block_size()
    worker = index * threads + block_rank()
    pull_slices(q, worker, size * threads, slices, tickets, answers, window)


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


def checksum(index: Any, size: Any, q: Any, stream: Any, sums: Any, statuses: Any) -> None:
    """Sum up the elements of a stream, each times its number from 1 on, modulo 2**64.

    Elements that change places change the sum. It is that of NumPy's
    ``((np.arange(n, dtype="u8") + 1) * elements.astype("u8")).sum()``.

    Parameters
    ----------
    index, size : int
        Number of the block, and how many there are.
    q : Queue
    stream : Stream
        Of integers, in one dimension. ``"<u8"`` is the fastest, ``"uint8"`` leaves no tail.
    sums : array of uint64, shape (blocks, threads of a block)
        The sum is that of all these, modulo 2**64.
    statuses : array of int, shape (blocks,)
    """
    first, last = share(stream.rows, index, size)
    stream_open(q, stream, index, first, last)
    total = 0
    while True:
        status, row, tile = stream_next(q, stream, index)
        if status != _OK or len(tile) == 0:
            break
        for i in range(block_rank(), len(tile), block_size()):
            total += as_signed(tile[i]) * (row + i + 1)
    stream_close(q, stream, index)
    sums[index, block_rank()] = as_word(total)
    statuses[index] = status


def reduce_columns(
    index: Any, size: Any, q: Any, stream: Any, sums: Any, lows: Any, highs: Any, statuses: Any
) -> None:
    """Find the sum, the least and the greatest element of every column of a matrix.

    Parameters
    ----------
    index, size : int
        Number of the block, and how many there are.
    q : Queue
    stream : Stream
        Its tiles are rows of the matrix.
    sums, lows, highs : array of float64, shape (blocks, columns)
        Of each block's rows: ``sums.sum(axis=0)``, ``lows.min(axis=0)`` and
        ``highs.max(axis=0)`` are those of the matrix. A block without rows leaves 0, inf, -inf.
    statuses : array of int, shape (blocks,)
    """
    for column in range(block_rank(), sums.shape[1], block_size()):
        sums[index, column] = 0.0
        lows[index, column] = math.inf
        highs[index, column] = -math.inf
    first, last = share(stream.rows, index, size)
    stream_open(q, stream, index, first, last)
    while True:
        status, _row, tile = stream_next(q, stream, index)
        if status != _OK or len(tile) == 0:
            break
        for column in range(block_rank(), tile.shape[1], block_size()):
            total = sums[index, column]
            low = lows[index, column]
            high = highs[index, column]
            for i in range(len(tile)):
                value = float(tile[i, column])
                total += value
                low = min(low, value)
                high = max(high, value)
            sums[index, column] = total
            lows[index, column] = low
            highs[index, column] = high
    stream_close(q, stream, index)
    statuses[index] = status


def histogram(index: Any, size: Any, q: Any, stream: Any, counts: Any, statuses: Any) -> None:
    """Count how often each value stands in a stream of integers.

    Parameters
    ----------
    index, size : int
        Number of the block, and how many there are.
    q : Queue
    stream : Stream
        Of integers, in one dimension.
    counts : array of int64, shape (blocks, threads of a block, values)
        Zero at the begin; ``counts.sum(axis=(0, 1))`` is the histogram. Values that are negative
        or beyond it are left out. Each thread has counts of its own, so none waits for another.
    statuses : array of int, shape (blocks,)
    """
    rank = block_rank()
    first, last = share(stream.rows, index, size)
    stream_open(q, stream, index, first, last)
    while True:
        status, _row, tile = stream_next(q, stream, index)
        if status != _OK or len(tile) == 0:
            break
        for i in range(rank, len(tile), block_size()):
            value = as_signed(tile[i])
            if 0 <= value < counts.shape[2]:
                counts[index, rank, value] += 1
    stream_close(q, stream, index)
    statuses[index] = status


def gather_rows(index: Any, size: Any, q: Any, table: Any, indices: Any, statuses: Any) -> None:
    """Gather row ``indices[i]`` of a table to row ``i`` of its destination, for every i.

    Parameters
    ----------
    index, size : int
        Number of the block, and how many there are: the table's workers, at most.
    q : Queue
    table : Table
    indices : array of int, one dimension
    statuses : array of int, as long as `indices`
        Receives the `Status` of each row.
    """
    first, last = share(len(indices), index, size)
    gather(q, table, index, indices[first:last], first, statuses[first:last])

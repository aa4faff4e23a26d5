"""The kernels that the benchmarks run, on the CPU target."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gpuq.host.libc import sleep_ns
from gpuq.kernels.queue import poll, post_at, pull, wait
from gpuq.kernels.stream import stream_close, stream_next, stream_open
from gpuq.layout import Status
from gpuq.ordering import clock_ns

ANY_NUMBER = (1 << 62) - 1
FOREVER_NS = 1 << 61
PENDING = int(Status.PENDING)
_NAP_NS = 200_000


@njit(nogil=True)
def next_random(state: Any) -> Any:
    """Return the next state of a xorshift generator; never 0 where `state` is not."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    state ^= state << np.uint64(17)
    return state


@njit(nogil=True)
def read_blocks(
    q: Any,
    source: Any,
    destination: Any,
    block_bytes: Any,
    blocks: Any,
    depth: Any,
    begin_ns: Any,
    duration_ns: Any,
    most: Any,
    seed: Any,
    tickets: Any,
) -> Any:
    """Keep `depth` requests in flight, waiting for the oldest, until the time or `most` is over.

    Parameters
    ----------
    q : Queue
    source, destination : int
        Handles; request ``i`` goes to block ``i % depth`` of the destination.
    block_bytes, blocks : int
        The source's first ``blocks * block_bytes`` bytes are read.
    depth : int
    begin_ns : int
        Time of `clock_ns` to begin at; 0 is now.
    duration_ns, most : int
        Nothing is posted after so many nanoseconds or requests.
    seed : int
        Of the random order; 0 reads block after block.
    tickets : array of int64, shape (depth,)

    Returns
    -------
    (int, int, int)
        Requests done; the first status other than OK, or OK; nanoseconds until the last answer.
    """
    random = np.uint64(seed)
    posted = 0
    done = 0
    first_bad = 0
    while clock_ns() < begin_ns:
        pass
    began = clock_ns()
    go = True
    while go or done < posted:
        if posted - done == depth or not go:
            status = wait(q, tickets[done % depth])
            if status != 0 and first_bad == 0:
                first_bad = status
            done += 1
            go = go and first_bad == 0 and clock_ns() - began < duration_ns
        go = go and posted < most
        if go:
            if seed == 0:
                block = posted % blocks
            else:
                random = next_random(random)
                block = np.int64(random % np.uint64(blocks))
            place = posted % depth
            start = block * block_bytes
            tickets[place] = post_at(
                q, source, destination, place * block_bytes, start, start + block_bytes, posted
            )
            posted += 1
    return done, first_bad, clock_ns() - began


@njit(nogil=True)
def time_pulls(
    q: Any,
    source: Any,
    destination: Any,
    block_bytes: Any,
    blocks: Any,
    seed: Any,
    latencies_ns: Any,
) -> Any:
    """Pull random blocks one by one and write how long each took; stop at a bad status."""
    random = np.uint64(seed)
    for i in range(len(latencies_ns)):
        random = next_random(random)
        start = np.int64(random % np.uint64(blocks)) * block_bytes
        began = clock_ns()
        status = wait(q, post_at(q, source, destination, 0, start, start + block_bytes, i))
        latencies_ns[i] = clock_ns() - began
        if status != 0:
            return status
    return 0


@njit(nogil=True)
def be_busy(until_ns: Any) -> Any:
    """Compute, without the interpreter lock, until `clock_ns` says so."""
    state = np.uint64(1)
    while clock_ns() < until_ns:
        for _ in range(1000):
            state = next_random(state)
    return state


@njit(nogil=True)
def time_pulls_until(
    q: Any,
    source: Any,
    destination: Any,
    block_bytes: Any,
    blocks: Any,
    seed: Any,
    begin_ns: Any,
    duration_ns: Any,
    latencies_ns: Any,
) -> Any:
    """Pull random blocks one by one for a time, at least one; return (pulls, first bad status)."""
    random = np.uint64(seed)
    while clock_ns() < begin_ns:
        pass
    first = clock_ns()
    done = 0
    while done < len(latencies_ns):
        random = next_random(random)
        start = np.int64(random % np.uint64(blocks)) * block_bytes
        began = clock_ns()
        status = wait(q, post_at(q, source, destination, 0, start, start + block_bytes, done))
        now = clock_ns()
        latencies_ns[done] = now - began
        done += 1
        if status != 0:
            return done, status
        if now - first >= duration_ns:
            break
    return done, 0


@njit(nogil=True)
def pull_whole(
    q: Any, source: Any, destination: Any, nbytes: Any, begin_ns: Any, duration_ns: Any
) -> Any:
    """Pull all in one request, at least once, for a time; return (times, nanoseconds, bad status).

    Sleeps while it waits: the processor is left to what is measured beside it.
    """
    while clock_ns() < begin_ns:
        sleep_ns(_NAP_NS)
    began = clock_ns()
    done = 0
    while True:
        ticket = post_at(q, source, destination, 0, 0, nbytes, done)
        while poll(q, ticket) == PENDING:
            sleep_ns(_NAP_NS)
        status = wait(q, ticket)
        if status != 0:
            return done, clock_ns() - began, status
        done += 1
        if clock_ns() - began >= duration_ns:
            return done, clock_ns() - began, 0


@njit(nogil=True)
def add_up(tile: Any, total: Any, arithmetic: Any) -> Any:
    """Add the elements of a tile to a total, each after some rounds of arithmetic."""
    for i in range(len(tile)):
        value = np.float32(tile[i])
        for _ in range(arithmetic):
            value = np.sqrt(value + np.float32(1.0))
        total += value
    return total


@njit(nogil=True)
def add_up_pulled(
    q: Any, source: Any, destination: Any, tile: Any, tiles: Any, arithmetic: Any
) -> Any:
    """Pull tile after tile into one array, and add each up; (status, total, nanoseconds)."""
    began = clock_ns()
    total = 0.0
    status = 0
    for number in range(tiles):
        start = number * tile.nbytes
        status = pull(q, source, destination, start, start + tile.nbytes, number)
        if status != 0:
            break
        total = add_up(tile, total, arithmetic)
    return status, total, clock_ns() - began


@njit(nogil=True)
def add_up_streamed(q: Any, stream: Any, tiles: Any, arithmetic: Any) -> Any:
    """Add up the first tiles of a stream while the next arrive; (status, total, nanoseconds)."""
    began = clock_ns()
    total = 0.0
    stream_open(q, stream, 0, 0, tiles * stream.tiles.shape[2])
    while True:
        status, _row, tile = stream_next(q, stream, 0)
        if status != 0 or len(tile) == 0:
            break
        total = add_up(tile, total, arithmetic)
    stream_close(q, stream, 0)
    return status, total, clock_ns() - began


@njit(nogil=True)
def add_up_resident(tile: Any, tiles: Any, arithmetic: Any) -> Any:
    """Add up one tile over and over, with nothing to wait for; (total, nanoseconds)."""
    began = clock_ns()
    total = 0.0
    for _ in range(tiles):
        total = add_up(tile, total, arithmetic)
    return total, clock_ns() - began


@njit(nogil=True)
def sleep_again_and_again(sleep: Any, duration_ns: Any) -> Any:
    """Sleep `sleep` nanoseconds at a time, as an idle poller does; return how often."""
    until = clock_ns() + duration_ns
    sleeps = 0
    while clock_ns() < until:
        sleep_ns(sleep)
        sleeps += 1
    return sleeps

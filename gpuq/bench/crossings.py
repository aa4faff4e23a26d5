"""What the queue's crossing between two threads is compared with, on the same memory operations.

`ping` and `pong` hand one word back and forth: no protocol between two cores is faster. The ring
is the bounded queue of many producers and consumers by Dmitry Vyukov (1024cores.net, "Bounded
MPMC queue"), its cells as long as a submission: a sequence and seven words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpuq.compiling import compiled, inlined
from gpuq.kernels.queue import post_at, wait
from gpuq.layout import LINE_WORDS
from gpuq.ordering import (
    as_signed,
    as_word,
    clock_ns,
    compare_exchange,
    load_acquire,
    load_relaxed,
    relax,
    store_release,
)

# Words of `ping` and `pong`, each on a line of its own.
PING = 0
PONG = LINE_WORDS
STOP = 2 * LINE_WORDS
WORDS = 3 * LINE_WORDS

_LOOK_AFTER = 256
"""Crossings between two looks at the clock, which costs as much as some of them."""


@compiled
def ping(words: Any, duration_ns: Any) -> Any:
    """Send numbers and await each one's echo; return (round trips, nanoseconds)."""
    began = clock_ns()
    number = as_signed(load_relaxed(words, PING))
    first = number
    while clock_ns() - began < duration_ns:
        for _ in range(_LOOK_AFTER):
            number += 1
            store_release(words, PING, as_word(number))
            spins = 0
            while as_signed(load_acquire(words, PONG)) != number:
                relax(spins)
                spins += 1
    return number - first, clock_ns() - began


@compiled
def pong(words: Any) -> Any:
    """Echo every number until the STOP word is raised."""
    number = as_signed(load_relaxed(words, PONG)) + 1
    spins = 0
    while load_relaxed(words, STOP) == 0:
        if as_signed(load_acquire(words, PING)) == number:
            store_release(words, PONG, as_word(number))
            number += 1
            spins = 0
        else:
            relax(spins)
            spins += 1


class Ring(NamedTuple):
    """A bounded queue of many producers and consumers.

    Attributes
    ----------
    cells : array of uint64, ``capacity * LINE_WORDS``
        Of each the first word is its sequence: the position that may write it next, or that plus
        one once it is written.
    enqueued, dequeued : array of uint64, ``LINE_WORDS``
        The next position of producers, and of consumers.
    capacity : int
        A power of two.
    """

    cells: Any
    enqueued: Any
    dequeued: Any
    capacity: int


def make_ring(capacity: int) -> Ring:
    """Build an empty ring."""
    cells = np.zeros(capacity * LINE_WORDS, dtype=np.uint64)
    cells[::LINE_WORDS] = np.arange(capacity)
    positions = np.zeros((2, LINE_WORDS), dtype=np.uint64)
    return Ring(cells, positions[0], positions[1], capacity)


@inlined
def try_enqueue(ring: Any, value: Any) -> Any:
    """Put seven words made of `value`; False where the ring is full."""
    position = as_signed(load_relaxed(ring.enqueued, 0))
    while True:
        base = (position & (ring.capacity - 1)) * LINE_WORDS
        ahead = as_signed(load_acquire(ring.cells, base)) - position
        if ahead < 0:
            return False
        if ahead == 0:
            before = as_signed(
                compare_exchange(ring.enqueued, 0, as_word(position), as_word(position + 1))
            )
            if before == position:
                for word in range(1, LINE_WORDS):
                    ring.cells[base + word] = as_word(value)
                store_release(ring.cells, base, as_word(position + 1))
                return True
            position = before
        else:
            position = as_signed(load_relaxed(ring.enqueued, 0))


@inlined
def try_dequeue(ring: Any) -> Any:
    """Take the oldest entry; return the sum of its words, -1 where the ring is empty."""
    position = as_signed(load_relaxed(ring.dequeued, 0))
    while True:
        base = (position & (ring.capacity - 1)) * LINE_WORDS
        ahead = as_signed(load_acquire(ring.cells, base)) - (position + 1)
        if ahead < 0:
            return -1
        if ahead == 0:
            before = as_signed(
                compare_exchange(ring.dequeued, 0, as_word(position), as_word(position + 1))
            )
            if before == position:
                total = 0
                for word in range(1, LINE_WORDS):
                    total += as_signed(ring.cells[base + word])
                store_release(ring.cells, base, as_word(position + ring.capacity))
                return total
            position = before
        else:
            position = as_signed(load_relaxed(ring.dequeued, 0))


@compiled
def cross_rings(there: Any, back: Any, depth: Any, duration_ns: Any) -> Any:
    """Keep `depth` entries on their way there and back; return (done, nanoseconds, in order).

    The last says whether the entries came back unchanged and in order.
    """
    began = clock_ns()
    sent = 0
    done = 0
    spins = 0
    in_order = True
    go = True
    while go or done < sent:
        if go and sent - done < depth and try_enqueue(there, sent):
            sent += 1
            continue
        value = try_dequeue(back)
        if value < 0:
            relax(spins)
            spins += 1
            continue
        spins = 0
        in_order = in_order and value == (LINE_WORDS - 1) ** 2 * done
        done += 1
        if done % _LOOK_AFTER == 0:
            go = clock_ns() - began < duration_ns
    return done, clock_ns() - began, in_order


@compiled
def send_back(there: Any, back: Any, words: Any) -> Any:
    """Move entries from one ring to the other until the STOP word is raised."""
    spins = 0
    while load_relaxed(words, STOP) == 0:
        value = try_dequeue(there)
        if value < 0:
            relax(spins)
            spins += 1
            continue
        spins = 0
        while not try_enqueue(back, value):
            relax(0)


@compiled
def cross_queue(
    q: Any,
    source: Any,
    destination: Any,
    nbytes: Any,
    depth: Any,
    duration_ns: Any,
    tickets: Any,
) -> Any:
    """Keep `depth` requests of `nbytes` in flight; return (done, nanoseconds, first bad status).

    Parameters
    ----------
    tickets : array of int64, shape (depth,)
    """
    began = clock_ns()
    posted = 0
    done = 0
    newest = 0
    oldest = 0
    bad = 0
    go = True
    while go or done < posted:
        if go and posted - done < depth:
            tickets[newest] = post_at(q, source, destination, 0, 0, nbytes, posted)
            newest = newest + 1 if newest + 1 < depth else 0
            posted += 1
            continue
        status = wait(q, tickets[oldest])
        oldest = oldest + 1 if oldest + 1 < depth else 0
        if status != 0 and bad == 0:
            bad = status
        done += 1
        if done % _LOOK_AFTER == 0:
            go = bad == 0 and clock_ns() - began < duration_ns
    return done, clock_ns() - began, bad

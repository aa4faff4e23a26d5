"""The kernels that tests share, and how they are compiled.

Each body is plain Python: the simulator runs it as it is, Numba compiles it for the CPU. They
are few and have one signature each, since each costs a second or two to compile. `compiled_kernel`
caches them between runs, under a key made of gpuq's sources and of the kernel's own file.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

import gpuq
from gpuq import compiling
from gpuq.kernels import queue as protocol
from gpuq.ordering import as_word, fetch_add, load_acquire, relax, store_release

OK = int(gpuq.Status.OK)
STALE = int(gpuq.Status.STALE)
TIMED_OUT = int(gpuq.Status.TIMED_OUT)


@functools.cache
def _key(path: str) -> str:
    sources = compiling.source_key().encode() + Path(path).read_bytes()
    return hashlib.sha256(sources).hexdigest()


class _KernelCacheImpl(compiling.CompileResultCacheImpl):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.locator.get_source_stamp = lambda: _key(function.__code__.co_filename)


class _KernelCache(compiling.FunctionCache):
    _impl_class = _KernelCacheImpl


def compiled_kernel(body: Callable[..., Any]) -> Any:
    """Compile a body for the CPU, without the interpreter lock."""
    dispatcher = njit(nogil=True)(body)
    dispatcher._cache = _KernelCache(body)
    return dispatcher


def pull_slices_body(q, source, destination, slices, tickets, statuses):
    """Pull each row ``(start, end, offset)`` of `slices`, up to ``len(tickets)`` in flight.

    They are waited for newest first within each batch, so answers are not consumed in order.
    While it holds a ticket it must not block for a slot; see `gpuq.kernels.queue`.
    """
    depth = len(tickets)
    done = 0
    while done < len(slices):
        batch = 0
        while batch < depth and done + batch < len(slices):
            n = done + batch
            start, end, offset = slices[n, 0], slices[n, 1], slices[n, 2]
            if batch == 0:
                ticket = gpuq.post_at(q, source, destination, offset, start, end, n)
            else:
                ticket = gpuq.try_post_at(q, source, destination, offset, start, end, n)
                if ticket < 0:
                    break
            tickets[batch] = ticket
            batch += 1
        for i in range(batch - 1, -1, -1):
            statuses[done + i] = gpuq.wait(q, tickets[i])
        done += batch


def pull_until_refused_body(q, source, destination, nbytes, tickets, words):
    """Keep up to ``len(tickets)`` pulls of the first `nbytes` in flight until one is not OK.

    ``words[0]`` counts those that were OK, so that another thread can wait for progress. Returns
    the status that ended it.
    """
    depth = len(tickets)
    first = 0
    held = 0
    status = OK
    while status == OK:
        if held == 0:
            tickets[first] = gpuq.post(q, source, destination, 0, nbytes, 0)
            held = 1
        while held < depth:
            ticket = gpuq.try_post(q, source, destination, 0, nbytes, 0)
            if ticket < 0:
                break
            tickets[(first + held) % depth] = ticket
            held += 1
        status = gpuq.wait(q, tickets[first])
        first = (first + 1) % depth
        held -= 1
        store_release(words, 0, words[0] + as_word(1))
    for i in range(held):
        gpuq.wait(q, tickets[(first + i) % depth])
    return status


def wait_in_steps_body(q, ticket, step_ns, words):
    """Wait with time-outs of `step_ns` until the answer is there, counting them in ``words[0]``."""
    while True:
        status = gpuq.wait_for(q, ticket, step_ns)
        if status != TIMED_OUT:
            return status
        store_release(words, 0, load_acquire(words, 0) + as_word(1))


def post_many_body(q, meeting, tickets):
    """Meet the other threads, then post as many requests as there are `tickets`."""
    meet(meeting, 1)
    for i in range(len(tickets)):
        tickets[i] = gpuq.try_post(q, 1, 2, 3, 4, i)


def wait_many_body(q, meeting, statuses):
    """Wait for tickets 0, 1, 2, ... in turn, meeting the other threads before each."""
    for ticket in range(len(statuses)):
        meet(meeting, ticket + 1)
        statuses[ticket] = gpuq.wait(q, ticket)


@compiling.inlined
def meet(meeting, times):
    """Spin until each of ``meeting[0]`` threads has been here `times` times."""
    fetch_add(meeting, 1, as_word(1))
    spins = 0
    while load_acquire(meeting, 1) < meeting[0] * as_word(times):
        relax(spins)
        spins += 1


pull_slices = compiled_kernel(pull_slices_body)
pull_until_refused = compiled_kernel(pull_until_refused_body)
wait_in_steps = compiled_kernel(wait_in_steps_body)
post_many = compiled_kernel(post_many_body)
wait_many = compiled_kernel(wait_many_body)


# The protocol's functions one by one, callable from Python in their compiled form.


def _post_at(q, source, destination, offset, start, end, tag):
    return gpuq.post_at(q, source, destination, offset, start, end, tag)


def _post(q, source, destination, start, end, tag):
    return gpuq.post(q, source, destination, start, end, tag)


def _try_post_at(q, source, destination, offset, start, end, tag):
    return gpuq.try_post_at(q, source, destination, offset, start, end, tag)


def _try_post(q, source, destination, start, end, tag):
    return gpuq.try_post(q, source, destination, start, end, tag)


def _pull_at(q, source, destination, offset, start, end, tag):
    return gpuq.pull_at(q, source, destination, offset, start, end, tag)


def _pull(q, source, destination, start, end, tag):
    return gpuq.pull(q, source, destination, start, end, tag)


def _poll(q, ticket):
    return gpuq.poll(q, ticket)


def _wait(q, ticket):
    return gpuq.wait(q, ticket)


def _wait_for(q, ticket, timeout_ns):
    return gpuq.wait_for(q, ticket, timeout_ns)


def _errno_of(q, ticket):
    return gpuq.errno_of(q, ticket)


def _claim(q):
    return protocol.claim(q)


class Compiled:
    """`gpuq`'s kernel functions, each compiled for the CPU."""

    name = "compiled"
    post_at = staticmethod(compiled_kernel(_post_at))
    post = staticmethod(compiled_kernel(_post))
    try_post_at = staticmethod(compiled_kernel(_try_post_at))
    try_post = staticmethod(compiled_kernel(_try_post))
    pull_at = staticmethod(compiled_kernel(_pull_at))
    pull = staticmethod(compiled_kernel(_pull))
    poll = staticmethod(compiled_kernel(_poll))
    wait = staticmethod(compiled_kernel(_wait))
    wait_for = staticmethod(compiled_kernel(_wait_for))
    errno_of = staticmethod(compiled_kernel(_errno_of))
    claim = staticmethod(compiled_kernel(_claim))


class Plain:
    """`gpuq`'s kernel functions as the simulator runs them."""

    name = "plain"
    post_at = staticmethod(gpuq.post_at)
    post = staticmethod(gpuq.post)
    try_post_at = staticmethod(gpuq.try_post_at)
    try_post = staticmethod(gpuq.try_post)
    pull_at = staticmethod(gpuq.pull_at)
    pull = staticmethod(gpuq.pull)
    poll = staticmethod(gpuq.poll)
    wait = staticmethod(gpuq.wait)
    wait_for = staticmethod(gpuq.wait_for)
    errno_of = staticmethod(gpuq.errno_of)
    claim = staticmethod(protocol.claim)

"""The soak's kernel body: groups of requests, counted, waited for, or waited for in small steps."""

from __future__ import annotations

from typing import Any

from gpuq.kernels.counters import post_counted_at, wait_counter
from gpuq.kernels.queue import post_at, try_post_at, wait, wait_for
from gpuq.layout import Status

# Kinds of a group.
WAITED = 0
WAITED_IN_STEPS = 1
COUNTED = 2
KINDS = 3

# Columns of a request.
SOURCE, DESTINATION, OFFSET, START, END = range(5)
REQUEST_WORDS = 5

DEPTH = 8
"""Requests of a group that are in flight at once, where they are waited for."""

STEP_NS = 20_000
_OK = int(Status.OK)
_TIMED_OUT = int(Status.TIMED_OUT)


def soak_body(
    index: Any,
    size: Any,
    q: Any,
    requests: Any,
    firsts: Any,
    kinds: Any,
    tickets: Any,
    statuses: Any,
    outcomes: Any,
) -> None:
    """Serve the group of this index: requests ``firsts[index]`` to ``firsts[index + 1]``.

    `statuses` are those of the single requests; of a counted one only whether it was posted.
    `outcomes` is what the group's counter said, OK for other groups.
    """
    first = firsts[index]
    last = firsts[index + 1]
    if kinds[index] == COUNTED:
        posted = 0
        for n in range(first, last):
            r = requests[n]
            statuses[n] = post_counted_at(
                q, index, r[SOURCE], r[DESTINATION], r[OFFSET], r[START], r[END], n
            )
            if statuses[n] == _OK:
                posted += 1
        outcomes[index] = wait_counter(q, index, posted)
        return
    outcomes[index] = _OK
    done = first
    while done < last:
        held = 0
        while held < DEPTH and done + held < last:
            n = done + held
            r = requests[n]
            # Only who holds no ticket may wait for a slot, see `gpuq.kernels.queue`.
            if held == 0:
                tickets[n] = post_at(q, r[SOURCE], r[DESTINATION], r[OFFSET], r[START], r[END], n)
            else:
                tickets[n] = try_post_at(
                    q, r[SOURCE], r[DESTINATION], r[OFFSET], r[START], r[END], n
                )
                if tickets[n] < 0:
                    break
            held += 1
        for i in range(held - 1, -1, -1):
            n = done + i
            if kinds[index] == WAITED:
                statuses[n] = wait(q, tickets[n])
            else:
                statuses[n] = _TIMED_OUT
                while statuses[n] == _TIMED_OUT:
                    statuses[n] = wait_for(q, tickets[n], STEP_NS)
        done += held

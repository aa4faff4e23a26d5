"""The configurations that are searched: a system, its size, and how far the search goes."""

from __future__ import annotations

from typing import Any

from gpuq.host.copier import HOST_MEMORY
from gpuq.layout import State, Status
from gpuq.testing.explore.kernel_ring import BUSY, LOST_RING, PARTLY
from gpuq.testing.explore.ledger import ABORTED, OK
from gpuq.testing.explore.machine import (
    BROKEN,
    INTERRUPTED,
    INVALID_COPY,
    LOST_COPY,
    LOST_EVENT,
    REFUSED,
    SHORT,
)
from gpuq.testing.explore.scenarios import (
    abandoned,
    counted,
    counted_ends,
    counted_mix,
    counted_shares,
    end_of_file,
    ends,
    fairness,
    neighbours,
    neighbours_end,
    onlooker,
    pieces,
    post_timeout,
    promised,
    pulls,
    reopened,
    rings,
    split,
    try_posts,
    two_files,
    two_waiters,
    unregistered,
    wait_timeout,
)
from gpuq.testing.explore.schedule import Bounds
from gpuq.testing.explore.search import Configuration

_EVERY_STATUS = (OK, int(Status.READ_FAILED))
_QUICK_TO_SLEEP = {"threads._SPINS_BEFORE_SLEEP": 1}
_QUICK_TO_WAIT = {**_QUICK_TO_SLEEP, "poller._YIELD_AFTER": 0, "poller._SLEEP_AFTER": 2}
_EAGER = {"queue._SPINS_PER_LOOK": 1, "counters._SPINS_PER_LOOK": 1}
"""A spin that looks at STATE only now and then would seem not to wait for it."""
_STRAIGHT = {"reader": "device", "straight_bytes": 2, "kind": HOST_MEMORY}
_MERGING = {"reader": "device", "capacity": 4, "buffers": 3, "merge_bytes": 4}
_RING = {"reader": "threads", "has_poller": False}

_ALL: tuple[tuple[Any, ...], ...] = (
    # name, fibers, bounds, bounds of the long form, stage, constants
    ("pull, 1 slot", pulls(2, 2), Bounds(2), Bounds(3), {"capacity": 1}),
    ("pull, 2 slots", pulls(2, 2), Bounds(2), Bounds(3), {"capacity": 2}),
    ("pull, 4 slots", pulls(2, 2), Bounds(1, 1), Bounds(2), {"capacity": 4}),
    ("pull, 3 producers", pulls(3, 1), Bounds(2), Bounds(3), {"capacity": 2}),
    ("pull, 2**32 tickets", pulls(2, 2), Bounds(1, 1), Bounds(2), {"first": 2**32 - 2}),
    ("split", split, Bounds(2), Bounds(3), {}),
    ("two waiters", two_waiters, Bounds(2), Bounds(3), {"capacity": 1}),
    ("onlooker", onlooker, Bounds(2), Bounds(3), {"capacity": 1}),
    ("try_post, few slots", try_posts(3), Bounds(2), Bounds(3), {"capacity": 2}),
    ("try_post, enough slots", try_posts(3), Bounds(1, 1), Bounds(2), {"capacity": 4}),
    ("post time-out", post_timeout, Bounds(2), Bounds(3), {"capacity": 1}),
    ("wait time-out", wait_timeout, Bounds(2), Bounds(3), {"capacity": 1}),
    ("abandoned ticket", abandoned, Bounds(2), Bounds(3), {"capacity": 4}),
    ("counted", counted, Bounds(2), Bounds(3), {}),
    ("counted and pulled", counted_mix, Bounds(2), Bounds(3), {"capacity": 1}),
    ("counted, shared", counted_shares, Bounds(2), Bounds(3), {}),
    (
        "pieces, short reads",
        pieces((1, 10), (12, 13)),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {"reader": "device", "read_faults": (SHORT, INTERRUPTED), "must_be_direct": True},
    ),
    (
        "pieces, a broken one",
        pieces((0, 12), (12, 14), statuses=_EVERY_STATUS),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {"reader": "device", "read_faults": (BROKEN,)},
    ),
    (
        "pieces, no direct reads",
        pieces((1, 7), (8, 10)),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {"reader": "device", "read_faults": (REFUSED,)},
    ),
    (
        "end of file",
        end_of_file,
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {"file_bytes": 13, "read_faults": (SHORT,), "must_be_direct": True},
    ),
    (
        "straight",
        pieces((0, 7), (9, 14)),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {**_STRAIGHT, "read_faults": (SHORT, INTERRUPTED), "must_be_direct": True},
    ),
    (
        "straight, a broken one",
        pieces((0, 7), (9, 14), statuses=_EVERY_STATUS),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {**_STRAIGHT, "read_faults": (BROKEN, REFUSED)},
    ),
    ("straight, closing", ends(State.CLOSING, span=6), Bounds(1, 1), Bounds(2), _STRAIGHT),
    ("straight, abort", ends(State.ABORTED, span=6), Bounds(1, 1), Bounds(2), _STRAIGHT),
    (
        "straight, destination let go",
        unregistered,
        Bounds(1, 1),
        Bounds(2),
        {**_STRAIGHT, "has_host": True},
    ),
    (
        "neighbours",
        neighbours((0, 1), (1, 3), (3, 4)),
        Bounds(1, 1),
        Bounds(2),
        {**_MERGING, "has_engine": True},
    ),
    (
        "neighbours, faults",
        neighbours((0, 1), (1, 3), (3, 4), statuses=_EVERY_STATUS),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {**_MERGING, "read_faults": (SHORT, INTERRUPTED, BROKEN), "must_be_direct": True},
    ),
    (
        "neighbours, no direct reads",
        neighbours((0, 1), (1, 3), (3, 4)),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {**_MERGING, "read_faults": (REFUSED,)},
    ),
    (
        "neighbours, end of file",
        neighbours((0, 1), (1, 3), (3, 4)),
        Bounds(1, 1),
        Bounds(2),
        {**_MERGING, "file_bytes": 3},
    ),
    ("neighbours of two files", two_files, Bounds(1, 1), Bounds(2), {**_MERGING, "has_host": True}),
    (
        "neighbours, copies that fail",
        neighbours((0, 2), (2, 4), statuses=(OK, int(Status.COPY_FAILED))),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {**_MERGING, "has_engine": True, "driver_faults": (INVALID_COPY,)},
    ),
    (
        "neighbours, copies that are lost",
        pieces((0, 2), (2, 4), statuses=(OK, ABORTED)),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=1),
        {
            **_MERGING,
            "has_engine": True,
            "driver_faults": (LOST_COPY, LOST_EVENT),
            "may_fail": True,
        },
    ),
    (
        "neighbours, closing",
        neighbours_end(State.CLOSING),
        Bounds(1, 1),
        Bounds(2),
        {**_MERGING, "has_engine": True},
    ),
    (
        "neighbours, abort",
        neighbours_end(State.ABORTED),
        Bounds(1, 1),
        Bounds(2),
        {**_MERGING, "has_engine": True},
    ),
    ("fairness", fairness, Bounds(2), Bounds(3), {"buffers": 1}),
    (
        "copies",
        pieces((0, 6), (6, 8), (8, 9)),
        Bounds(1, 1),
        Bounds(2),
        {"reader": "device", "has_engine": True, "capacity": 4},
    ),
    (
        "copies, two producers",
        pulls(2, 2),
        Bounds(1, 1),
        Bounds(2),
        {"has_engine": True},
    ),
    (
        "copies that fail",
        pieces((0, 6), (6, 8), statuses=(OK, int(Status.COPY_FAILED))),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {"has_engine": True, "driver_faults": (INVALID_COPY,)},
    ),
    (
        "copies that are lost",
        pieces((0, 6), (6, 8), statuses=(OK, ABORTED)),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=1),
        {"has_engine": True, "driver_faults": (LOST_COPY, LOST_EVENT), "may_fail": True},
    ),
    ("closing", ends(State.CLOSING, rounds=2), Bounds(2), Bounds(3), {}),
    ("closing, promised", promised, Bounds(1, 1, stale=1), Bounds(2, stale=2), {}),
    ("abort", ends(State.ABORTED, rounds=2), Bounds(2), Bounds(3), {}),
    ("closing and abort", ends(State.CLOSING, State.ABORTED), Bounds(2), Bounds(3), {}),
    (
        "closing, reads and copies",
        ends(State.CLOSING, span=6),
        Bounds(1, 1),
        Bounds(2),
        {"reader": "device", "has_engine": True},
    ),
    ("abort, copies", ends(State.ABORTED), Bounds(1, 1), Bounds(2), {"has_engine": True}),
    (
        "abort, reads and copies",
        ends(State.ABORTED, span=6),
        Bounds(1, 1),
        Bounds(2),
        {"reader": "device", "has_engine": True},
    ),
    ("counted, closing", counted_ends(State.CLOSING), Bounds(2), Bounds(3), {}),
    ("counted, abort", counted_ends(State.ABORTED), Bounds(2), Bounds(3), {}),
    ("source closed", reopened, Bounds(2), Bounds(3), {"has_host": True}),
    (
        "source closed, reads",
        reopened,
        Bounds(1, 1),
        Bounds(2),
        {"has_host": True, "reader": "device"},
    ),
    (
        "source closed, stale loads",
        reopened,
        Bounds(1, stale=1),
        Bounds(2, stale=2),
        {"has_host": True},
    ),
    ("destination let go", unregistered, Bounds(2), Bounds(3), {"has_host": True}),
    ("rings", rings(4), Bounds(1, 1), Bounds(2), _RING, _QUICK_TO_SLEEP),
    (
        "rings, one worker",
        rings(3),
        Bounds(2),
        Bounds(3),
        {**_RING, "workers": 1},
        _QUICK_TO_SLEEP,
    ),
    (
        "rings, stale loads",
        rings(4),
        Bounds(1, stale=1),
        Bounds(2, stale=1),
        _RING,
        _QUICK_TO_SLEEP,
    ),
    (
        "io_uring",
        pieces((0, 6), (6, 8)),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=2),
        {"reader": "deferred io_uring", "read_faults": (SHORT,)},
    ),
    (
        "io_uring that is busy",
        pieces((0, 6), (6, 8)),
        Bounds(0, 1, faults=2),
        Bounds(2, faults=2),
        {"reader": "io_uring", "read_faults": (BUSY, PARTLY)},
    ),
    (
        "io_uring that fails",
        pieces((0, 6), (6, 8), statuses=(OK, ABORTED)),
        Bounds(1, 1, faults=1),
        Bounds(2, faults=1),
        {"reader": "deferred io_uring", "read_faults": (LOST_RING,), "may_fail": True},
    ),
    (
        "io_uring, waiting",
        pulls(2, 1),
        Bounds(1, 1),
        Bounds(2),
        {"reader": "deferred io_uring"},
        _QUICK_TO_WAIT,
    ),
    (
        "threads reader",
        pulls(2, 1),
        Bounds(1, 1),
        Bounds(2),
        {"reader": "threads"},
        _QUICK_TO_SLEEP,
    ),
    (
        "threads reader, waiting",
        pieces((0, 6), (6, 8)),
        Bounds(1, 1),
        Bounds(2),
        {"reader": "threads"},
        _QUICK_TO_WAIT,
    ),
    ("pull, stale loads", pulls(2, 2), Bounds(1, stale=1), Bounds(2, stale=1), {}),
    ("split, stale loads", split, Bounds(1, stale=1), Bounds(2, stale=1), {}),
    ("counted, stale loads", counted, Bounds(1, stale=1), Bounds(2, stale=1), {}),
    ("closing, stale loads", ends(State.CLOSING), Bounds(1, stale=1), Bounds(2, stale=1), {}),
)

CONFIGURATIONS = {
    name: Configuration(
        name, build, short, long, stage, {**_EAGER, **(constants[0] if constants else {})}
    )
    for name, build, short, long, stage, *constants in _ALL
}

"""A request's time, divided into what it waited for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PHASES = ("waiting for a buffer", "reading", "waiting for a copy", "copying")
"""In their order; together they are the time from admission to completion."""

_STEPS = ("admitted_ns", "first_read_ns", "last_read_ns", "copy_ns", "completed_ns")


def steps_of(records: Any) -> NDArray[np.int64]:
    """Return when each phase of each request began, and when the last one ended.

    A step that did not happen is taken to have happened at the completion: a request that was
    aborted while it waited for a buffer did nothing else. A request of many pieces reads on
    while its first ones are copied, and all that counts as reading.

    Returns
    -------
    array of int64, shape (requests, phases + 1)
        In nanoseconds; never falling from column to column.
    """
    completed = records["completed_ns"]
    steps = np.empty((len(records), len(_STEPS)), np.int64)
    for column, name in enumerate(_STEPS):
        steps[:, column] = np.where(records[name] == 0, completed, records[name])
    np.minimum(steps, completed[:, None], out=steps)
    return np.maximum.accumulate(steps, axis=1)


def in_order_of_admission(records: Any) -> Any:
    """Return records sorted by the time of their admission."""
    return records[np.argsort(records["admitted_ns"], kind="stable")]


def was_read(records: Any) -> NDArray[np.bool_]:
    """Say of each request whether a read was made for it, be it a neighbour's."""
    return np.asarray(records["first_read_ns"] != 0)


def depths_of(records: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many requests were admitted and not completed, over time.

    Returns
    -------
    times : array of int64
        In nanoseconds, rising; when the number changed.
    depths : array of int64
        From that time on.
    """
    changes = np.concatenate([records["admitted_ns"], records["completed_ns"]])
    by = np.repeat(np.array([1, -1], np.int64), len(records))
    # Of what happens at once, completions come first: they made room for admissions.
    order = np.lexsort((by, changes))
    times, last = np.unique(changes[order][::-1], return_index=True)
    depths = np.cumsum(by[order])
    return times, depths[len(changes) - 1 - last]

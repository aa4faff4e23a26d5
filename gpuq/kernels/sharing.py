"""How workers divide work: one formula, so that no kernel has to invent it."""

from __future__ import annotations

from typing import Any

from gpuq.compiling import protocol
from gpuq.ordering import as_signed


@protocol
def share(total: Any, worker: Any, workers: Any) -> Any:
    """Return the part ``(first, last)`` of `total` things that a worker takes.

    The parts of all workers lie one behind the other, cover ``[0, total)``, and differ in size by
    at most one; where there are more workers than things, some are empty.

    Parameters
    ----------
    total : int
        How many things there are: rows of a matrix, indices, files.
    worker, workers : int
        Number of the caller, from 0, and how many share: what a body that `Loader.launch` runs
        gets as its first two arguments.

    Returns
    -------
    first, last : int
        `last` is one past the last.
    """
    every, left = as_signed(total) // as_signed(workers), as_signed(total) % as_signed(workers)
    first = as_signed(worker) * every + min(as_signed(worker), left)
    return first, first + every + (1 if as_signed(worker) < left else 0)

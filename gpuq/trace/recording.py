"""A trace of a long job: what stands in the ring is taken again and again, and saved in the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from gpuq.errors import ConfigError
from gpuq.host.taken import Trace, join
from gpuq.loader import Loader
from gpuq.trace.files import save

RECORDS = 1 << 18
"""Of the ring of such a job: more than a poller answers between two calls."""


def check_apart(path: str | None, others: Iterable[str]) -> None:
    """Refuse to write over a file that is read.

    Raises
    ------
    ConfigError
    """
    if path is None or not os.path.exists(path):
        return
    if any(os.path.exists(other) and os.path.samefile(path, other) for other in others):
        raise ConfigError(f"{path}: this file is read, and would be written over")


@contextmanager
def recorded(
    loader: Loader, path: str | None, tell: Callable[[Trace], None]
) -> Iterator[Callable[[], None]]:
    """Yield a function to call now and then; save the trace in the end, however the job ended.

    Parameters
    ----------
    loader : Loader
        With a ring, where there is a path.
    path : str or None
        None: do nothing.
    tell : callable
        Given the trace that was saved.

    Raises
    ------
    OSError
        The file cannot be written. Before the job, unless that came about meanwhile.
    """
    if path is None:
        yield lambda: None
        return
    open(path, "ab").close()
    taken = [loader.trace()]

    def take() -> None:
        trace = loader.trace()
        if len(trace):
            taken.append(trace)

    try:
        yield take
    finally:
        taken.append(loader.trace())
        whole = join(taken)
        save(whole, path)
    tell(whole)

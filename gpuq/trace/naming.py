"""The names that stand for the numbers in a record."""

from __future__ import annotations

from gpuq.host.taken import Trace
from gpuq.host.tracing import (
    BY_BUFFERED_READ,
    BY_DIRECT_READ,
    BY_NEIGHBOURS_READ,
    FELL_BACK,
    READ_ON,
    WENT_STRAIGHT,
)
from gpuq.layout import Status

NO_READ = "no read"
"""The path of a request that was answered without one: it was empty, refused, or aborted."""

_PATHS = {
    BY_DIRECT_READ: "direct",
    BY_BUFFERED_READ: "buffered",
    BY_NEIGHBOURS_READ: "neighbour's read",
    READ_ON: "read on",
    FELL_BACK: "fell back",
    WENT_STRAIGHT: "straight",
}


def name_path(path: int) -> str:
    """Return how a request's bytes came, like ``direct + read on``."""
    return " + ".join(name for bit, name in _PATHS.items() if path & bit) or NO_READ


def name_status(status: int) -> str:
    """Return the name of a status; a number that is none stays one."""
    try:
        return Status(status).name
    except ValueError:
        return f"status {status}"


def name_source(trace: Trace, handle: int) -> str:
    """Return the path of a source, or its handle where no source had it."""
    return trace.sources.get(handle, f"handle {handle:#x}")

"""Exceptions, by whose fault: you misused it, the world broke, or the queue ended.

What the operating system says about a path stays the `OSError` that it is, with its `filename`.
A kernel cannot raise: what goes wrong there is a `gpuq.Status`.
"""

from __future__ import annotations

import os
from typing import Any


class GpuqError(Exception):
    """Base of everything that gpuq itself raises."""


class ConfigError(GpuqError, ValueError):
    """A setting is out of its range, or contradicts another. Nothing was started."""


class SourceError(GpuqError, ValueError):
    """A source cannot be opened, or is not of this loader. Nothing was registered."""


class DestinationError(GpuqError, ValueError):
    """An array cannot be a destination, or is not of this loader. Nothing was registered."""


class FormatError(GpuqError, ValueError):
    """A file's content contradicts its format."""


class ReadError(GpuqError, OSError):
    """Bytes that the host asked for did not arrive.

    Attributes
    ----------
    path : str
    start, end : int
        What was asked for, in bytes.
    status : Status
        What a kernel would have been told.
    errno : int or None
        Of the system, where the status is ``READ_FAILED``.
    """

    def __init__(self, path: str, start: int, end: int, status: Any, errno: int | None) -> None:
        reason = f" ({os.strerror(errno)})" if errno else ""
        super().__init__(f"{path}: bytes {start} to {end}: {status.name}{reason}")
        self.path = self.filename = path
        self.start = start
        self.end = end
        self.status = status
        self.errno = errno

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.start, self.end, self.status, self.errno)


class MemoryLimitError(GpuqError, MemoryError):
    """Arrays would take more memory than the caller allows. Nothing was allocated.

    Attributes
    ----------
    nbytes, limit : int
        What the arrays take together, and what is allowed.
    """

    def __init__(self, what: str, nbytes: int, limit: int) -> None:
        super().__init__(f"{what} takes {nbytes} bytes, and memory_limit is {limit}")
        self.what = what
        self.nbytes = nbytes
        self.limit = limit

    def __reduce__(self) -> Any:
        return type(self), (self.what, self.nbytes, self.limit)


class DirectUnavailableError(GpuqError, OSError):
    """Direct reads were required and do not work for this file."""


class ReaderUnavailableError(GpuqError, OSError):
    """The reader that was asked for does not work on this machine."""


class TargetUnavailableError(GpuqError, RuntimeError):
    """The target that was asked for does not work on this machine."""


class ClosedError(GpuqError, RuntimeError):
    """The loader was closed or aborted before this call."""


class ForkedError(GpuqError, RuntimeError):
    """The loader belongs to the parent process; a forked child must make its own."""


class PollerDiedError(GpuqError, RuntimeError):
    """The poller thread ended by an error; the queue was aborted. The cause is chained."""

"""The contract of a copier, what moves staging to a destination, and the one for host memory.

A copier is a NamedTuple, and these two functions are implemented for its type. They are compiled
and called by the poller alone, once to start a lease's copy and then until it was seen complete.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpuq.compiling import contract, implements
from gpuq.host.libc import copy_memory

COPY_DONE = 1
COPY_UNDER_WAY = 0
COPY_FAILED = -1
"""Nothing was started, or what was started is known to be over; the buffer may be used again."""
COPY_UNCERTAIN = -2
"""The copy may still read the buffer; it must not be used again and the queue must end."""


@contract
def start_copy(copier: Any, lease: Any, destination: Any, source: Any, nbytes: Any) -> Any:
    """Start the copy of a lease's bytes between two addresses; return one of the COPY codes."""
    raise NotImplementedError


@contract
def look_at_copy(copier: Any, lease: Any) -> Any:
    """Say how the copy that a lease started stands; return one of the COPY codes."""
    raise NotImplementedError


class MemcpyCopier(NamedTuple):
    """Copies in host memory, at once.

    Attributes
    ----------
    name : int
        Nothing; a NamedTuple with no field is no Numba type.
    """

    name: int = 0


@implements(start_copy, MemcpyCopier)
def _start_memcpy(copier: Any, lease: Any, destination: Any, source: Any, nbytes: Any) -> Any:
    copy_memory(destination, source, nbytes)
    return COPY_DONE


@implements(look_at_copy, MemcpyCopier)
def _look_at_memcpy(copier: Any, lease: Any) -> Any:
    return COPY_DONE

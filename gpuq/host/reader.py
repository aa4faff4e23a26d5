"""The contract of a reader: what performs reads.

A reader is a NamedTuple of arrays, and these four functions are implemented for its type. They
are compiled and called by the poller alone. A reader accepts as many reads at once as there are
leases, one for each lease, and answers each exactly once, in any order.
"""

from __future__ import annotations

from typing import Any

from gpuq.compiling import contract


@contract
def submit_read(
    reader: Any, lease: Any, descriptor: Any, offset: Any, address: Any, nbytes: Any
) -> None:
    """Take a read of `nbytes` at file `offset` into memory at `address`, for `lease`."""
    raise NotImplementedError


@contract
def flush_reads(reader: Any) -> Any:
    """Hand what was submitted to whatever reads; return 0, or an errno that ends the queue."""
    raise NotImplementedError


@contract
def reap_read(reader: Any) -> Any:
    """Return ``(lease, result)`` of a finished read, ``(-1, 0)`` where none is.

    The result is the number of bytes read or a negative errno. The bytes are visible.
    """
    raise NotImplementedError


@contract
def await_read(reader: Any, timeout_ns: Any) -> None:
    """Sleep until a read may have finished, at most `timeout_ns` nanoseconds."""
    raise NotImplementedError

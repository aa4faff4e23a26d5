"""`bind`: a queue function with source, destination and tag fixed, for shorter kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuq.compiling import protocol
from gpuq.kernels.queue import pull


def bind(
    function: Callable[..., Any] = pull, *, source: Any, destination: Any, tag: int = 0
) -> Callable[..., Any]:
    """Fix the source, destination and tag of a queue function.

    Parameters
    ----------
    function : function, optional
        Any of gpuq's that take ``(q, source, destination, [offset,] start, end, tag)``:
        `gpuq.pull` (the default), `gpuq.post`, `gpuq.pull_block_at` and so on.
    source, destination : int, or Source and Destination
        Handles, or what has one. `Loader.bind` takes names too and has defaults.
    tag : int
        64 bits of the caller's own.

    Returns
    -------
    function
        Takes ``(q, start, end)``, or ``(q, offset, start, end)`` where `function` has an offset.
        Callable in kernels of every target. The handles are constants in it: a kernel compiled
        with it serves as long as they are open.
    """
    from_handle = int(getattr(source, "handle", source))
    to_handle = int(getattr(destination, "handle", destination))
    fixed_tag = int(tag)
    if function.__name__.endswith("_at"):

        def bound_at(q: Any, offset: Any, start: Any, end: Any) -> Any:
            return function(q, from_handle, to_handle, offset, start, end, fixed_tag)

        return protocol(bound_at)

    def bound(q: Any, start: Any, end: Any) -> Any:
        return function(q, from_handle, to_handle, start, end, fixed_tag)

    return protocol(bound)

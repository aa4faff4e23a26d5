"""`bind`: a queue function with source, destination and tag fixed, for shorter kernels."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from gpuq.compiling import protocol
from gpuq.kernels.queue import pull

_FIXED = {"source", "destination", "tag"}
_LEFT = (
    ["q", "start", "end"],
    ["q", "offset", "start", "end"],
    ["q", "counter", "start", "end"],
    ["q", "counter", "offset", "start", "end"],
)


def bind(
    function: Callable[..., Any] = pull, *, source: Any, destination: Any, tag: int = 0
) -> Callable[..., Any]:
    """Fix the source, destination and tag of a queue function.

    Parameters
    ----------
    function : function, optional
        Any of gpuq's that take ``source, destination, [offset,] start, end, tag``: `gpuq.pull`
        (the default), `gpuq.post`, `gpuq.post_counted`, `gpuq.pull_block_at` and so on.
    source, destination : int, or Source and Destination
        Handles, or what has one. `Loader.bind` takes names too and has defaults.
    tag : int
        64 bits of the caller's own.

    Returns
    -------
    function
        Takes what is left: ``(q, start, end)``, with a ``counter`` and an ``offset`` before them
        where `function` has these. Callable in kernels of every target. The handles are constants
        in it: a kernel compiled with it serves as long as they are open.

    Raises
    ------
    TypeError
        `function` asks for no bytes; or a handle or the tag is no integer.
    ValueError
        `tag` has more than 64 bits.
    """
    parameters = list(inspect.signature(function).parameters)
    left = [name for name in parameters if name not in _FIXED]
    if left not in _LEFT or len(left) + len(_FIXED) != len(parameters):
        name = getattr(function, "__name__", repr(function))
        raise TypeError(f"{name} takes no source, destination, start, end and tag to bind")
    from_handle = operator.index(getattr(source, "handle", source))
    to_handle = operator.index(getattr(destination, "handle", destination))
    fixed_tag = operator.index(tag)
    if not -(1 << 63) <= fixed_tag < 1 << 64:
        raise ValueError(f"a tag has 64 bits, and {fixed_tag} has more")

    def bound(q: Any, start: Any, end: Any) -> Any:
        return function(q, from_handle, to_handle, start, end, fixed_tag)

    def bound_at(q: Any, offset: Any, start: Any, end: Any) -> Any:
        return function(q, from_handle, to_handle, offset, start, end, fixed_tag)

    def bound_counted(q: Any, counter: Any, start: Any, end: Any) -> Any:
        return function(q, counter, from_handle, to_handle, start, end, fixed_tag)

    def bound_counted_at(q: Any, counter: Any, offset: Any, start: Any, end: Any) -> Any:
        return function(q, counter, from_handle, to_handle, offset, start, end, fixed_tag)

    forms = (bound, bound_at, bound_counted, bound_counted_at)
    return protocol(forms[_LEFT.index(left)])

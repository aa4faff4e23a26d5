"""How plain functions become compiled ones.

`protocol` makes one plain function callable from compiled code of every target, so that the
protocol has a single source. `compiled` is for functions of the host only: they run without the
interpreter lock and are cached on disk under a key made of gpuq's own sources.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.extending import overload as cpu_overload

Function = TypeVar("Function", bound=Callable[..., Any])

SIMULATED = bool(config.ENABLE_CUDASIM)
"""True under NUMBA_ENABLE_CUDASIM=1; Numba reads the variable once, at import."""


def protocol(function: Function) -> Function:
    """Make `function` callable from `numba.njit` and `numba.cuda.jit` code, and return it as it is.

    The function may call only `gpuq.ordering`'s operations, other protocol functions, and what
    Numba compiles on both targets. Python code and the simulator call it directly.
    """

    # `overload` compares the parameter names of both functions, which `wraps` makes the same.
    @functools.wraps(function)
    def same_source(*_types: Any, **_named_types: Any) -> Function:
        return function

    cpu_overload(function, jit_options={"nogil": True, "_nrt": False}, strict=False)(same_source)
    if not SIMULATED:
        from numba.cuda.extending import overload as cuda_overload

        cuda_overload(function, strict=False)(same_source)
    return function


COMPILED_SOURCES = ("compiling.py", "layout.py", "ordering.py", "host/*.py", "kernels/*.py")
"""Where compiled code and all that it uses stands, by pattern; a test holds this to the imports."""


@functools.cache
def source_key() -> str:
    """Return a digest of every source that compiled code may come from.

    Numba's own cache looks only at the file that holds the decorated function and would go on
    using machine code that an imported module's change has made stale.
    """
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for pattern in COMPILED_SOURCES:
        for path in sorted(package.glob(pattern)):
            digest.update(f"{path.relative_to(package)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class _PackageCacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    """Numba's on-disk cache, its stamp being `source_key` instead of one file."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.locator.get_source_stamp = source_key


class _PackageCache(FunctionCache):  # type: ignore[misc]
    _impl_class = _PackageCacheImpl


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a host function on first call: no interpreter lock held, cached between processes.

    Where no directory can hold a cache (read-only home, say), it is compiled in each process.
    """
    dispatcher = njit(nogil=True, _nrt=False)(function)
    if config.DISABLE_JIT or os.environ.get("GPUQ_CACHE") == "0":
        return dispatcher
    try:
        dispatcher._cache = _PackageCache(function)
    except (OSError, RuntimeError):
        return dispatcher
    return dispatcher


class Contract:
    """A function with one implementation for each type of its first argument.

    Compiled callers are bound to the implementation at compile time, by the NamedTuple class of
    the argument; Python callers at the call. Tests add implementations of their own.
    """

    def __init__(self, declaration: Callable[..., Any]) -> None:
        implementations: dict[type, Callable[..., Any]] = {}

        @functools.wraps(declaration)
        def dispatch(first: Any, *rest: Any) -> Any:
            return implementations[type(first)](first, *rest)

        @functools.wraps(declaration)
        def choose(first: Any, *_rest: Any) -> Any:
            return implementations.get(getattr(first, "instance_class", type(None)))

        if not config.DISABLE_JIT:
            cpu_overload(dispatch, strict=False)(choose)
        self.dispatch = dispatch
        self.implementations = implementations


_contracts: dict[Callable[..., Any], Contract] = {}


def contract(declaration: Function) -> Function:
    """Declare a function whose implementations are given with `implements`."""
    made = Contract(declaration)
    _contracts[made.dispatch] = made
    return made.dispatch  # type: ignore[return-value]


def implements(declared: Callable[..., Any], owner: type) -> Callable[[Function], Function]:
    """Register the decorated plain function as `declared` for first arguments of type `owner`."""

    def register(function: Function) -> Function:
        _contracts[declared].implementations[owner] = function
        return function

    return register

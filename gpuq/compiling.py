"""How plain functions become compiled ones.

============  ==================================================================================
`protocol`    callable from compiled code of every target: the protocol has a single source
              (`protocol_of_arrays` where it returns arrays)
`inlined`     callable from compiled code of the host; a part of some `compiled` function
`compiled`    called by Python: runs without the interpreter lock, cached on disk
`contract`    callable from compiled code of the host, one implementation per type
============  ==================================================================================

Python code calls all but the compiled ones as the plain functions that they stay. Nothing here
owns memory, so compiled code counts no references: a tuple of twenty arrays would count every
one of them at each call.
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
from wrapt import register_post_import_hook

Function = TypeVar("Function", bound=Callable[..., Any])

SIMULATED = bool(config.ENABLE_CUDASIM)
"""True under NUMBA_ENABLE_CUDASIM=1; Numba reads the variable once, at import."""


_PART_OPTIONS = {
    "nogil": True,
    "_nrt": False,
    # A call passes a tuple of twenty arrays as some hundred and fifty words.
    "forceinline": True,
    # Only compiled code calls them; unpacking a tuple of twenty arrays is half the compile time.
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def protocol(function: Function) -> Function:
    """Make `function` callable from `numba.njit` and `numba.cuda.jit` code, and return it as it is.

    The function may call only `gpuq.ordering`'s operations, other protocol functions, and what
    Numba compiles on both targets. Python code and the simulator call it directly.
    """
    inlined(function)
    _overload_for_cuda(function)
    return function


def protocol_of_arrays(function: Function) -> Function:
    """Make a function callable like a `protocol` one that returns views of arrays.

    Its caller owns what is returned, so on the CPU it counts references, unlike the others.
    """
    options = {**_PART_OPTIONS, "_nrt": True}
    cpu_overload(function, jit_options=options, strict=False)(_same_source(function))
    _overload_for_cuda(function)
    return function


def when_cuda(register: Callable[[], Any]) -> None:
    """Call `register` once `numba.cuda` is imported, at once where it is; never in the simulator.

    Who uses the CPU target alone need not wait for it: it takes half of the time that an import
    takes. Whoever compiles a kernel for CUDA has imported it, and then all of this is known there.
    """
    if not SIMULATED:
        register_post_import_hook(lambda _module: register(), "numba.cuda")


def _overload_for_cuda(function: Callable[..., Any]) -> None:
    def register() -> None:
        from numba.cuda.extending import overload as cuda_overload

        cuda_overload(function, strict=False)(_same_source(function))

    when_cuda(register)


def inlined(function: Function) -> Function:
    """Make `function` callable from `compiled` code, and return it as it is."""
    cpu_overload(function, jit_options=_PART_OPTIONS, strict=False)(_same_source(function))
    return function


def _same_source(function: Function) -> Callable[..., Function]:
    # `overload` passes keywords as they were given, and reads the signature that `wraps` shows.
    @functools.wraps(function)
    def choose(*_types: Any, **_named_types: Any) -> Function:
        return function

    return choose


COMPILED_SOURCES = (
    "bench/crossings.py",
    "bench/silent_reader.py",
    "compiling.py",
    "layout.py",
    "ordering.py",
    "reading.py",
    "host/*.py",
    "kernels/*.py",
    "testing/*.py",
)
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
    """Compile a function that Python calls: no interpreter lock held, cached between processes.

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
            cpu_overload(dispatch, jit_options=_PART_OPTIONS, strict=False)(choose)
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

"""One kernel body, three targets: how ``loader.launch`` runs it.

A body takes an index and the size of the grid first, then its own arguments. On CUDA the index is
the block's; in the simulator likewise; on the CPU bodies are compiled and run on threads of the
operating system, a block being one thread. Nothing of CUDA is emulated beyond that.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from numba import int64, njit, typeof

from gpuq.compiling import SIMULATED
from gpuq.host.cuda_device import stream_handle

_LOOK_SECONDS = 0.1
_KEPT_KERNELS = 256


class Launch:
    """Bodies that run on threads of the CPU.

    Parameters
    ----------
    run : function
        Called with (first index, step, size, arguments) in each thread, without the lock.
    size, threads : int
    arguments : tuple
    """

    def __init__(
        self, run: Callable[..., Any], size: int, threads: int, arguments: tuple[Any, ...]
    ) -> None:
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(
                target=self._body,
                args=(run, first, threads, size, arguments),
                daemon=True,
                name=f"gpuq-kernel-{first}",
            )
            for first in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _body(
        self, run: Callable[..., Any], first: int, step: int, size: int, arguments: tuple[Any, ...]
    ) -> None:
        try:
            run(first, step, size, arguments)
        except BaseException as error:
            self._errors.append(error)

    def join(self, timeout: float | None = None) -> None:
        """Wait for all bodies, at most `timeout` seconds; interruptible."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                thread.join(_LOOK_SECONDS)

    def raise_error(self) -> None:
        """Raise what a body raised, the first one's."""
        if self._errors:
            raise self._errors[0]


class _Same:
    """A value that equals only itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _surroundings(body: Callable[..., Any]) -> tuple[_Same, ...]:
    """Return what the names in a body mean now, all of which compiled code takes for constants.

    A body that names a bound function (`Loader.bind`) must be compiled again when that name was
    given another one: handles of two loaders are alike, so it would read the wrong file.
    """
    if not isinstance(body, types.FunctionType):
        return ()
    named = (body.__globals__.get(name) for name in body.__code__.co_names)
    enclosed = (cell.cell_contents for cell in body.__closure__ or ())
    return tuple(_Same(value) for value in (*named, *enclosed))


@functools.lru_cache(_KEPT_KERNELS)
def _cpu_runner(body: Callable[..., Any], _surroundings: tuple[_Same, ...]) -> Any:
    compiled_body = body if hasattr(body, "py_func") else njit(nogil=True)(body)

    @njit(nogil=True)
    def run(first: Any, step: Any, size: Any, arguments: Any) -> None:
        for index in range(first, size, step):
            compiled_body(index, size, *arguments)

    return run


def cuda_kernel(body: Callable[..., Any]) -> Any:
    """Return a `numba.cuda.jit` kernel that runs `body` once for each block.

    It is the same as long as the names in the body mean the same.
    """
    return _cuda_kernel(body, _surroundings(body))


@functools.lru_cache(_KEPT_KERNELS)
def _cuda_kernel(body: Callable[..., Any], _surroundings: tuple[_Same, ...]) -> Any:
    from numba import cuda

    if SIMULATED:
        from gpuq.kernels import simulated

        @cuda.jit
        def simulated_kernel(arguments: Any) -> None:
            body(simulated.block_index(), simulated.grid_size(), *arguments)

        return simulated_kernel

    device_body = body if hasattr(body, "py_func") else cuda.jit(device=True)(body)

    @cuda.jit
    def kernel(arguments: Any) -> None:
        device_body(cuda.blockIdx.x, cuda.gridDim.x, *arguments)

    return kernel


def compile_for_cpu(body: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return a function that runs `body` on some indices, compiled for these arguments."""
    run = _cpu_runner(body, _surroundings(body))
    run.compile((int64, int64, int64, typeof(arguments)))
    return run


def launch_on_cpu(
    body: Callable[..., Any], size: int, arguments: tuple[Any, ...], threads: int | None
) -> Launch:
    """Compile `body` for these arguments, then run it for every index on OS threads."""
    run = compile_for_cpu(body, arguments)
    most = len(os.sched_getaffinity(0)) if threads is None else threads
    return Launch(run, size, min(size, most), arguments)


def launch_on_cuda(
    body: Callable[..., Any],
    size: int,
    arguments: tuple[Any, ...],
    threads_per_block: int,
    stream: Any,
) -> None:
    """Launch `body` on `size` blocks; in the simulator this returns when all have finished."""
    from numba import cuda

    # Numba launches on streams of its own class only.
    on = 0 if SIMULATED or stream is None else cuda.external_stream(stream_handle(stream))
    cuda_kernel(body)[size, threads_per_block, on](arguments)

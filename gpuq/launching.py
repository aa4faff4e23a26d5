"""One kernel body, three targets: how ``loader.launch`` runs it.

A body takes an index and the size of the grid first, then its own arguments. On CUDA the index is
the block's; in the simulator likewise; on the CPU bodies are compiled and run on threads of the
operating system, a block being one thread. Nothing of CUDA is emulated beyond that.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from numba import njit

from gpuq.compiling import SIMULATED
from gpuq.host.cuda_device import stream_handle


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

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for all bodies, at most `timeout` seconds in each; False where one still runs.

        Raises
        ------
        BaseException
            What a body raised, the first one's.
        """
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.1 if timeout is None else timeout)
                if timeout is not None and thread.is_alive():
                    return False
        if self._errors:
            raise self._errors[0]
        return True


@functools.cache
def _cpu_runner(body: Callable[..., Any]) -> Any:
    compiled_body = body if hasattr(body, "py_func") else njit(nogil=True)(body)

    @njit(nogil=True)
    def run(first: Any, step: Any, size: Any, arguments: Any) -> None:
        for index in range(first, size, step):
            compiled_body(index, size, *arguments)

    return run


@functools.cache
def cuda_kernel(body: Callable[..., Any]) -> Any:
    """Return a `numba.cuda.jit` kernel that runs `body` once for each block; cached by body."""
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


def launch_on_cpu(
    body: Callable[..., Any], size: int, arguments: tuple[Any, ...], threads: int | None
) -> Launch:
    """Compile `body` for these arguments, then run it for every index on OS threads."""
    from numba import typeof, types

    run = _cpu_runner(body)
    index = types.int64
    run.compile((index, index, index, typeof(arguments)))
    most = len(os.sched_getaffinity(0)) if threads is None else threads
    return Launch(run, size, max(1, min(size, most)), arguments)


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

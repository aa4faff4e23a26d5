"""Where a queue's memory lives: one contract, a class for each kind of target.

A device gives out memory of four kinds (mapped words, the producers' own words, staging, and
arrays for destinations), checks destinations, and names the copier that reaches them.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numba import typeof
from numpy.typing import NDArray

from gpuq.errors import DestinationError
from gpuq.host.copier import HOST_MEMORY, MemcpyCopier
from gpuq.host.direct_file import MEMORY_ALIGNMENT
from gpuq.host.pages import bring_in, placed_empty

# A forked child gets a copy, and cannot post to its parent's queue.
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@dataclass(frozen=True)
class Region:
    """Memory of a destination.

    Attributes
    ----------
    address : int
    nbytes : int
    owner : object
        Keeps the memory alive.
    kind : int
        HOST_MEMORY or DEVICE_MEMORY.
    """

    address: int
    nbytes: int
    owner: Any
    kind: int = HOST_MEMORY


class Device(Protocol):
    """What the service asks of a device."""

    name: str

    def mapped_words(self, count: int) -> tuple[NDArray[np.uint64], Any]:
        """Return zeroed words that kernels and the host both reach: (host's view, kernels')."""

    def own_words(self, count: int, start: int, step: int) -> Any:
        """Return words of the producers alone, holding ``start + i * step``."""

    def staging(self, nbytes: int) -> Region:
        """Return memory for staging, aligned to 4096 bytes."""

    def copier(self, leases: int) -> Any:
        """Return the copier that reaches this device's destinations."""

    def destination(self, array: Any) -> Region:
        """Return the memory of an array after checking it."""

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an uninitialized array that kernels read and that can be a destination."""

    def filled(self, shape: Any, dtype: Any, value: int) -> Any:
        """Return an array of kernels' own, filled with a value; plain data in every launch."""

    def array(self, values: NDArray[Any]) -> Any:
        """Return a copy of a C-contiguous array that kernels read and write."""

    def to_numpy(self, array: Any) -> NDArray[Any]:
        """Return a copy of an array of kernels, once those that write to it have returned."""

    def prepare(self, kernel: Any, arguments: tuple[Any, ...]) -> Any:
        """Compile and load a kernel for these arguments, so that its first launch loads nothing."""

    def synchronize(self, stream: Any) -> None:
        """Wait, in Python and interruptibly, until a stream's kernels have returned."""

    def settle(self, stream: Any) -> bool:
        """Wait a bounded time for kernels that were told to return; False where they did not."""

    def enter_thread(self) -> None:
        """Prepare the calling thread for serving."""

    def close(self) -> None:
        """Give everything back; no kernel and no copy is running."""


class CpuDevice:
    """Host memory, for kernels compiled for the CPU."""

    name = "cpu"

    def mapped_words(self, count: int) -> tuple[NDArray[np.uint64], Any]:
        """Return zeroed words, page-aligned; both views are one."""
        memory = mmap.mmap(-1, count * 8, flags=_PRIVATE)
        words = np.frombuffer(memory, dtype=np.uint64, count=count)
        return words, words

    def own_words(self, count: int, start: int, step: int) -> NDArray[np.uint64]:
        """Return words holding ``start + i * step``."""
        words, _ = self.mapped_words(count)
        words[:] = np.arange(count, dtype=np.uint64) * np.uint64(step) + np.uint64(start)
        return words

    def staging(self, nbytes: int) -> Region:
        """Return page-aligned memory, its pages present, and large where the system has such.

        A direct read pins each page and hands each to the device by itself.
        """
        mapping = mmap.mmap(-1, nbytes, flags=_PRIVATE)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        # A fork while a direct read is under way may leave its bytes to the other process
        # (open(2), "O_DIRECT", on fork).
        mapping.madvise(mmap.MADV_DONTFORK)
        memory = np.frombuffer(mapping, dtype=np.uint8)
        if bring_in(memory) != 0:
            memory[:: mmap.PAGESIZE] = 0
        address = memory.ctypes.data
        assert address % MEMORY_ALIGNMENT == 0
        return Region(address, nbytes, memory)

    def copier(self, leases: int) -> MemcpyCopier:
        """Return the copier of host memory."""
        return MemcpyCopier()

    def destination(self, array: Any) -> Region:
        """Return the memory of a NumPy array.

        Raises
        ------
        DestinationError
            It is no NumPy array, or not writable, not C-contiguous, or holds Python objects.
        """
        if not isinstance(array, np.ndarray):
            raise DestinationError(
                f"a destination must be a NumPy array here, not {type(array).__name__}"
            )
        if array.dtype.hasobject:
            raise DestinationError(f"an array of dtype {array.dtype} holds Python objects")
        if not array.flags.writeable:
            raise DestinationError("the array is read-only; a destination must be writable")
        if not array.flags.c_contiguous:
            raise DestinationError(
                f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous"
            )
        return Region(array.ctypes.data, array.nbytes, array)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return a NumPy array; a large one begins with a page."""
        return placed_empty(shape, dtype)

    def filled(self, shape: Any, dtype: Any, value: int) -> Any:
        """Return a NumPy array; as a part of a tuple the simulator shares it too."""
        return np.full(shape, value, dtype)

    def array(self, values: NDArray[Any]) -> Any:
        """Return a NumPy array."""
        return values.copy()

    def to_numpy(self, array: Any) -> NDArray[Any]:
        """Return a copy of a NumPy array."""
        return np.array(array)

    def prepare(self, kernel: Any, arguments: tuple[Any, ...]) -> Any:
        """Compile a Numba function for these arguments; leave a plain one as it is."""
        if hasattr(kernel, "compile"):
            kernel.compile(tuple(typeof(argument) for argument in arguments))
        return kernel

    def synchronize(self, stream: Any) -> None:
        """Do nothing: a call of a kernel here returns when the kernel does."""

    def settle(self, stream: Any) -> bool:
        """Do nothing, for the same reason."""
        return True

    def enter_thread(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: memory goes when its last view does."""


class SimulatorDevice(CpuDevice):
    """Host memory, for kernels that run as Python in Numba's simulator."""

    name = "simulator"

    def destination(self, array: Any) -> Region:
        """Return the memory of a NumPy array, or of one that the simulator wraps."""
        return super().destination(getattr(array, "_ary", array))

    def prepare(self, kernel: Any, arguments: tuple[Any, ...]) -> Any:
        """Do nothing: the simulator interprets."""
        return kernel

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return a simulated device array; plain ones are copied in and out of launches."""
        from numba import cuda

        return cuda.to_device(np.empty(shape, dtype))

    def array(self, values: NDArray[Any]) -> Any:
        """Return a simulated device array."""
        from numba import cuda

        return cuda.to_device(values)

    def to_numpy(self, array: Any) -> NDArray[Any]:
        """Return a copy of a NumPy array, or of one that the simulator wraps."""
        return np.array(getattr(array, "_ary", array))

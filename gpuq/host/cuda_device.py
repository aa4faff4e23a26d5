"""The CUDA device: CuPy owns memory, streams and events; Numba owns kernels; one primary context.

Everything is allocated before the first kernel polls and freed after the device is idle: an
allocation, a free, a memset, or a first launch of a kernel that is not loaded yet can wait for a
kernel that waits for the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuq.errors import DestinationError, TargetUnavailableError
from gpuq.host.copier import DEVICE_MEMORY, HOST_MEMORY, CudaCopier, make_cuda_copier
from gpuq.host.device import Region
from gpuq.host.direct_file import MEMORY_ALIGNMENT
from gpuq.host.driver import SUCCESS, driver_table, load_library, usable_gpu

_HOST_ALLOC_PORTABLE = 1
_HOST_ALLOC_MAPPED = 2
_MEMORY_TYPE_HOST = 1
_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
_LOOK_SECONDS = 0.0001
_ABORTED_SECONDS = 10.0
_LEGACY_STREAM = 1
_PER_THREAD_STREAM = 2


class CudaDevice:
    """The current CUDA device of this process.

    Raises
    ------
    TargetUnavailableError
        No usable GPU, or CuPy is not installed; the message says which.
    """

    name = "cuda"

    def __init__(self) -> None:
        # The driver reads it when it starts; see `prepare` for what it cannot cover.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        self._library = load_library()
        self.facts = usable_gpu(self._library)
        try:
            import cupy
        except ImportError as error:
            raise TargetUnavailableError(
                f"CuPy is missing ({error}); install gpuq[cuda12] or gpuq[cuda13]"
            ) from None
        from numba import cuda

        self._cupy = cupy
        self._cuda = cuda
        try:
            self._ordinal = cupy.cuda.Device().id
            self._stream = cupy.cuda.Stream(non_blocking=True)
        except RuntimeError as error:
            # Made for a newer CUDA than the driver's, or the GPU is taken: CuPy's own words say.
            raise TargetUnavailableError(f"CuPy cannot use {self.facts.name}: {error}") from None
        self._events: list[Any] = []
        self._pinned: list[int] = []
        self._held = contextlib.ExitStack()
        # Numba frees what it has collected when ten things wait, and a free may synchronize.
        self._held.enter_context(cuda.defer_cleanup())

    def mapped_words(self, count: int) -> tuple[NDArray[np.uint64], Any]:
        """Return zeroed words in mapped host memory: the host's view and the kernels'."""
        address = self._allocate_pinned(count * 8)
        host = np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address))
        host[:] = 0
        return host, self._kernel_view(address, count)

    def own_words(self, count: int, start: int, step: int) -> Any:
        """Return words in device memory holding ``start + i * step``."""
        words = self._cupy.asarray(
            np.arange(count, dtype=np.uint64) * np.uint64(step) + np.uint64(start)
        )
        self._cupy.cuda.Stream.null.synchronize()
        return self._cuda.as_cuda_array(words)

    def staging(self, nbytes: int) -> Region:
        """Return pinned memory aligned to 4096 bytes; pageable memory would make copies wait."""
        address = self._allocate_pinned(nbytes + MEMORY_ALIGNMENT)
        aligned = -(-address // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
        return Region(aligned, nbytes, self)

    def copier(self, leases: int) -> CudaCopier:
        """Return the copier of this device's stream, with an event for each lease."""
        self._events = [self._cupy.cuda.Event(disable_timing=True) for _ in range(leases)]
        table = driver_table(self._library)
        return make_cuda_copier(table, self._stream.ptr, [event.ptr for event in self._events])

    def destination(self, array: Any) -> Region:
        """Return the memory of anything with ``__cuda_array_interface__``.

        Mapped host arrays are taken too; the poller copies there itself. Where the interface
        names a stream, copies wait for what that stream has been given so far.

        Raises
        ------
        DestinationError
            Kernels of this device cannot reach it, or it is read-only or strided.
        """
        region = self._host_destination(array) if isinstance(array, np.ndarray) else None
        if region is not None:
            return region
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            raise DestinationError(
                f"a destination here needs __cuda_array_interface__ or mapped host memory; "
                f"{type(array).__name__} has neither"
            )
        address, nbytes = check_interface(interface)
        self._follow(interface.get("stream"))
        return Region(address, nbytes, array, self._kind_of(address))

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return a CuPy array."""
        return self._cupy.empty(shape, dtype)

    def prepare(self, kernel: Any, arguments: tuple[Any, ...]) -> Any:
        """Compile a kernel and load it to the device.

        With lazy loading, the default, the first launch of a kernel takes the context's lock
        until running kernels return, and a copy that one of them waits for then waits behind it.
        """
        from numba.cuda.typing.typeof import Purpose, typeof

        signature = tuple(typeof(argument, Purpose.argument) for argument in arguments)
        compiled = kernel.compile(signature)
        function = compiled._codelibrary.get_cufunc()
        load = getattr(self._library, "cuFuncLoad", None)
        handle = getattr(function, "handle", None)
        if load is not None and handle is not None:
            load(ctypes.c_void_p(int(getattr(handle, "value", handle))))
        return kernel

    def synchronize(self, stream: Any) -> None:
        """Wait until a stream's kernels have returned, without keeping Ctrl-C out."""
        event = self._cuda.event(timing=False)
        event.record(stream or self._cuda.default_stream())
        while not event.query():
            time.sleep(_LOOK_SECONDS)

    def settle(self, stream: Any) -> bool:
        """Wait a bounded time for kernels that were told to return; False where they did not."""
        event = self._cuda.event(timing=False)
        event.record(stream or self._cuda.default_stream())
        deadline = time.monotonic() + _ABORTED_SECONDS
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def enter_thread(self) -> None:
        """Make the primary context current in the calling thread."""
        self._cupy.cuda.Device(self._ordinal).use()

    def close(self) -> None:
        """Wait for the device and free what was allocated; for when no kernel polls any more."""
        self._cupy.cuda.Device(self._ordinal).synchronize()
        self._held.close()
        self._events.clear()
        while self._pinned:
            self._cupy.cuda.runtime.freeHost(self._pinned.pop())

    # --- parts ---

    def _allocate_pinned(self, nbytes: int) -> int:
        flags = _HOST_ALLOC_PORTABLE | _HOST_ALLOC_MAPPED
        address = int(self._cupy.cuda.runtime.hostAlloc(nbytes, flags))
        self._pinned.append(address)
        return address

    def _kernel_view(self, address: int, count: int) -> Any:
        # With unified addressing the device uses the host's address (`usable_gpu` demands it).
        memory = self._cupy.cuda.UnownedMemory(address, count * 8, self, self._ordinal)
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        words = self._cupy.ndarray((count,), dtype=np.uint64, memptr=pointer)
        return self._cuda.as_cuda_array(words)

    def _host_destination(self, array: NDArray[Any]) -> Region | None:
        if self._kind_of(array.ctypes.data) != HOST_MEMORY:
            raise DestinationError(
                "kernels on the GPU cannot reach a plain NumPy array; use loader.empty, a CuPy "
                "array, or numba.cuda.mapped_array"
            )
        if array.dtype.hasobject or not array.flags.writeable or not array.flags.c_contiguous:
            raise DestinationError("a destination must be writable, C-contiguous plain data")
        return Region(array.ctypes.data, array.nbytes, array, HOST_MEMORY)

    def _kind_of(self, address: int) -> int:
        """HOST_MEMORY for mapped host memory, DEVICE_MEMORY for the GPU's, -1 for neither."""
        kind = ctypes.c_uint(0)
        result = self._library.cuPointerGetAttribute(
            ctypes.byref(kind), _POINTER_ATTRIBUTE_MEMORY_TYPE, ctypes.c_uint64(address)
        )
        if result != SUCCESS:
            return -1
        return HOST_MEMORY if kind.value == _MEMORY_TYPE_HOST else DEVICE_MEMORY

    def _follow(self, stream: int | None) -> None:
        """Let copies wait for the stream that an array's interface names."""
        if stream is None:
            return
        cupy = self._cupy
        if stream == _LEGACY_STREAM:
            producer = cupy.cuda.Stream.null
        elif stream == _PER_THREAD_STREAM:
            producer = cupy.cuda.Stream.ptds
        else:
            producer = cupy.cuda.ExternalStream(stream)
        event = cupy.cuda.Event(disable_timing=True)
        event.record(producer)
        self._stream.wait_event(event)


def check_interface(interface: dict[str, Any]) -> tuple[int, int]:
    """Return (address, bytes) of a ``__cuda_array_interface__``, version 2 or 3.

    Raises
    ------
    DestinationError
        It is read-only, strided, masked, or holds Python objects.
    """
    address, is_read_only = interface["data"]
    shape = tuple(interface["shape"])
    dtype = np.dtype(interface["typestr"])
    if is_read_only:
        raise DestinationError("the array is read-only; a destination must be writable")
    if dtype.hasobject:
        raise DestinationError(f"an array of dtype {dtype} holds Python objects")
    if interface.get("mask") is not None:
        raise DestinationError("a masked array cannot be a destination")
    strides = interface.get("strides")
    nbytes = math.prod(shape) * dtype.itemsize
    if strides is not None and nbytes:
        expected = dtype.itemsize
        for extent, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
            if extent != 1 and stride != expected:
                raise DestinationError(
                    f"an array of shape {shape} and strides {tuple(strides)} is not C-contiguous"
                )
            expected *= extent
    return int(address or 0), nbytes

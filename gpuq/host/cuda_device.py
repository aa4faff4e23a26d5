"""The CUDA device: CuPy owns memory, streams and events; Numba owns kernels; one primary context.

Everything is allocated before the first kernel polls and freed after the device is idle: an
allocation, a free, a memset, or a first launch of a kernel that is not loaded yet can wait for a
kernel that waits for the host. For the same reason nothing here waits inside a CUDA call: who
waits for the device looks at an event again and again, in Python, so that Ctrl-C comes through.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuq.errors import DestinationError, TargetUnavailableError
from gpuq.host.copier import DEVICE_MEMORY, HOST_MEMORY, CudaCopier, make_cuda_copier
from gpuq.host.device import Region
from gpuq.host.direct_file import MEMORY_ALIGNMENT
from gpuq.host.driver import (
    NOT_READY,
    SUCCESS,
    demand,
    driver_table,
    load_library,
    start_driver,
    usable_gpu,
)
from gpuq.layout import WORD_BYTES

_HOST_ALLOC_PORTABLE = 1
_HOST_ALLOC_MAPPED = 2

# CUpointer_attribute, and one of CUmemorytype.
_POINTER_MEMORY_TYPE = 2
_POINTER_HOST_POINTER = 4
_POINTER_DEVICE_ORDINAL = 9
_MEMORY_TYPE_HOST = 1

_LOOK_SECONDS = 0.0001
_ABORTED_SECONDS = 10.0

# A setting that makes each launch wait for its kernel, with the context's lock held.
_BLOCKING_VARIABLE = "CUDA_LAUNCH_BLOCKING"
_LOADING_VARIABLE = "CUDA_MODULE_LOADING"


class PinnedMemory:
    """Page-locked, mapped host memory; it goes when its last view does.

    Views of it outlive the device: the host reads a queue's STATE after it was closed, and a
    kernel that is launched then must find it.

    Parameters
    ----------
    runtime : module
        ``cupy.cuda.runtime``.
    nbytes : int

    Raises
    ------
    TargetUnavailableError
        There is not so much of it.
    """

    def __init__(self, runtime: Any, nbytes: int) -> None:
        try:
            self.address = int(runtime.hostAlloc(nbytes, _HOST_ALLOC_PORTABLE | _HOST_ALLOC_MAPPED))
        except runtime.CUDARuntimeError as error:
            raise TargetUnavailableError(
                f"{nbytes} bytes of pinned memory cannot be had ({error}); ask for less with the "
                "settings staging_buffers, staging_bytes or slots"
            ) from None
        self.nbytes = nbytes
        # Not at exit: a kernel may still run, and the process gives everything back anyway.
        weakref.finalize(self, runtime.freeHost, self.address).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


class CudaDevice:
    """The current CUDA device of this process.

    Raises
    ------
    TargetUnavailableError
        No usable GPU, or CuPy is not installed, or launches are told to block; the message says
        which.
    """

    name = "cuda"

    def __init__(self) -> None:
        if os.environ.get(_BLOCKING_VARIABLE, "0") != "0":
            raise TargetUnavailableError(
                f"{_BLOCKING_VARIABLE} is set, so a launch would wait for its kernel, which waits "
                "for copies that wait for the launch; unset it"
            )
        # The driver reads it when it starts; see `prepare` for what it cannot cover.
        os.environ.setdefault(_LOADING_VARIABLE, "EAGER")
        self._library = load_library()
        start_driver(self._library)
        try:
            import cupy
        except ImportError as error:
            raise TargetUnavailableError(
                f"CuPy is missing ({error}); install gpuq[cuda12] or gpuq[cuda13]"
            ) from None
        from numba import cuda

        self._cupy = cupy
        self._cuda = cuda
        self._runtime = cupy.cuda.runtime
        try:
            self._ordinal = int(self._runtime.getDevice())
            self.facts = usable_gpu(self._library, self._ordinal)
            self._stream = cupy.cuda.Stream(non_blocking=True)
        except self._runtime.CUDARuntimeError as error:
            # Made for a newer CUDA than the driver's, or the GPU is taken: CuPy's own words say.
            raise TargetUnavailableError(f"CuPy cannot use the GPU: {error}") from None
        self._kept: list[Any] = []
        self._held = contextlib.ExitStack()
        try:
            # Numba frees what it has collected when ten things wait, and a free may synchronize.
            self._held.enter_context(cuda.defer_cleanup())
        except Exception as error:
            # NUMBA_DISABLE_CUDA, or another context than the primary one is current.
            raise TargetUnavailableError(f"Numba cannot use {self.facts.name}: {error}") from None

    @property
    def ordinal(self) -> int:
        """The number that CUDA gives this device in this process."""
        return self._ordinal

    # --- memory ---

    def mapped_words(self, count: int) -> tuple[NDArray[np.uint64], Any]:
        """Return zeroed words in mapped host memory: the host's view and the kernels'."""
        memory = self._pinned(count * WORD_BYTES)
        host = np.asarray(memory).view(np.uint64)
        host[:] = 0
        # With unified addressing the device uses the host's address (`usable_gpu` demands it).
        return host, self._kernel_view(memory.address, host, memory)

    def own_words(self, count: int, start: int, step: int) -> Any:
        """Return words in device memory holding ``start + i * step``."""
        words = self._own(np.arange(count, dtype=np.uint64) * np.uint64(step) + np.uint64(start))
        self._kept.append(words)
        return words

    def filled(self, shape: Any, dtype: Any, value: int) -> Any:
        """Return an array in device memory, filled with a value, that no launch waits for."""
        return self._own(np.full(shape, value, dtype))

    def array(self, values: NDArray[Any]) -> Any:
        """Return a copy in device memory that no launch waits for."""
        return self._own(values)

    def to_numpy(self, array: Any) -> NDArray[Any]:
        """Return a copy of device memory, or of mapped host memory, as a NumPy array."""
        if isinstance(array, np.ndarray):
            return array.copy()
        # Not on the default stream, on which other kernels may still run.
        with self._here(), self._stream:
            copy: NDArray[Any] = self._cupy.asnumpy(self._cupy.asarray(array))
        self._stream.synchronize()
        return copy

    def staging(self, nbytes: int) -> Region:
        """Return pinned memory aligned to 4096 bytes; pageable memory would make copies wait."""
        memory = self._pinned(nbytes + MEMORY_ALIGNMENT)
        aligned = -(-memory.address // MEMORY_ALIGNMENT) * MEMORY_ALIGNMENT
        return Region(aligned, nbytes, memory)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return a CuPy array."""
        with self._here():
            return self._cupy.empty(shape, dtype)

    def copier(self, leases: int) -> CudaCopier:
        """Return the copier of this device's stream, with an event for each lease."""
        with self._here():
            events = [self._event() for _ in range(leases)]
        self._kept.append(events)
        handles = [int(event.ptr) for event in events]
        return make_cuda_copier(driver_table(self._library), int(self._stream.ptr), handles)

    # --- destinations ---

    def destination(self, array: Any) -> Region:
        """Return the memory of anything with ``__cuda_array_interface__``.

        Mapped host arrays are taken too; the poller copies there itself. Where the interface
        names a stream, this waits for what that stream has been given so far. It waits here and
        not on the copies' stream, where a kernel that polls on the named stream would hold up
        every copy, those that it waits for included.

        Raises
        ------
        DestinationError
            Kernels of this device cannot reach it, or it is read-only or strided.
        """
        if isinstance(array, np.ndarray):
            return self._host_destination(array)
        interface = _interface_of(array)
        address, nbytes = check_interface(interface)
        if not nbytes:
            return Region(address, 0, array, DEVICE_MEMORY)
        with self._here():
            kind = self._kind_of(address)
            if kind == HOST_MEMORY:
                address = self._pointer_attribute(_POINTER_HOST_POINTER, address) or address
        stream = interface.get("stream")
        if stream is not None:
            self.synchronize(int(stream))
        return Region(address, nbytes, array, kind)

    def _host_destination(self, array: NDArray[Any]) -> Region:
        if array.dtype.hasobject or not array.flags.writeable or not array.flags.c_contiguous:
            raise DestinationError("a destination must be writable, C-contiguous plain data")
        address = int(array.ctypes.data)
        with self._here():
            memory_type = self._pointer_attribute(_POINTER_MEMORY_TYPE, address)
        if memory_type != _MEMORY_TYPE_HOST:
            raise DestinationError(
                "kernels on the GPU cannot reach a plain NumPy array; use loader.empty, a CuPy "
                "array, or numba.cuda.mapped_array"
            )
        return Region(address, array.nbytes, array, HOST_MEMORY)

    def _kind_of(self, address: int) -> int:
        """HOST_MEMORY for mapped host memory, DEVICE_MEMORY for this GPU's."""
        memory_type = self._pointer_attribute(_POINTER_MEMORY_TYPE, address)
        if memory_type is None:
            raise DestinationError(f"the driver knows of no memory at {address:#x}")
        if memory_type == _MEMORY_TYPE_HOST:
            return HOST_MEMORY
        ordinal = self._pointer_attribute(_POINTER_DEVICE_ORDINAL, address)
        if ordinal != self._ordinal:
            raise DestinationError(
                f"the array is on GPU {ordinal}, and this loader's kernels run on {self._ordinal}"
            )
        return DEVICE_MEMORY

    def _pointer_attribute(self, attribute: int, address: int) -> int | None:
        """Return what the driver says of an address, None where it does not know it."""
        value = ctypes.c_uint64(0)
        result = self._library.cuPointerGetAttribute(
            ctypes.byref(value), attribute, ctypes.c_uint64(address)
        )
        return value.value if result == SUCCESS else None

    # --- kernels ---

    def prepare(self, kernel: Any, arguments: tuple[Any, ...]) -> Any:
        """Compile a kernel and load it to the device.

        With lazy loading, the default, the first launch of a kernel takes the context's lock
        until running kernels return, and a copy that one of them waits for then waits behind it.
        """
        with self._here():
            signature = tuple(kernel.typeof_pyval(argument) for argument in arguments)
            compiled = kernel.compile(signature)
            compiled.bind()
            self._load(compiled._codelibrary.get_cufunc().handle)
        return kernel

    def _load(self, handle: Any) -> None:
        """Load a kernel that the driver may have put off loading (CUDA 12.4 and newer)."""
        library = self._library
        function = ctypes.c_void_p(int(getattr(handle, "value", handle)))
        if type(handle).__name__ == "CUkernel":
            kernel, function = function, ctypes.c_void_p()
            result = library.cuKernelGetFunction(ctypes.byref(function), kernel)
            demand(library, result, "cuKernelGetFunction")
        load = getattr(library, "cuFuncLoad", None)
        if load is not None:
            demand(library, load(function), "cuFuncLoad")

    def synchronize(self, stream: Any) -> None:
        """Wait until a stream's kernels have returned, without keeping Ctrl-C out.

        Raises
        ------
        CUDARuntimeError
            A kernel failed; CuPy's class and words.
        """
        self._wait(stream, math.inf)

    def settle(self, stream: Any) -> bool:
        """Wait a bounded time for kernels that were told to return; False where they did not."""
        try:
            return self._wait(stream, _ABORTED_SECONDS)
        except self._runtime.CUDARuntimeError:
            return False

    def _wait(self, stream: Any, seconds: float) -> bool:
        with self._here():
            # An event of its own for each call: two threads may wait at once.
            event = self._event()
            self._runtime.eventRecord(event.ptr, stream_handle(stream))
            deadline = time.monotonic() + seconds
            # Not `event.done`, which is False for ever where the context is lost.
            while (status := self._runtime.eventQuery(event.ptr)) == NOT_READY:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_LOOK_SECONDS)
            self._runtime.check_status(status)
        return True

    # --- life ---

    def enter_thread(self) -> None:
        """Make the primary context current in the calling thread."""
        self._runtime.setDevice(self._ordinal)

    def close(self) -> None:
        """Wait for the device and free what was allocated; for when no kernel polls any more."""
        with self._here():
            try:
                self.synchronize(None)
                # What runs on non-blocking streams, which the default stream does not wait for.
                self._runtime.deviceSynchronize()
            except BaseException:
                # A kernel may still use all of this: never free it.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
                raise
            self._held.close()
            self._kept.clear()

    # --- parts ---

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Make this device current in the calling thread, and what was current again after."""
        before = self._runtime.getDevice()
        self._runtime.setDevice(self._ordinal)
        try:
            yield
        finally:
            if before != self._ordinal:
                self._runtime.setDevice(before)

    def _event(self) -> Any:
        return self._cupy.cuda.Event(disable_timing=True)

    def _pinned(self, nbytes: int) -> PinnedMemory:
        with self._here():
            memory = PinnedMemory(self._runtime, nbytes)
        self._kept.append(memory)
        return memory

    def _own(self, values: NDArray[Any]) -> Any:
        """Return a copy of `values` in device memory, as kernels take it."""
        # Not on the default stream, on which kernels may run.
        with self._here(), self._stream:
            copy = self._cupy.asarray(values)
        self._stream.synchronize()
        return self._kernel_view(int(copy.data.ptr), values, copy)

    def _kernel_view(self, address: int, like: NDArray[Any], owner: Any) -> Any:
        """Return memory as kernels take it, naming no stream, so that no launch waits for one."""
        interface = {
            "shape": like.shape,
            "strides": None,
            "typestr": like.dtype.str,
            "data": (address, False),
            "version": 3,
            "stream": None,
        }
        with self._here():
            return self._cuda.from_cuda_array_interface(interface, owner=owner)


def stream_handle(stream: Any) -> int:
    """Return the handle of a stream: of Numba, CuPy, torch, cuda.core, an integer, or None.

    Raises
    ------
    TypeError
        It is none.
    """
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr", "handle"):  # torch; CuPy and Numba of before the protocol
        handle = getattr(stream, name, None)
        if handle is not None:
            return int(getattr(handle, "value", handle) or 0)
    raise TypeError(f"{type(stream).__name__} is no CUDA stream")


def _interface_of(array: Any) -> dict[str, Any]:
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except (RuntimeError, TypeError, ValueError) as error:
        # torch refuses so a tensor that requires a gradient.
        raise DestinationError(f"{type(array).__name__} gives its memory to nobody: {error}") from (
            error
        )
    if interface is None:
        raise DestinationError(
            "a destination here needs __cuda_array_interface__ or mapped host memory; "
            f"{type(array).__name__} has neither"
        )
    return dict(interface)


def check_interface(interface: dict[str, Any]) -> tuple[int, int]:
    """Return (address, bytes) of a ``__cuda_array_interface__``, version 2 or 3.

    Raises
    ------
    DestinationError
        It is read-only, strided, masked, or holds Python objects.
    """
    try:
        address, is_read_only = interface["data"]
        shape = tuple(interface["shape"])
        dtype = np.dtype(interface["typestr"])
    except KeyError as error:
        raise DestinationError(f"the array's __cuda_array_interface__ lacks {error}") from None
    except TypeError as error:
        raise DestinationError(f"the array has a dtype that NumPy does not know: {error}") from None
    if is_read_only:
        raise DestinationError("the array is read-only; a destination must be writable")
    if dtype.hasobject:
        raise DestinationError(f"an array of dtype {dtype} holds Python objects")
    if interface.get("mask") is not None:
        raise DestinationError("a masked array cannot be a destination")
    strides = interface.get("strides")
    nbytes = math.prod(shape) * dtype.itemsize
    if strides is not None and nbytes:
        expected = _contiguous_strides(shape, dtype.itemsize)
        # The stride of a dimension of one element says nothing.
        if len(strides) != len(shape) or any(
            extent != 1 and stride != wanted
            for extent, stride, wanted in zip(shape, strides, expected, strict=True)
        ):
            raise DestinationError(
                f"an array of shape {shape} and strides {tuple(strides)} is not C-contiguous"
            )
    return int(address or 0), nbytes


def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> list[int]:
    strides = [itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return strides[::-1] if shape else []

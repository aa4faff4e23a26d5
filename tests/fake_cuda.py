"""CUDA without a GPU: libcuda, CuPy and Numba's context played on host memory, each call noted.

What gpuq itself does with CUDA runs unchanged on it, Numba's own arrays and kernel loading
included. Copies go to a `RecordingDriver`.
"""

# ruff: noqa: N802, the names are those of CUDA and of CuPy

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import sys
import types
from typing import Any

import numpy as np
import pytest

import gpuq
from gpuq.host import cuda_device
from gpuq.host.driver import INVALID_VALUE
from gpuq.testing import recording_driver
from gpuq.testing.recording_driver import RecordingDriver

COMPUTE_CAPABILITY = (8, 0)
HOST_TYPE, DEVICE_TYPE = 1, 2


class FakeLibrary:
    """The functions of libcuda that gpuq calls from Python, answering from attributes.

    A function named in `results` returns what stands there instead.
    """

    def __init__(self, driver: RecordingDriver | None = None) -> None:
        self.results: dict[str, int] = {}
        self.calls: list[tuple[str, Any]] = []
        self.devices = 1
        self.attributes = {75: 8, 76: 0, 19: 1, 17: 0, 41: 1}
        self.version = 13_000
        self.regions: list[tuple[int, int, int, int]] = []
        """(begin, end, memory type, ordinal)"""
        self.missing: set[str] = set()
        table = recording_driver.table()
        word = ctypes.c_int64
        self._compiled = {
            "cuMemcpyHtoDAsync_v2": ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, word)(
                table[0]
            ),
            "cuEventRecord": ctypes.CFUNCTYPE(ctypes.c_int, word, word)(table[1]),
            "cuEventQuery": ctypes.CFUNCTYPE(ctypes.c_int, word)(table[2]),
        }

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("missing", ()):
            raise AttributeError(f"undefined symbol: {name}")
        if name in self.__dict__.get("_compiled", {}):
            return self._compiled[name]
        body = getattr(type(self), f"_{name}", None)
        if body is None:
            raise AttributeError(f"undefined symbol: {name}")

        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name in self.results:
                return self.results[name]
            return body(self, *arguments) or 0

        return call

    def _cuInit(self, flags: int) -> None:
        pass

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self.devices

    def _cuDeviceGet(self, device: Any, ordinal: int) -> None:
        device._obj.value = ordinal

    def _cuDeviceGetName(self, name: Any, room: int, device: Any) -> None:
        name.value = b"Pretended GPU"

    def _cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = self.version

    def _cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> None:
        value._obj.value = self.attributes[number]

    def _cuGetErrorName(self, result: int, text: Any) -> None:
        names = {100: b"CUDA_ERROR_NO_DEVICE", 803: b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}
        if result in names:
            text._obj.value = names[result]

    def _cuPointerGetAttribute(self, value: Any, attribute: int, address: Any) -> int:
        for begin, end, memory_type, ordinal in self.regions:
            if begin <= address.value < end:
                value._obj.value = {2: memory_type, 4: address.value, 9: ordinal}[attribute]
                return 0
        return INVALID_VALUE

    def _cuKernelGetFunction(self, function: Any, kernel: Any) -> None:
        function._obj.value = kernel.value + 1

    def _cuFuncLoad(self, function: Any) -> None:
        pass


class FakeRuntime:
    """``cupy.cuda.runtime`` on host memory; `log` holds every call that could serialize."""

    class CUDARuntimeError(RuntimeError):
        """As CuPy's."""

    def __init__(self, library: FakeLibrary, driver: RecordingDriver) -> None:
        self.library = library
        self.driver = driver
        self.log: list[tuple[Any, ...]] = []
        self.device = 0
        self.statuses: list[int] = []
        """What the next event queries from Python return; then 0."""
        self._memory: dict[int, mmap.mmap] = {}

    def getDevice(self) -> int:
        return self.device

    def setDevice(self, ordinal: int) -> None:
        self.device = ordinal
        self.log.append(("setDevice", ordinal))

    def hostAlloc(self, nbytes: int, flags: int) -> int:
        memory = mmap.mmap(-1, nbytes + 256)
        # CUDA promises no page, and gpuq must not need one.
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 256
        self._memory[address] = memory
        self.library.regions.append((address, address + nbytes, HOST_TYPE, 0))
        self.log.append(("hostAlloc", nbytes, flags))
        return address

    def freeHost(self, address: int) -> None:
        self.log.append(("freeHost", address))
        self._memory.pop(address)
        self.library.regions = [r for r in self.library.regions if r[0] != address]

    def eventRecord(self, event: int, stream: int) -> None:
        self.log.append(("eventRecord", stream))

    def eventQuery(self, event: int) -> int:
        return self.statuses.pop(0) if self.statuses else 0

    def deviceSynchronize(self) -> None:
        self.log.append(("deviceSynchronize",))

    def check_status(self, status: int) -> None:
        if status != 0:
            raise self.CUDARuntimeError(f"error {status}")

    def names(self) -> list[str]:
        """Return the names in the log."""
        return [entry[0] for entry in self.log]


class FakeDeviceArray:
    """An array "on the GPU": host memory behind ``__cuda_array_interface__``."""

    def __init__(self, content: Any, **changes: Any) -> None:
        self.host = np.ascontiguousarray(content)
        self.data = types.SimpleNamespace(ptr=self.host.ctypes.data)
        self.__cuda_array_interface__ = {
            "shape": self.host.shape,
            "typestr": self.host.dtype.str,
            "data": (self.host.ctypes.data, False),
            "version": 3,
            "stream": None,
        } | changes


class FakeStream:
    """``cupy.cuda.Stream``."""

    def __init__(self, cuda: FakeCuda, non_blocking: bool = False) -> None:
        self.ptr = cuda.driver.stream()
        self.non_blocking = non_blocking
        cuda.runtime.log.append(("Stream", non_blocking))
        self._log = cuda.runtime.log

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def synchronize(self) -> None:
        self._log.append(("streamSynchronize", self.ptr))

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class FakeCuda:
    """All of it; `install` puts it in the place of the real things."""

    def __init__(self) -> None:
        self.driver = RecordingDriver()
        self.library = FakeLibrary(self.driver)
        self.runtime = FakeRuntime(self.library, self.driver)
        self.module = types.ModuleType("cupy")
        self.context: Any = None
        self.loaded: list[int] = []
        handles = itertools.count(1 << 20, 16)

        def event(disable_timing: bool = False) -> Any:
            self.runtime.log.append(("Event", disable_timing))
            return types.SimpleNamespace(ptr=self.driver.event())

        def stream(non_blocking: bool = False) -> FakeStream:
            return FakeStream(self, non_blocking)

        self.module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
            runtime=self.runtime, Stream=stream, Event=event
        )
        self.module.asarray = self.asarray  # type: ignore[attr-defined]
        self.module.asnumpy = lambda array: array.host.copy()  # type: ignore[attr-defined]
        self.module.empty = lambda shape, dtype: self.array(np.empty(shape, dtype))  # type: ignore[attr-defined]
        self._handles = handles

    def array(self, content: Any, ordinal: int = 0, **changes: Any) -> FakeDeviceArray:
        """Return an array in the memory of a GPU."""
        array = FakeDeviceArray(content, **changes)
        begin = array.host.ctypes.data
        self.library.regions.append(
            (begin, begin + max(array.host.nbytes, 1), DEVICE_TYPE, ordinal)
        )
        self.runtime.log.append(("malloc", array.host.nbytes))
        return array

    def asarray(self, content: Any) -> FakeDeviceArray:
        """Return what is on the GPU as it is, and a copy there of what is not."""
        if isinstance(content, FakeDeviceArray):
            return content
        interface = getattr(content, "__cuda_array_interface__", None)
        if interface is None:
            return self.array(content)
        interface = {**interface, "strides": None}
        interface.pop("stream", None)
        return FakeDeviceArray(np.asarray(types.SimpleNamespace(__array_interface__=interface)))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let gpuq find this libcuda and CuPy, and Numba a context without a driver."""
        from cuda.bindings import driver as binding
        from numba.cuda.cudadrv import devices
        from numba.cuda.cudadrv import driver as numba_driver

        monkeypatch.setattr(cuda_device, "load_library", lambda: self.library)
        monkeypatch.setitem(sys.modules, "cupy", self.module)
        monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
        monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")

        device = types.SimpleNamespace(id=0, compute_capability=COMPUTE_CAPABILITY)
        context = numba_driver.Context(device, binding.CUcontext(4096))
        context.memory_manager.deallocations.memory_capacity = 1 << 30
        context.create_module_image = self._load_module
        self.context = context
        monkeypatch.setattr(numba_driver, "_logger", numba_driver.make_logger(), raising=False)
        monkeypatch.setattr(devices._runtime, "ensure_context", contextlib.nullcontext)
        monkeypatch.setattr(devices._runtime, "get_or_create_context", lambda number=None: context)

    def _load_module(self, image: Any, *callbacks: Any) -> Any:
        from cuda.bindings import driver as binding

        assert image.code, "a cubin was linked"
        handle = next(self._handles)
        self.loaded.append(handle)
        function = types.SimpleNamespace(
            handle=binding.CUkernel(handle),
            module=types.SimpleNamespace(initialized=False, setup=lambda: None),
        )
        return types.SimpleNamespace(get_function=lambda name: function)


def on_host(queue: gpuq.Queue) -> gpuq.Queue:
    """Return a queue's memory as arrays for a kernel that runs on the CPU."""

    def view(array: Any) -> Any:
        if not hasattr(array, "device_ctypes_pointer"):
            return array
        address = array.device_ctypes_pointer.value
        words = (ctypes.c_uint64 * array.size).from_address(address)
        words.owner = array
        return np.ctypeslib.as_array(words)

    return gpuq.Queue(*(view(field) for field in queue))

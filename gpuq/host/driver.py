"""The CUDA driver: whether one is usable, and the addresses of what compiled code calls in it.

Compiled code calls through a table of addresses, so that tests can put functions of their own
there. Only calls that cannot block on a running kernel are in the table.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from gpuq.errors import TargetUnavailableError

# CUresult (CUDA Driver API, "Data types used by CUDA driver").
SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
NO_DEVICE = 100
NOT_READY = 600

# Positions in the table.
MEMCPY_HTOD_ASYNC = 0
EVENT_RECORD = 1
EVENT_QUERY = 2

# CUdevice_attribute.
_COMPUTE_MAJOR = 75
_COMPUTE_MINOR = 76
_CAN_MAP_HOST_MEMORY = 19
_KERNEL_EXEC_TIMEOUT = 17
_UNIFIED_ADDRESSING = 41

LIBRARY = "libcuda.so.1"


class DriverTable(NamedTuple):
    """Addresses of driver functions.

    Attributes
    ----------
    memcpy_htod_async : int
        ``CUresult (CUdeviceptr, const void *, size_t, CUstream)``
    event_record : int
        ``CUresult (CUevent, CUstream)``
    event_query : int
        ``CUresult (CUevent)``
    """

    memcpy_htod_async: int
    event_record: int
    event_query: int


@dataclass(frozen=True)
class GpuFacts:
    """What the driver says of one device.

    Attributes
    ----------
    name : str
    compute_capability : tuple of int
    driver_version : tuple of int
        The newest CUDA version that the driver supports.
    has_unified_addressing, can_map_host_memory : bool
    has_kernel_time_limit : bool
        Kernels that run for seconds are ended by the system, as on a GPU that drives a display.
    """

    name: str
    compute_capability: tuple[int, int]
    driver_version: tuple[int, int]
    has_unified_addressing: bool
    can_map_host_memory: bool
    has_kernel_time_limit: bool


def load_library(name: str = LIBRARY) -> ctypes.CDLL:
    """Load the driver library.

    Raises
    ------
    TargetUnavailableError
        There is none.
    """
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise TargetUnavailableError(f"no CUDA driver: {error}") from None


def driver_table(library: Any) -> DriverTable:
    """Look up what compiled code calls.

    Raises
    ------
    TargetUnavailableError
        The driver lacks a function.
    """
    names = ("cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuEventQuery")
    try:
        functions = [getattr(library, name) for name in names]
    except AttributeError as error:
        raise TargetUnavailableError(f"the CUDA driver is too old: {error}") from None
    return DriverTable(*(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions))


def start_driver(library: Any) -> int:
    """Initialize the driver and return how many devices it sees; not in a forked child.

    Raises
    ------
    TargetUnavailableError
        The driver does not start, or sees no device.
    """
    result = library.cuInit(0)
    if result == NOT_INITIALIZED:
        raise TargetUnavailableError(
            "CUDA was in use when this process was forked, and does not survive that; start "
            'processes with multiprocessing\'s "spawn" instead'
        )
    demand(library, result, "cuInit")
    count = ctypes.c_int(0)
    demand(library, library.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    if count.value == 0:
        raise TargetUnavailableError("the CUDA driver sees no device")
    return count.value


def gpu_facts(library: Any, ordinal: int = 0) -> GpuFacts:
    """Initialize the driver and ask it about a device.

    Raises
    ------
    TargetUnavailableError
        The driver does not start, or has no such device.
    """
    count = start_driver(library)
    if ordinal >= count:
        raise TargetUnavailableError(f"the CUDA driver sees {count} devices and not {ordinal}")
    device = ctypes.c_int(0)
    demand(library, library.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
    name = ctypes.create_string_buffer(256)
    demand(library, library.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
    version = ctypes.c_int(0)
    demand(library, library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")

    def attribute(number: int) -> int:
        value = ctypes.c_int(0)
        result = library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        demand(library, result, "cuDeviceGetAttribute")
        return value.value

    return GpuFacts(
        name=name.value.decode(errors="replace"),
        compute_capability=(attribute(_COMPUTE_MAJOR), attribute(_COMPUTE_MINOR)),
        driver_version=(version.value // 1000, version.value % 1000 // 10),
        has_unified_addressing=bool(attribute(_UNIFIED_ADDRESSING)),
        can_map_host_memory=bool(attribute(_CAN_MAP_HOST_MEMORY)),
        has_kernel_time_limit=bool(attribute(_KERNEL_EXEC_TIMEOUT)),
    )


def usable_gpu(library: Any, ordinal: int = 0) -> GpuFacts:
    """Return the facts of a device that gpuq can run on.

    Raises
    ------
    TargetUnavailableError
        There is none; the message says what is missing.
    """
    facts = gpu_facts(library, ordinal)
    if not facts.has_unified_addressing:
        raise TargetUnavailableError(f"{facts.name} has no unified addressing")
    if not facts.can_map_host_memory:
        raise TargetUnavailableError(f"{facts.name} cannot map host memory")
    if facts.compute_capability < (7, 0):
        major, minor = facts.compute_capability
        raise TargetUnavailableError(
            f"{facts.name} has compute capability {major}.{minor}; ld.acquire needs 7.0"
        )
    return facts


def demand(library: Any, result: int, what: str) -> None:
    """Raise `TargetUnavailableError` unless a driver's call succeeded."""
    if result != SUCCESS:
        text = ctypes.c_char_p()
        explain = getattr(library, "cuGetErrorName", None)
        if explain is not None:
            explain(result, ctypes.byref(text))
        name = (text.value or b"unknown error").decode(errors="replace")
        raise TargetUnavailableError(
            f"the CUDA driver does not work: {what} said {result} ({name})"
        )


def call_driver(address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call a function of the table with up to four word-sized arguments; return its CUresult.

    The calling conventions of Linux (System V AMD64, AAPCS64) pass the first words in registers
    that the callee may ignore, so that one form serves all arities.
    """
    function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 4)(int(address))
    return function(int(a), int(b), int(c), int(d))


@intrinsic
def _call(typing_context: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, half = ir.IntType(64), ir.IntType(32)
        function_type = ir.FunctionType(half, [word] * 4)
        function = builder.inttoptr(arguments[0], function_type.as_pointer())
        return builder.sext(builder.call(function, arguments[1:]), word)

    words = [types.int64] * 5
    return types.int64(*words), codegen


@overload(call_driver, strict=False)
def _(address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return lambda address, a, b, c, d: _call(address, a, b, c, d)

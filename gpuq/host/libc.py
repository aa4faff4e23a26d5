"""System calls usable from compiled code, each with a plain body for Python and one for Numba.

All of them return a result or a negative errno, whatever libc's own convention: errno is per
thread and must be read right behind the call. Addresses are plain integers.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(os.uname().machine, -1)
# io_uring came after the numbers of all architectures were joined (Linux 5.1).
SYS_IO_URING_SETUP = 425
SYS_IO_URING_ENTER = 426
SYS_IO_URING_REGISTER = 427

FUTEX_WAIT_PRIVATE = 0 | 128
FUTEX_WAKE_PRIVATE = 1 | 128

_AT_EMPTY_PATH = 0x1000
_AT_STATX_DONT_SYNC = 0x4000
_STATX_FLAGS = _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC
_STATX_SIZE = 0x200
_STATX_BYTES = 256
_STATX_SIZE_AT = 40

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_libc.lseek.restype = ctypes.c_int64
_libc.lseek.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]


_PR_SET_TIMERSLACK = 29


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def _or_negative_errno(result: int) -> int:
    return result if result >= 0 else -ctypes.get_errno()


def system_call(number: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Call ``syscall(number, a, b, c, d, e, f)`` (syscall(2)); result or negative errno."""
    words = [ctypes.c_long(int(word)) for word in (number, a, b, c, d, e, f)]
    return _or_negative_errno(_libc.syscall(*words))


def read_at(descriptor: Any, address: Any, nbytes: Any, offset: Any) -> Any:
    """Read into memory with pread(2); bytes read or negative errno."""
    return _or_negative_errno(_libc.pread(int(descriptor), int(address), int(nbytes), int(offset)))


def size_of(descriptor: Any) -> Any:
    """Size of an open file or block device in bytes, or negative errno.

    By lseek(2) to the end: every reader of gpuq names its offset, so nobody uses the position.
    """
    return _or_negative_errno(_libc.lseek(int(descriptor), 0, os.SEEK_END))


def cached_size_of(descriptor: Any) -> Any:
    """Size of an open file in bytes as the system remembers it, or negative errno.

    By statx(2) with AT_STATX_DONT_SYNC: no server is asked, so it never waits. 0 for a block
    device; a file on another machine may have another size by now.
    """
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    result = _libc.statx(int(descriptor), b"", _STATX_FLAGS, _STATX_SIZE, buffer)
    if result < 0:
        return -ctypes.get_errno()
    return int.from_bytes(buffer.raw[_STATX_SIZE_AT : _STATX_SIZE_AT + 8], "little")


def copy_memory(destination: Any, source: Any, nbytes: Any) -> None:
    """Copy `nbytes` between two addresses that do not overlap."""
    ctypes.memmove(int(destination), int(source), int(nbytes))


def sleep_ns(duration_ns: Any) -> None:
    """Sleep for less than a second, in nanoseconds (nanosleep(2)); a signal may shorten it."""
    _libc.nanosleep(ctypes.byref(_Timespec(0, int(duration_ns))), None)


def thread_cpu_ns() -> Any:
    """Processor time that the calling thread has used, in nanoseconds (clock_gettime(3))."""
    return time.thread_time_ns()


def sleep_precisely() -> None:
    """Have the calling thread's sleeps end when they are over.

    The system may prolong them to share a wake-up, by 50 us unless it is told otherwise
    (prctl(2), PR_SET_TIMERSLACK); that would be half of what an idle poller sleeps.
    """
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


def futex_wait(address: Any, expected: Any, timeout_ns: Any) -> Any:
    """Sleep while the 32-bit word at `address` is `expected`, at most `timeout_ns` (futex(2))."""
    timeout = _Timespec(0, int(timeout_ns))
    pointer = ctypes.addressof(timeout)
    return system_call(SYS_FUTEX, address, FUTEX_WAIT_PRIVATE, expected, pointer, 0, 0)


def futex_wake(address: Any, count: Any) -> Any:
    """Wake at most `count` sleepers on the word at `address` (futex(2))."""
    return system_call(SYS_FUTEX, address, FUTEX_WAKE_PRIVATE, count, 0, 0, 0)


_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_pread = types.ExternalFunction(
    "pread", types.int64(types.int32, types.int64, types.int64, types.int64)
)
_lseek = types.ExternalFunction("lseek", types.int64(types.int32, types.int64, types.int32))
_SEEK_END = os.SEEK_END


@intrinsic
def _errno(typing_context: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        half = ir.IntType(32)
        function_type = ir.FunctionType(half.as_pointer(), [])
        location = cgutils.get_or_insert_function(builder.module, function_type, "__errno_location")
        value = builder.load(builder.call(location, []))
        return builder.sext(value, ir.IntType(64))

    return types.int64(), codegen


@intrinsic
def _memcpy(typing_context: Any, destination: Any, source: Any, nbytes: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        to, origin = (builder.inttoptr(address, byte_pointer) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, origin, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _nanosleep(typing_context: Any, duration_ns: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, half = ir.IntType(64), ir.IntType(32)
        timespec = cgutils.alloca_once(builder, ir.ArrayType(word, 2))
        builder.store(word(0), cgutils.gep_inbounds(builder, timespec, 0, 0))
        builder.store(arguments[0], cgutils.gep_inbounds(builder, timespec, 0, 1))
        function_type = ir.FunctionType(half, [timespec.type, timespec.type])
        function = cgutils.get_or_insert_function(builder.module, function_type, "nanosleep")
        builder.call(function, [timespec, timespec.type(None)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _futex(typing_context: Any, address: Any, operation: Any, value: Any, timeout_ns: Any) -> Any:
    """futex(2); a time-out below 0 passes none."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        address, operation, value, timeout_ns = arguments
        timespec = cgutils.alloca_once(builder, ir.ArrayType(word, 2))
        builder.store(word(0), cgutils.gep_inbounds(builder, timespec, 0, 0))
        builder.store(timeout_ns, cgutils.gep_inbounds(builder, timespec, 0, 1))
        none = builder.icmp_signed("<", timeout_ns, word(0))
        pointer = builder.select(none, word(0), builder.ptrtoint(timespec, word))
        function_type = ir.FunctionType(word, [word] * 7)
        function = cgutils.get_or_insert_function(builder.module, function_type, "syscall")
        words = [word(SYS_FUTEX), address, operation, value, pointer, word(0), word(0)]
        return builder.call(function, words)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


def read_clock(builder: Any, clock: int) -> Any:
    """Emit a call of clock_gettime(3); return its nanoseconds."""
    word, half = ir.IntType(64), ir.IntType(32)
    timespec = cgutils.alloca_once(builder, ir.ArrayType(word, 2))
    function_type = ir.FunctionType(half, [half, timespec.type])
    function = cgutils.get_or_insert_function(builder.module, function_type, "clock_gettime")
    builder.call(function, [half(clock), timespec])
    seconds, nanoseconds = (
        builder.load(cgutils.gep_inbounds(builder, timespec, 0, part)) for part in (0, 1)
    )
    return builder.add(builder.mul(seconds, word(1_000_000_000)), nanoseconds)


@intrinsic
def _thread_cpu_ns(typing_context: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return read_clock(builder, time.CLOCK_THREAD_CPUTIME_ID)

    return types.int64(), codegen


@overload(system_call, strict=False)
def _(number: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    def body(number: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        result = _syscall(number, a, b, c, d, e, f)
        return result if result >= 0 else -_errno()

    return body


@overload(read_at, strict=False)
def _(descriptor: Any, address: Any, nbytes: Any, offset: Any) -> Any:
    def body(descriptor: Any, address: Any, nbytes: Any, offset: Any) -> Any:
        result = _pread(descriptor, address, nbytes, offset)
        return result if result >= 0 else -_errno()

    return body


@overload(size_of, strict=False)
def _(descriptor: Any) -> Any:
    def body(descriptor: Any) -> Any:
        result = _lseek(descriptor, 0, _SEEK_END)
        return result if result >= 0 else -_errno()

    return body


@intrinsic
def _statx_size(typing_context: Any, descriptor: Any) -> Any:
    """Size by statx(2), -1 where it fails."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, half, byte = ir.IntType(64), ir.IntType(32), ir.IntType(8)
        buffer = cgutils.alloca_once(builder, ir.ArrayType(word, _STATX_BYTES // 8))
        path = cgutils.alloca_once(builder, ir.ArrayType(byte, 1))
        builder.store(byte(0), cgutils.gep_inbounds(builder, path, 0, 0))
        function_type = ir.FunctionType(half, [half, path.type, half, half, buffer.type])
        function = cgutils.get_or_insert_function(builder.module, function_type, "statx")
        result = builder.call(
            function,
            [
                builder.trunc(arguments[0], half),
                path,
                half(_STATX_FLAGS),
                half(_STATX_SIZE),
                buffer,
            ],
        )
        size = builder.load(cgutils.gep_inbounds(builder, buffer, 0, _STATX_SIZE_AT // 8))
        return builder.select(builder.icmp_signed("<", result, half(0)), word(-1), size)

    return types.int64(types.int64), codegen


@overload(cached_size_of, strict=False)
def _(descriptor: Any) -> Any:
    def body(descriptor: Any) -> Any:
        size = _statx_size(descriptor)
        return size if size >= 0 else -_errno()

    return body


@overload(copy_memory, strict=False)
def _(destination: Any, source: Any, nbytes: Any) -> Any:
    return lambda destination, source, nbytes: _memcpy(destination, source, nbytes)


@overload(sleep_ns, strict=False)
def _(duration_ns: Any) -> Any:
    return lambda duration_ns: _nanosleep(duration_ns)


@overload(thread_cpu_ns, strict=False)
def _() -> Any:
    return lambda: _thread_cpu_ns()


@overload(futex_wait, strict=False)
def _(address: Any, expected: Any, timeout_ns: Any) -> Any:
    def body(address: Any, expected: Any, timeout_ns: Any) -> Any:
        result = _futex(address, FUTEX_WAIT_PRIVATE, expected, timeout_ns)
        return result if result >= 0 else -_errno()

    return body


@overload(futex_wake, strict=False)
def _(address: Any, count: Any) -> Any:
    def body(address: Any, count: Any) -> Any:
        result = _futex(address, FUTEX_WAKE_PRIVATE, count, -1)
        return result if result >= 0 else -_errno()

    return body

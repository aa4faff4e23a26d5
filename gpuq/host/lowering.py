"""CPU lowering of `gpuq.ordering`: LLVM atomics.

System and device scope are one scope here. Read-modify-writes are sequentially consistent,
which is stronger than the contract and costs nothing on x86-64.
"""

from __future__ import annotations

import platform
import time
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from gpuq import ordering
from gpuq.host.libc import read_clock

_PAUSE = {"x86_64": "pause", "AMD64": "pause", "aarch64": "isb", "arm64": "isb"}.get(
    platform.machine(), ""
)
# The pause instruction is inline assembly, for which Numba sets up no parser.
binding.initialize_native_asmparser()
# A wait of some milliseconds is no wait for a small read, and a core is worth more than the
# microseconds by which a sleeper is late.
_SPINS_BEFORE_YIELD = 64
_SPINS_BEFORE_SLEEP = 4096
_SLEEP_US = 20


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Address of one element; the index is taken as it is, neither wrapped nor checked."""
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, view, [index], wraparound=False)


def _is_words(words: Any) -> bool:
    return (
        isinstance(words, types.Array)
        and words.ndim == 1
        and words.layout == "C"
        and isinstance(words.dtype, types.Integer)
    )


def _load(order: str) -> Any:
    @intrinsic
    def load(typing_context: Any, words: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array_type = signature.args[0]
            pointer = _pointer(context, builder, array_type, *arguments)
            return builder.load_atomic(pointer, order, array_type.dtype.bitwidth // 8)

        return words.dtype(words, types.intp), codegen

    return load


def _store(order: str) -> Any:
    @intrinsic
    def store(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array_type = signature.args[0]
            array, position, word = arguments
            pointer = _pointer(context, builder, array_type, array, position)
            builder.store_atomic(word, pointer, order, array_type.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(words, types.intp, words.dtype), codegen

    return store


@intrinsic
def _fetch_add(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, position, word = arguments
        pointer = _pointer(context, builder, signature.args[0], array, position)
        return builder.atomic_rmw("add", pointer, word, "seq_cst")

    return words.dtype(words, types.intp, words.dtype), codegen


@intrinsic
def _compare_exchange(
    typing_context: Any, words: Any, index: Any, expected: Any, value: Any
) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, position, old, new = arguments
        pointer = _pointer(context, builder, signature.args[0], array, position)
        pair = builder.cmpxchg(pointer, old, new, "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return words.dtype(words, types.intp, words.dtype, words.dtype), codegen


@intrinsic
def _pause(typing_context: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [])
        builder.asm(function_type, _PAUSE, "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _monotonic_ns(typing_context: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return read_clock(builder, time.CLOCK_MONOTONIC)

    return types.int64(), codegen


_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@overload(ordering.as_word, strict=False)
def _(value: Any) -> Any:
    if isinstance(value, (types.Integer, types.Boolean)):
        return lambda value: np.uint64(value)
    return None


@overload(ordering.as_signed, strict=False)
def _(word: Any) -> Any:
    if isinstance(word, types.Integer):
        return lambda word: np.int64(word)
    return None


def _overload_load(operation: Any, order: str) -> None:
    load = _load(order)

    @overload(operation, strict=False)
    def _(words: Any, index: Any) -> Any:
        return (lambda words, index: load(words, index)) if _is_words(words) else None


def _overload_store(operation: Any, order: str) -> None:
    store = _store(order)

    @overload(operation, strict=False)
    def _(words: Any, index: Any, value: Any) -> Any:
        if not _is_words(words):
            return None
        return lambda words, index, value: store(words, index, value)


_overload_load(ordering.load_acquire, "acquire")
_overload_load(ordering.load_acquire_device, "acquire")
_overload_load(ordering.load_relaxed, "monotonic")
_overload_store(ordering.store_release, "release")
_overload_store(ordering.store_release_device, "release")
_overload_store(ordering.store_relaxed, "monotonic")


@overload(ordering.fetch_add, strict=False)
def _(words: Any, index: Any, value: Any) -> Any:
    if not _is_words(words):
        return None
    return lambda words, index, value: _fetch_add(words, index, value)


@overload(ordering.compare_exchange, strict=False)
def _(words: Any, index: Any, expected: Any, value: Any) -> Any:
    if not _is_words(words):
        return None
    return lambda words, index, expected, value: _compare_exchange(words, index, expected, value)


@overload(ordering.relax, strict=False)
def _(spins: Any) -> Any:
    def relax(spins: Any) -> None:
        if spins < _SPINS_BEFORE_YIELD:
            _pause()
        elif spins < _SPINS_BEFORE_SLEEP:
            _sched_yield()
        else:
            _usleep(_SLEEP_US)

    return relax


@overload(ordering.clock_ns, strict=False)
def _() -> Any:
    return lambda: _monotonic_ns()

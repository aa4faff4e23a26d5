"""CUDA lowering of `gpuq.ordering`: inline PTX.

Every access is an `asm volatile` with a memory clobber, so that the compiler neither hoists a
polling load out of its loop nor moves another access across it; `numba.cuda`'s own cache hints
promise neither. Semantics and scopes: PTX ISA, "Memory consistency model" (`ld.acquire`,
`st.release`, `atom.acq_rel`; `.sys` and `.gpu`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic, overload

from gpuq import ordering

_WORD = ir.IntType(64)
_CLOBBER = "~{memory}"

_SHORT_SPINS = 32
_SHORT_SLEEP_NS = 20
_LONG_SLEEP_NS = 200


def _is_words(words: Any) -> bool:
    """Whether `words` is a flat array of 8-byte words; anything narrower is no shared word here."""
    return (
        isinstance(words, types.Array)
        and words.ndim == 1
        and words.layout == "C"
        and isinstance(words.dtype, types.Integer)
        and words.dtype.bitwidth == 64
    )


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Generic address of one element; the index is taken as it is, neither wrapped nor checked."""
    from numba.cuda import cgutils

    view = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, view, [index], wraparound=False)


def _assembly(builder: Any, result: Any, text: str, constraint: str, arguments: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    constraints = ",".join([constraint, _CLOBBER] if constraint else [_CLOBBER])
    return builder.asm(function_type, text, constraints, arguments, True)


def _load(instruction: str) -> Any:
    @intrinsic
    def load(typing_context: Any, words: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _pointer(context, builder, signature.args[0], *arguments)
            return _assembly(builder, _WORD, f"{instruction} $0, [$1];", "=l,l", [pointer])

        return words.dtype(words, types.intp), codegen

    return load


def _store(instruction: str) -> Any:
    @intrinsic
    def store(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array, position, word = arguments
            pointer = _pointer(context, builder, signature.args[0], array, position)
            text = f"{instruction} [$0], $1;"
            _assembly(builder, ir.VoidType(), text, "l,l", [pointer, word])
            return context.get_dummy_value()

        return types.void(words, types.intp, words.dtype), codegen

    return store


@intrinsic
def _fetch_add(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, position, word = arguments
        pointer = _pointer(context, builder, signature.args[0], array, position)
        text = "atom.acq_rel.gpu.add.u64 $0, [$1], $2;"
        return _assembly(builder, _WORD, text, "=l,l,l", [pointer, word])

    return words.dtype(words, types.intp, words.dtype), codegen


@intrinsic
def _compare_exchange(
    typing_context: Any, words: Any, index: Any, expected: Any, value: Any
) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, position, old, new = arguments
        pointer = _pointer(context, builder, signature.args[0], array, position)
        text = "atom.acq_rel.gpu.cas.b64 $0, [$1], $2, $3;"
        return _assembly(builder, _WORD, text, "=l,l,l,l", [pointer, old, new])

    return words.dtype(words, types.intp, words.dtype, words.dtype), codegen


@intrinsic
def _nanosleep(typing_context: Any, duration_ns: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _assembly(builder, ir.VoidType(), "nanosleep.u32 $0;", "r", list(arguments))
        return context.get_dummy_value()

    return types.void(types.uint32), codegen


@intrinsic
def _global_timer(typing_context: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _assembly(builder, _WORD, "mov.u64 $0, %globaltimer;", "=l", [])

    return types.int64(), codegen


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


def _overload_load(operation: Any, instruction: str) -> None:
    load = _load(instruction)

    @overload(operation, strict=False)
    def _(words: Any, index: Any) -> Any:
        return (lambda words, index: load(words, index)) if _is_words(words) else None


def _overload_store(operation: Any, instruction: str) -> None:
    store = _store(instruction)

    @overload(operation, strict=False)
    def _(words: Any, index: Any, value: Any) -> Any:
        if not _is_words(words):
            return None
        return lambda words, index, value: store(words, index, value)


_overload_load(ordering.load_acquire, "ld.acquire.sys.b64")
_overload_load(ordering.load_acquire_device, "ld.acquire.gpu.b64")
_overload_load(ordering.load_relaxed, "ld.relaxed.gpu.b64")
_overload_store(ordering.store_release, "st.release.sys.b64")
_overload_store(ordering.store_release_device, "st.release.gpu.b64")
_overload_store(ordering.store_relaxed, "st.relaxed.gpu.b64")


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
        _nanosleep(_SHORT_SLEEP_NS if spins < _SHORT_SPINS else _LONG_SLEEP_NS)

    return relax


@overload(ordering.clock_ns, strict=False)
def _() -> Any:
    return lambda: _global_timer()

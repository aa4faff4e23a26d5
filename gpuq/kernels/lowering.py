"""CUDA lowering of `gpuq.ordering` by inline PTX, and of `gpuq.kernels.cooperation`.

Every access is an `asm volatile` with a memory clobber, so that the compiler neither hoists a
polling load out of its loop nor moves another access across it; `numba.cuda`'s own cache hints
promise neither. Semantics and scopes: PTX ISA, "Memory consistency model" (`ld.acquire`,
`st.release`, `atom.acq_rel`; `.sys` and `.gpu`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic, overload

from gpuq import ordering
from gpuq.kernels import cooperation
from gpuq.kernels.cooperation import NO_FAILURE, STATUS_BITS
from gpuq.layout import FLAG_STATUS_MASK

_WORD = ir.IntType(64)
_CLOBBER = "~{memory}"
_SHARED = 3  # address space (NVVM IR specification)
_BLOCK_WORD = "_gpuq_block_word"

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
_overload_load(ordering.load_relaxed, "ld.relaxed.sys.b64")
_overload_store(ordering.store_release, "st.release.sys.b64")
_overload_store(ordering.store_release_device, "st.release.gpu.b64")
_overload_store(ordering.store_relaxed, "st.relaxed.sys.b64")


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


# --- cooperation ---------------------------------------------------------------------------


@overload(cooperation.block_rank, strict=False)
def _() -> Any:
    def rank() -> Any:
        plane = np.int64(cuda.threadIdx.y) + cuda.blockDim.y * np.int64(cuda.threadIdx.z)
        return np.int64(cuda.threadIdx.x) + cuda.blockDim.x * plane

    return rank


@overload(cooperation.block_size, strict=False)
def _() -> Any:
    return lambda: np.int64(cuda.blockDim.x) * cuda.blockDim.y * cuda.blockDim.z


@overload(cooperation.block_barrier, strict=False)
def _() -> Any:
    return lambda: cuda.syncthreads()


def _block_word(builder: Any) -> Any:
    """Generic address of one word of shared memory, the same wherever in the module it is asked.

    `cuda.shared.array` cannot be used here: its variable is exported, and when two device
    functions of a kernel both call a third that has one, linking finds the symbol twice.
    """
    module = builder.module
    word = module.globals.get(_BLOCK_WORD)
    if word is None:
        word = ir.GlobalVariable(module, _WORD, _BLOCK_WORD, addrspace=_SHARED)
        word.linkage = "internal"
        word.initializer = ir.Constant(_WORD, ir.Undefined)
        word.align = 8
    return builder.addrspacecast(word, _WORD.as_pointer(), "generic")


@intrinsic
def _set_block_word(typing_context: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _block_word(builder)
        _assembly(builder, ir.VoidType(), "st.volatile.b64 [$0], $1;", "l,l", [pointer, *arguments])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _get_block_word(typing_context: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _block_word(builder)
        return _assembly(builder, _WORD, "ld.volatile.b64 $0, [$1];", "=l,l", [pointer])

    return types.int64(), codegen


@intrinsic
def _lower_block_word(typing_context: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _block_word(builder)
        return _assembly(
            builder, _WORD, "atom.min.s64 $0, [$1], $2;", "=l,l,l", [pointer, *arguments]
        )

    return types.int64(types.int64), codegen


@overload(cooperation.block_broadcast, strict=False)
def _(value: Any) -> Any:
    def broadcast(value: Any) -> Any:
        if cooperation.block_rank() == 0:
            _set_block_word(value)
        cuda.syncthreads()
        value = _get_block_word()
        # So that the next use of the word cannot overtake this one.
        cuda.syncthreads()
        return value

    return broadcast


@overload(cooperation.block_combine, strict=False)
def _(status: Any) -> Any:
    def combine(status: Any) -> Any:
        rank = cooperation.block_rank()
        if rank == 0:
            _set_block_word(NO_FAILURE)
        cuda.syncthreads()
        if status != 0:
            _lower_block_word(rank << STATUS_BITS | status)
        cuda.syncthreads()
        least = _get_block_word()
        cuda.syncthreads()
        return 0 if least == NO_FAILURE else least & FLAG_STATUS_MASK

    return combine


@overload(cooperation.warp_lanes, strict=False)
def _() -> Any:
    return lambda: cuda.activemask()


@overload(cooperation.is_warp_leader, strict=False)
def _(lanes: Any) -> Any:
    return lambda lanes: cuda.laneid == cuda.ffs(lanes) - 1


@overload(cooperation.warp_broadcast, strict=False)
def _(lanes: Any, value: Any) -> Any:
    def broadcast(lanes: Any, value: Any) -> Any:
        cuda.syncwarp(lanes)
        return cuda.shfl_sync(lanes, np.int64(value), cuda.ffs(lanes) - 1)

    return broadcast


@overload(cooperation.warp_combine, strict=False)
def _(lanes: Any, status: Any) -> Any:
    def combine(lanes: Any, status: Any) -> Any:
        cuda.syncwarp(lanes)
        failing = cuda.ballot_sync(lanes, status != 0)
        if failing == 0:
            return np.int64(0)
        return cuda.shfl_sync(lanes, np.int64(status), cuda.ffs(failing) - 1)

    return combine

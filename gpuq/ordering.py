"""The memory operations: every access to a shared word goes through these few functions.

Each has three bodies with one contract. The plain bodies below serve the simulator and the
model checker; `gpuq.kernels.lowering` compiles them to PTX and `gpuq.host.lowering` to LLVM
atomics. Code that calls them is written once, in plain Python.

=========================  ======================================================================
operation                  contract
=========================  ======================================================================
`load_acquire`             nothing after it moves before it; system scope
`store_release`            nothing before it moves after it; system scope
`load_acquire_device`      the same, between threads of one device only
`store_release_device`     the same, between threads of one device only
`load_relaxed`             atomic, orders nothing, is never hoisted out of a loop
`store_relaxed`            atomic, orders nothing
`fetch_add`                one atomic step, acquire and release; device scope
`compare_exchange`         one atomic step, acquire and release; device scope
`relax`                    a hint inside a spin: let others run
`clock_ns`                 a monotonic clock, in nanoseconds, with an origin of its own
=========================  ======================================================================

System scope reaches host and device. Read-modify-write stays at device scope, because it is
not guaranteed to be atomic across a bus (CUDA C++ Programming Guide, "System-wide atomics";
PTX ISA, "Memory consistency model"). Words are 8 bytes and naturally aligned; aligned 8-byte
loads and stores of mapped memory are single accesses.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

_WORD_MASK = 0xFFFF_FFFF_FFFF_FFFF

# One lock for all words: in the simulator each atomic of `numba.cuda` has a lock of its own, so
# an add and a compare-and-swap of the same word would not be atomic together.
_lock = threading.Lock()


def _fence() -> None:
    """Order what comes before this against what comes after it, also towards compiled threads.

    To take a lock and leave it is an acquire and a release; the next taking is ordered behind
    that. x86-64 needs none of it, weaker processors do.
    """
    with _lock:
        pass


def as_word(value: Any) -> Any:
    """Return `value` as an unsigned 64-bit word; a negative number becomes its two's complement."""
    return np.uint64(int(value) & _WORD_MASK)


def as_signed(word: Any) -> Any:
    """Return a 64-bit word as a signed integer, by two's complement."""
    value = int(word) & _WORD_MASK
    return value - (1 << 64) if value >> 63 else value


def load_acquire(words: Any, index: Any) -> Any:
    """Load ``words[index]``; pairs with `store_release` of the same word."""
    with _lock:
        word = words[index]
    _fence()
    return word


def store_release(words: Any, index: Any, value: Any) -> None:
    """Store `value` to ``words[index]``; everything written before is visible with it."""
    _fence()
    with _lock:
        words[index] = value


def load_acquire_device(words: Any, index: Any) -> Any:
    """Load ``words[index]``; pairs with `store_release_device` or a read-modify-write."""
    with _lock:
        word = words[index]
    _fence()
    return word


def store_release_device(words: Any, index: Any, value: Any) -> None:
    """Store `value` to ``words[index]`` for the other threads of this device."""
    _fence()
    with _lock:
        words[index] = value


def load_relaxed(words: Any, index: Any) -> Any:
    """Load ``words[index]`` in one access that orders nothing."""
    with _lock:
        return words[index]


def store_relaxed(words: Any, index: Any, value: Any) -> None:
    """Store `value` to ``words[index]`` in one access that orders nothing."""
    with _lock:
        words[index] = value


def fetch_add(words: Any, index: Any, value: Any) -> Any:
    """Add `value` to ``words[index]`` and return what stood there before."""
    with _lock:
        before = words[index]
        words[index] = before + value
        return before


def compare_exchange(words: Any, index: Any, expected: Any, value: Any) -> Any:
    """Store `value` where ``words[index] == expected``; return what stood there before."""
    with _lock:
        before = words[index]
        if before == expected:
            words[index] = value
        return before


def relax(spins: Any) -> None:
    """Let others run; `spins` counts the turns of this spin so far and lengthens the pause.

    The plain body gives the interpreter lock away, or a spin would keep it for 5 ms at a time.
    """
    time.sleep(0)


def clock_ns() -> Any:
    """Return a monotonic time in nanoseconds (CUDA: ``%globaltimer``; CPU: CLOCK_MONOTONIC)."""
    return time.monotonic_ns()


OPERATIONS = (
    as_word,
    as_signed,
    load_acquire,
    store_release,
    load_acquire_device,
    store_release_device,
    load_relaxed,
    store_relaxed,
    fetch_add,
    compare_exchange,
    relax,
    clock_ns,
)
"""Everything that a lowering must provide."""

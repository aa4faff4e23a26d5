"""The memory operations: the plain bodies and the compiled ones do the same to every word."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS
from hypothesis import given
from hypothesis import strategies as st
from kernels import compiled_kernel

from gpuq import ordering


def _load_acquire(words, index):
    return ordering.load_acquire(words, index)


def _load_acquire_device(words, index):
    return ordering.load_acquire_device(words, index)


def _load_relaxed(words, index):
    return ordering.load_relaxed(words, index)


def _store_release(words, index, value):
    ordering.store_release(words, index, value)


def _store_release_device(words, index, value):
    ordering.store_release_device(words, index, value)


def _store_relaxed(words, index, value):
    ordering.store_relaxed(words, index, value)


def _fetch_add(words, index, value):
    return ordering.fetch_add(words, index, value)


def _compare_exchange(words, index, expected, value):
    return ordering.compare_exchange(words, index, expected, value)


def _as_word(value):
    return ordering.as_word(value)


def _as_signed(word):
    return ordering.as_signed(word)


def _clock_ns():
    return ordering.clock_ns()


def _relax(spins):
    return ordering.relax(spins)


LOADS = {
    "load_acquire": _load_acquire,
    "load_acquire_device": _load_acquire_device,
    "load_relaxed": _load_relaxed,
}
STORES = {
    "store_release": _store_release,
    "store_release_device": _store_release_device,
    "store_relaxed": _store_relaxed,
}
OTHERS = {
    "fetch_add": _fetch_add,
    "compare_exchange": _compare_exchange,
    "as_word": _as_word,
    "as_signed": _as_signed,
    "clock_ns": _clock_ns,
    "relax": _relax,
}
BODIES: dict[str, Callable[..., Any]] = LOADS | STORES | OTHERS
COMPILED = {name: compiled_kernel(body) for name, body in BODIES.items()}
PLAIN: dict[str, Callable[..., Any]] = {name: getattr(ordering, name) for name in BODIES}
EACH = pytest.mark.parametrize("operations", [PLAIN, COMPILED], ids=["plain", "compiled"])

WORDS = st.integers(0, (1 << 64) - 1)


def test_every_operation_is_tested_here() -> None:
    assert {operation.__name__ for operation in ordering.OPERATIONS} == set(BODIES)


def assert_only_changed(words: Any, before: Any, index: int, value: int) -> None:
    expected = before.copy()
    expected[index] = value
    np.testing.assert_array_equal(words, expected)


@EACH
@given(words=st.lists(WORDS, min_size=1, max_size=9), index=st.integers(0, 8), value=WORDS)
def test_loads_and_stores_touch_one_word(
    operations: Any, words: list[int], index: int, value: int
) -> None:
    index %= len(words)
    for name in LOADS:
        array = np.array(words, dtype=np.uint64)
        assert operations[name](array, index) == words[index]
        assert array.tolist() == words
    for name in STORES:
        array = np.array(words, dtype=np.uint64)
        operations[name](array, index, np.uint64(value))
        assert_only_changed(array, np.array(words, dtype=np.uint64), index, value)


@EACH
@given(before=WORDS, change=WORDS)
def test_fetch_add_wraps_and_returns_what_was_there(
    operations: Any, before: int, change: int
) -> None:
    words = np.array([1, before, 3], dtype=np.uint64)
    with np.errstate(over="ignore"):
        assert operations["fetch_add"](words, 1, np.uint64(change)) == before
    assert words.tolist() == [1, (before + change) % (1 << 64), 3]


@EACH
@given(before=WORDS, expected=WORDS, value=WORDS, hit=st.booleans())
def test_compare_exchange_stores_only_on_a_hit(
    operations: Any, before: int, expected: int, value: int, hit: bool
) -> None:
    expected = before if hit else expected
    words = np.array([1, before, 3], dtype=np.uint64)
    seen = operations["compare_exchange"](words, 1, np.uint64(expected), np.uint64(value))
    assert seen == before
    assert words.tolist() == [1, value if expected == before else before, 3]


@EACH
@given(value=st.integers(-(1 << 63), (1 << 63) - 1))
def test_words_and_signed_numbers_are_twos_complement(operations: Any, value: int) -> None:
    word = operations["as_word"](value)
    assert int(word) == value % (1 << 64)
    assert int(operations["as_signed"](np.uint64(word))) == value
    assert int(operations["as_signed"](value)) == value


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["fetch_add", "compare_exchange", "store_release", "load_acquire"]),
            st.integers(0, 2),
            st.one_of(WORDS, st.integers(0, 3)),
            st.one_of(WORDS, st.integers(0, 3)),
        ),
        max_size=30,
    )
)
def test_any_sequence_does_the_same_plain_and_compiled(steps: list[Any]) -> None:
    results = []
    for operations in (PLAIN, COMPILED):
        words = np.zeros(3, dtype=np.uint64)
        seen = []
        for name, index, a, b in steps:
            a, b = np.uint64(a), np.uint64(b)
            arguments = {
                "fetch_add": (a,), "store_release": (a,), "compare_exchange": (a, b),
                "load_acquire": (),
            }[name]  # fmt: skip
            with np.errstate(over="ignore"):
                result = operations[name](words, index, *arguments)
            seen.append(None if result is None else int(result))
        results.append((seen, words.tolist()))
    assert results[0] == results[1]


@EACH
def test_fetch_add_and_compare_exchange_are_atomic_together(operations: Any) -> None:
    # In the simulator of Numba each has a lock of its own, so one could swallow the other.
    # Once compiled they run without the interpreter lock.
    words = np.zeros(1, dtype=np.uint64)
    add, swap = operations["fetch_add"], operations["compare_exchange"]
    add(words, 0, np.uint64(0))
    swap(words, 0, np.uint64(1), np.uint64(1))
    threads, turns = 4, 800
    gate = threading.Barrier(threads)

    def run(number: int) -> None:
        gate.wait(WAIT_SECONDS)
        for _ in range(turns):
            if number % 2:
                add(words, 0, np.uint64(1))
                continue
            while True:
                seen = words[0]
                if swap(words, 0, seen, seen + np.uint64(1)) == seen:
                    break

    workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(WAIT_SECONDS)
    assert words[0] == threads * turns


@EACH
def test_the_clock_goes_forward_in_nanoseconds(operations: Any) -> None:
    readings = [int(operations["clock_ns"]()) for _ in range(100)]
    assert readings == sorted(readings)
    assert readings[0] > 0


def test_the_clocks_of_the_host_are_one() -> None:
    first, between, last = PLAIN["clock_ns"](), COMPILED["clock_ns"](), PLAIN["clock_ns"]()
    assert first <= between <= last


@EACH
def test_relax_returns_at_any_depth_of_a_spin(operations: Any) -> None:
    for spins in (0, 1, 63, 64, 1000, 1 << 40):
        assert operations["relax"](spins) is None


def _spin(words):
    while ordering.load_acquire(words, 0) == 0:
        pass
    return words[1]


def test_a_compiled_spin_sees_a_store_of_another_thread() -> None:
    spin = compiled_kernel(_spin)
    words = np.array([1, 0], dtype=np.uint64)
    spin(words)
    words[0] = 0
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(spin(words)))
    thread.start()
    words[1] = 42
    ordering.store_release(words, 0, np.uint64(1))
    thread.join(WAIT_SECONDS)
    assert seen == [42]


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64])
def test_the_compiled_loads_keep_the_words_type(dtype: Any) -> None:
    words = np.array([7, 8], dtype=dtype)
    assert COMPILED["load_acquire"](words, 1) == 8
    COMPILED["store_release"](words, 0, dtype(9))
    assert words.tolist() == [9, 8]


@pytest.mark.parametrize(
    "words",
    [np.zeros((2, 2), dtype=np.uint64), np.zeros(4, dtype=np.float64), np.zeros(8, np.uint64)[::2]],
    ids=["two dimensions", "floats", "strided"],
)
def test_what_is_no_flat_array_of_words_does_not_compile(words: Any) -> None:
    from numba.core.errors import TypingError

    with pytest.raises(TypingError):
        COMPILED["load_acquire"](words, 0)

"""The ready-made bodies against NumPy, on every target that runs here, and their PTX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import types
from ptx import QUEUE, Compiled, accesses_at_fault, compiled_body
from targets import TARGET, everywhere, examples, open_loader, run_in_the_simulator

import gpuq
from gpuq.compiling import SIMULATED
from gpuq.kernels import ready
from gpuq.kernels.stream import Stream
from gpuq.layout import Status

VALUES = 50


class Runs:
    """A loader that runs bodies over files."""

    def __init__(self, loader: gpuq.Loader, folder: Path) -> None:
        self.loader = loader
        self.path = folder / "elements.bin"
        self.statuses = np.zeros(0, np.int64)

    def threads(self, wanted: int) -> int:
        """Return how many threads a block has here."""
        return wanted if TARGET == "simulator" else 1

    def walk(
        self, body: Callable[..., Any], elements: Any, tile: Any, blocks: int, threads: int,
        *arguments: Any, lost: int = 0,
    ) -> None:  # fmt: skip
        """Run a body over elements, of which the file lacks the last `lost` bytes."""
        content = elements.tobytes()
        self.path.write_bytes(content[: len(content) - lost])
        self.statuses = np.full(blocks, -1, np.int64)
        with self.loader.open(self.path) as source:
            stream = self.loader.stream(
                source, tile, elements.dtype, end=None if not lost else len(content),
                workers=blocks,
            )  # fmt: skip
            self.loader.launch(
                body, blocks, self.loader.queue, stream, *arguments, self.statuses,
                threads_per_block=threads,
            )  # fmt: skip
            self.loader.synchronize()
            stream.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with open_loader(slots=64) as loader:
        yield Runs(loader, tmp_path_factory.mktemp("elements"))


shapes = {
    "tile": st.sampled_from([7, 16, 1000]),
    "blocks": st.integers(1, 4),
    "threads": st.sampled_from([1, 3]),
}


def checksum_of(elements: Any) -> int:
    with np.errstate(over="ignore"):
        numbers = np.arange(len(elements), dtype=np.uint64) + np.uint64(1)
        return int((numbers * elements.astype(np.uint64)).sum())


@everywhere
@settings(max_examples=examples(40))
@given(dtype=st.sampled_from(["u1", "<u8", "<i4"]), count=st.integers(0, 200), **shapes)
def test_a_checksum_is_numpys(
    runs: Runs, dtype: str, count: int, tile: int, blocks: int, threads: int
) -> None:
    kind = np.iinfo(dtype)
    elements = np.random.default_rng(count).integers(
        kind.min, kind.max, count, dtype=dtype, endpoint=True
    )
    sums = np.zeros((blocks, runs.threads(threads)), np.uint64)
    runs.walk(ready.checksum, elements, tile, blocks, threads, sums)
    assert list(runs.statuses) == [Status.OK] * blocks
    assert int(sums.sum()) == checksum_of(elements)


def test_a_checksum_tells_elements_that_changed_places() -> None:
    assert checksum_of(np.array([1, 2, 3])) != checksum_of(np.array([2, 1, 3]))


@everywhere
@settings(max_examples=examples(40))
@given(
    dtype=st.sampled_from(["<f4", "<i2"]), rows=st.integers(0, 60), columns=st.integers(1, 9),
    **shapes,
)  # fmt: skip
def test_columns_are_reduced_as_numpy_does(
    runs: Runs, dtype: str, rows: int, columns: int, tile: int, blocks: int, threads: int
) -> None:
    matrix = np.random.default_rng(rows).normal(0, 100, (rows, columns)).astype(dtype)
    found = [np.full((blocks, columns), np.nan) for _ in range(3)]
    runs.walk(ready.reduce_columns, matrix, (tile, columns), blocks, threads, *found)
    assert list(runs.statuses) == [Status.OK] * blocks
    sums, lows, highs = found
    np.testing.assert_allclose(sums.sum(axis=0), matrix.sum(axis=0, dtype=float), atol=1e-9)
    np.testing.assert_array_equal(
        lows.min(axis=0), matrix.astype(float).min(axis=0, initial=np.inf)
    )
    np.testing.assert_array_equal(
        highs.max(axis=0), matrix.astype(float).max(axis=0, initial=-np.inf)
    )


@everywhere
@settings(max_examples=examples(40))
@given(dtype=st.sampled_from(["u1", "<i4"]), count=st.integers(0, 200), **shapes)
def test_values_are_counted_as_numpy_does(
    runs: Runs, dtype: str, count: int, tile: int, blocks: int, threads: int
) -> None:
    least = 0 if dtype == "u1" else -5
    elements = np.random.default_rng(count).integers(least, VALUES + 5, count, dtype=dtype)
    counts = np.zeros((blocks, runs.threads(threads), VALUES), np.int64)
    runs.walk(ready.histogram, elements, tile, blocks, threads, counts)
    assert list(runs.statuses) == [Status.OK] * blocks
    known = elements[(elements >= 0) & (elements < VALUES)]
    expected = np.bincount(known, minlength=VALUES)
    np.testing.assert_array_equal(counts.sum(axis=(0, 1)), expected)


@everywhere
def test_a_block_whose_rows_are_missing_says_so(runs: Runs) -> None:
    """The last of three blocks has the last 34 of 100 elements, of which 4 are not there."""
    elements = np.ones(100, np.uint8)
    for body, arguments in (
        (ready.checksum, [np.zeros((3, 1), np.uint64)]),
        (ready.histogram, [np.zeros((3, 1, VALUES), np.int64)]),
    ):
        runs.walk(body, elements, 10, 3, 1, *arguments, lost=4)
        assert list(runs.statuses) == [Status.OK, Status.OK, Status.END_OF_FILE]
    found = [np.zeros((3, 1)) for _ in range(3)]
    runs.walk(ready.reduce_columns, elements.reshape(-1, 1), (10, 1), 3, 1, *found, lost=4)
    assert list(runs.statuses) == [Status.OK, Status.OK, Status.END_OF_FILE]


@everywhere
@pytest.mark.parametrize("blocks", [1, 3])
def test_rows_are_gathered(runs: Runs, blocks: int) -> None:
    table = np.random.default_rng(1).normal(size=(40, 6)).astype("<f4")
    table.tofile(runs.path)
    indices = np.array([3, 3, 39, 0, 1, 2, -1, 40, 17], np.int64)
    out = np.zeros((len(indices), 6), "<f4")
    statuses = np.full(len(indices), -1, np.int64)
    with runs.loader.open(runs.path) as source:
        destination = runs.loader.register(out)
        rows = runs.loader.table(source, destination, 6 * 4, workers=blocks)
        runs.loader.launch(ready.gather_rows, blocks, runs.loader.queue, rows, indices, statuses)
        runs.loader.synchronize()
        destination.unregister()
    known = (indices >= 0) & (indices < 40)
    assert list(statuses) == [Status.OK if ok else Status.OUT_OF_BOUNDS for ok in known]
    np.testing.assert_array_equal(out[known], table[indices[known]])
    assert not out[~known].any()


@everywhere
def test_each_block_pulls_a_request(runs: Runs, payload: Any, payload_path: Path) -> None:
    out = np.zeros(50, np.uint8)
    with runs.loader.open(payload_path) as source:
        destination = runs.loader.register(out)
        rows = [(source.handle, destination.handle, 10 * i, 77 * i, 77 * i + 10) for i in range(4)]
        rows.append((source.handle, destination.handle, 0, 200_000, 200_001))
        requests = np.array(rows, np.uint64).reshape(-1)
        answers = np.full(5 * ready.ANSWER_WORDS, 99, np.uint64)
        runs.loader.launch(ready.pull_request, 5, runs.loader.queue, requests, answers)
        runs.loader.synchronize()
        destination.unregister()
    assert list(answers) == [Status.OK, 0] * 4 + [Status.END_OF_FILE, 0]
    for i in range(4):
        np.testing.assert_array_equal(out[10 * i : 10 * i + 10], payload[77 * i : 77 * i + 10])


# --- PTX -----------------------------------------------------------------------------------------

INTEGERS = types.Array(types.int64, 1, "C")
WORDS = types.Array(types.uint64, 1, "C")


def stream_of(element: Any, dimensions: int) -> Any:
    arrays = {
        "tiles": types.Array(element, dimensions + 2, "C"),
        "tickets": types.Array(types.int64, 2, "C"),
        "words": types.Array(types.int64, 2, "C"),
    }
    return types.NamedTuple([arrays.get(name, types.int64) for name in Stream._fields], Stream)


def matrix_of(element: Any, dimensions: int = 2) -> Any:
    return types.Array(element, dimensions, "C")


BODIES: dict[str, dict[str, Any]] = {
    "checksum": {"stream": stream_of(types.uint64, 1), "sums": matrix_of(types.uint64)},
    "reduce_columns": {
        "stream": stream_of(types.float32, 2),
        **dict.fromkeys(("sums", "lows", "highs"), matrix_of(types.float64)),
    },
    "histogram": {"stream": stream_of(types.uint8, 1), "counts": matrix_of(types.int64, 3)},
    "gather_rows": {
        "table": types.NamedTuple([types.int64] * len(gpuq.Table._fields), gpuq.Table),
        "indices": INTEGERS,
    },
    "pull_request": {"requests": WORDS, "answers": WORDS},
}


@functools.cache
def compiled(name: str) -> Compiled:
    arguments = {"q": QUEUE, **BODIES[name]}
    if name != "pull_request":
        arguments["statuses"] = INTEGERS
    return compiled_body(getattr(ready, name), arguments)


@pytest.mark.skipif(SIMULATED, reason="the simulator compiles nothing")
@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (12, 0)], ids=["7.5", "9.0", "12.0"])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_assembles_and_reads_memory_as_it_must(
    name: str, capability: tuple[int, int]
) -> None:
    assert accesses_at_fault(compiled(name).ptx(capability)) == []
    assert compiled(name).cubin(capability).startswith(b"\x7fELF")


def test_marked_tests_hold_in_the_simulator() -> None:
    run_in_the_simulator(__file__, __name__)

"""On a GPU: bytes, streams, scopes, laps, and arrays of all libraries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu
import numpy as np
import pytest
from conftest import note_path

import gpuq
from gpuq.layout import Status

pytestmark = gpu.needs_gpu()
ONLY_CUDA = pytest.mark.skipif(gpu.IS_REHEARSAL, reason="a rehearsal has no CUDA arrays or streams")

GIB = 1 << 30


@pytest.fixture(scope="module")
def content() -> Any:
    return np.random.default_rng(11).integers(0, 256, 1 << 20, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, content: Any) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "content"
    content.tofile(path)
    return path


@pytest.fixture
def loader() -> Iterator[gpuq.Loader]:
    with gpu.open_loader(slots=256, staging_buffers=32, staging_bytes=64 << 10) as made:
        yield made


def odd_rows(count: int, room: int, seed: int) -> Any:
    """Return rows of (start, end, offset) that lie apart in the destination."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([1, 7, 511, 512, 513, 4095, 4097, 20_001], count)
    starts = rng.integers(0, room - 20_001, count)
    offsets = np.concatenate([[0], np.cumsum(sizes + 3)[:-1]])
    return np.stack([starts, starts + sizes, offsets], axis=1).astype(np.int64)


def assert_rows(array: Any, content: Any, rows: Any) -> None:
    expected = np.zeros_like(array)
    for start, end, offset in rows:
        expected[offset : offset + end - start] = content[start:end]
    np.testing.assert_array_equal(array, expected)


def pull_odd_rows(loader: gpuq.Loader, path: Path, content: Any, stream: Any = None) -> None:
    rows = odd_rows(300, len(content), 5)
    source = loader.open(path)
    note_path(loader, source)
    array = gpu.put(loader, np.zeros(rows[-1, 2] + 30_000, np.uint8))
    statuses = gpu.put(loader, np.full(len(rows), -1, np.int64))
    destination = loader.register(array)
    loader.launch(
        gpu.pull_rows, 32, loader.queue, source, destination, gpu.put(loader, rows), statuses,
        stream=stream,
    )  # fmt: skip
    loader.synchronize(stream)
    assert set(gpu.get(statuses)) == {Status.OK}
    assert_rows(gpu.get(array), content, rows)


@pytest.mark.parametrize("reader", ["io_uring", "threads"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_odd_slices_by_each_reader(path, content, reader, direct):
    try:
        loader = gpu.open_loader(reader=reader, direct=direct, slots=64, staging_buffers=8)
    except gpuq.ReaderUnavailableError as error:
        pytest.skip(str(error))
    with loader:
        pull_odd_rows(loader, path, content)


def test_one_gib_is_pulled_and_verified(tmp_path):
    """Prints the bandwidth; it asserts bytes only."""
    size = (64 << 20) if gpu.IS_REHEARSAL else GIB
    path = tmp_path / "gib"
    block = np.random.default_rng(1).integers(0, 256, 16 << 20, dtype=np.uint8)
    with path.open("wb") as file:
        for number in range(size // len(block)):
            (block + np.uint8(number)).tofile(file)
    each = 256 << 10
    starts = np.arange(0, size, each)
    rows = np.stack([starts, starts + each, starts], axis=1).astype(np.int64)
    with gpu.open_loader(slots=1024, staging_buffers=128, staging_bytes=512 << 10) as loader:
        source = loader.open(path)
        note_path(loader, source)
        array = loader.empty(size, np.uint8)
        destination = loader.register(array)
        statuses = gpu.put(loader, np.full(len(rows), -1, np.int64))
        arguments = (loader.queue, source, destination, gpu.put(loader, rows), statuses)
        loader.prepare(gpu.pull_rows, *arguments)
        begin = time.perf_counter()
        loader.launch(gpu.pull_rows, 256, *arguments)
        loader.synchronize()
        seconds = time.perf_counter() - begin
        assert set(gpu.get(statuses)) == {Status.OK}
        assert loader.statistics().bytes == size
        for number in range(size // len(block)):
            piece = gpu.get(array[number * len(block) : (number + 1) * len(block)])
            np.testing.assert_array_equal(piece, block + np.uint8(number))
    print(f"figure: {size >> 20} MiB in {seconds:.3f} s, {size / seconds / 1e9:.2f} GB/s")


def test_round_trips_are_printed(loader, path):
    source = loader.open(path, direct="off")
    array = loader.empty(1 << 16, np.uint8)
    destination = loader.register(array)
    statuses = gpu.put(loader, np.zeros(1, np.int64))
    for nbytes in (8, 4096, 65536):
        times = gpu.put(loader, np.zeros(2000, np.int64))
        loader.launch(
            gpu.time_round_trips, 1, loader.queue, source, destination, nbytes, times, statuses
        )
        loader.synchronize()
        low, middle, high = np.percentile(gpu.get(times), [1, 50, 99]) / 1000
        print(
            f"figure: {nbytes} bytes, one at a time: {middle:.1f} us "
            f"(1%: {low:.1f}, 99%: {high:.1f}), from the page cache"
        )
    assert gpu.get(statuses)[0] == Status.OK


def test_slots_are_used_lap_after_lap(path, content):
    with gpu.open_loader(slots=2, staging_buffers=2, staging_bytes=4096) as loader:
        source = loader.open(path)
        array = gpu.put(loader, np.zeros(8 * 32, np.uint8))
        destination = loader.register(array)
        statuses = gpu.put(loader, np.full(32, -1, np.int64))
        loader.launch(gpu.pull_again, 32, loader.queue, source, destination, 200, statuses)
        loader.synchronize()
        assert set(gpu.get(statuses)) == {Status.OK}
        np.testing.assert_array_equal(gpu.get(array), content[: 8 * 32])
        assert loader.statistics().requests == {"OK": 32 * 200}


# --- scopes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 32, 64, 96])
@pytest.mark.parametrize("body", [gpu.by_block, gpu.by_ticket, gpu.by_counter])
def test_all_threads_of_a_block_read_what_one_or_all_pulled(loader, path, content, body, threads):
    threads = 1 if gpu.IS_REHEARSAL else threads
    blocks = 16
    for _ in range(blocks):
        loader.counter()
    tile = gpu.put(loader, np.zeros(blocks * gpu.SLICE, np.uint8))
    sums = gpu.put(loader, np.zeros((blocks, threads), np.int64))
    statuses = gpu.put(loader, np.full((blocks, threads), -1, np.int64))
    loader.launch(
        body, blocks, loader.queue, loader.open(path), loader.register(tile), tile, sums, statuses,
        threads_per_block=threads,
    )  # fmt: skip
    loader.synchronize()
    assert (gpu.get(statuses) == Status.OK).all()
    slices = content[: blocks * gpu.SLICE].reshape(blocks, gpu.SLICE).astype(np.int64)
    np.testing.assert_array_equal(gpu.get(sums).sum(axis=1), slices.sum(axis=1))


@ONLY_CUDA
@pytest.mark.parametrize("threads", [2, 32, 50, 64])
def test_lanes_that_come_together_pull_together(loader, path, content, threads):
    """Whole, partial and divergent warps: each set of lanes reads what its own leader pulled."""
    blocks, warps, half = 8, (threads + 31) // 32, gpu.SLICE // 2
    tile = gpu.put(loader, np.zeros(blocks * warps * gpu.SLICE, np.uint8))
    sums = gpu.put(loader, np.zeros((blocks, threads), np.int64))
    statuses = gpu.put(loader, np.full((blocks, threads), -1, np.int64))
    loader.launch(
        gpu.by_warp, blocks, loader.queue, loader.open(path), loader.register(tile), tile, sums,
        statuses, threads_per_block=threads,
    )  # fmt: skip
    loader.synchronize()
    assert (gpu.get(statuses) == Status.OK).all()
    halves = content[: blocks * warps * gpu.SLICE].reshape(-1, half).astype(np.int64).sum(axis=1)
    for block in range(blocks):
        for rank in range(threads):
            wanted = halves[2 * (block * warps + rank // 32) + rank % 2]
            assert gpu.get(sums)[block, rank] == wanted
    # More where lanes came apart by themselves; each set asks for itself.
    assert loader.statistics().requests["OK"] >= blocks * warps * 2


# --- streams -----------------------------------------------------------------------------------


def _numba_stream() -> Any:
    from numba import cuda

    return cuda.stream()


def _cupy_stream(**given: Any) -> Any:
    import cupy

    return cupy.cuda.Stream(**given)


@ONLY_CUDA
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: None, id="default"),
        pytest.param(lambda: 1, id="legacy-default"),
        pytest.param(lambda: 2, id="per-thread-default"),
        pytest.param(_numba_stream, id="numba-blocking"),
        pytest.param(lambda: _cupy_stream(), id="cupy-blocking"),
        pytest.param(lambda: _cupy_stream(non_blocking=True), id="cupy-non-blocking"),
    ],
)
def test_a_kernel_polls_on_any_stream(loader, path, content, make):
    pull_odd_rows(loader, path, content, make())


# --- arrays ------------------------------------------------------------------------------------


def _cupy_array(nbytes: int) -> Any:
    import cupy

    return cupy.zeros(nbytes + 5, np.uint8)[3:-2]


def _cupy_on_a_stream(nbytes: int) -> Any:
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        return cupy.zeros(nbytes, np.uint8)


def _numba_array(nbytes: int) -> Any:
    from numba import cuda

    return cuda.to_device(np.zeros(nbytes, np.uint8))


def _numba_mapped(nbytes: int) -> Any:
    from numba import cuda

    array = cuda.mapped_array(nbytes, np.uint8)
    np.asarray(array)[:] = 0
    return array


def _torch_tensor(nbytes: int) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.zeros(nbytes + 5, dtype=torch.uint8, device="cuda")[3:-2]


def _torch_bfloat16(nbytes: int) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.zeros((nbytes // 2 // 8, 8), dtype=torch.bfloat16, device="cuda")


@ONLY_CUDA
@pytest.mark.parametrize(
    "make",
    [_cupy_array, _cupy_on_a_stream, _numba_array, _numba_mapped, _torch_tensor, _torch_bfloat16],
)
def test_bytes_come_to_arrays_of(loader, path, content, make):
    nbytes = 100_000
    array = make(nbytes)
    destination = loader.register(array)
    assert destination.nbytes == nbytes
    rows = np.array([[77, 77 + nbytes, 0]], np.int64)
    statuses = gpu.put(loader, np.full(1, -1, np.int64))
    loader.launch(
        gpu.pull_rows, 1, loader.queue, loader.open(path), destination, gpu.put(loader, rows),
        statuses,
    )  # fmt: skip
    loader.synchronize()
    assert gpu.get(statuses)[0] == Status.OK
    got = np.asarray(gpu.get(array)).view(np.uint8).reshape(-1)
    np.testing.assert_array_equal(got, content[77 : 77 + nbytes])


@ONLY_CUDA
def test_arrays_out_of_reach_are_refused(loader):
    import cupy

    for array, what in (
        (np.zeros(8), "plain NumPy array"),
        (cupy.zeros((8, 8))[:, ::2], "not C-contiguous"),
        (cupy.zeros(8)[::-1], "not C-contiguous"),
    ):
        with pytest.raises(gpuq.DestinationError, match=what):
            loader.register(array)

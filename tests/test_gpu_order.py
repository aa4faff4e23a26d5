"""On a GPU: kernels beside kernels, a first launch while one polls, and streams held by gates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu
import numpy as np
import pytest
from conftest import WAIT_SECONDS, until

import gpuq
from gpuq.kernels import gate as gates
from gpuq.layout import Status
from gpuq.ordering import as_word, store_release

pytestmark = gpu.needs_gpu()
ONLY_CUDA = pytest.mark.skipif(gpu.IS_REHEARSAL, reason="a rehearsal has no CUDA streams")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    np.random.default_rng(2).integers(0, 256, 1 << 16, dtype=np.uint8).tofile(path)
    return path


@pytest.fixture
def loader() -> Iterator[gpuq.Loader]:
    with gpu.open_loader(slots=64, staging_buffers=8, staging_bytes=16 << 10) as made:
        yield made


def streams(count: int) -> list[Any]:
    if gpu.IS_REHEARSAL:
        return [None] * count
    import cupy

    return [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]


class Polling:
    """A kernel that pulls until it is told to stop, seen to run."""

    def __init__(self, loader: gpuq.Loader, path: Path, stream: Any) -> None:
        self.loader = loader
        self.stream = stream
        self.words, words = gpu.mapped(loader, 16)
        self._answers, answers = gpu.mapped(loader, 8)
        self._answers[0] = int(Status.PENDING)
        self._array = loader.empty(4096, np.uint8)
        self._arguments = (
            loader.queue, loader.open(path), loader.register(self._array), words, answers,
        )  # fmt: skip
        loader.prepare(gpu.pull_until_told, *self._arguments)

    def start(self) -> None:
        self.loader.launch(gpu.pull_until_told, 1, *self._arguments, stream=self.stream)
        until(lambda: self.words[gpu.RUNNING] != 0, "the kernel runs")

    @property
    def status(self) -> Status:
        return Status(int(self._answers[0]))

    @property
    def pulls(self) -> int:
        return int(self._answers[1])

    def stop(self) -> None:
        store_release(self.words, gpu.STOP, as_word(1))
        if not gpu.IS_REHEARSAL:
            self.loader.synchronize(self.stream)
        until(lambda: self.status != Status.PENDING, "the kernel returns")


def pull_all(loader: gpuq.Loader, path: Path, stream: Any, array: Any) -> Any:
    """Return arguments for a kernel that pulls the whole file into an array."""
    rows = gpu.put(loader, np.array([[0, 1 << 16, 0]], np.int64))
    statuses = gpu.put(loader, np.full(1, -1, np.int64))
    return (loader.queue, loader.open(path), loader.register(array), rows, statuses)


def test_a_first_launch_goes_through_while_another_kernel_polls(loader, path):
    """`prepare` has loaded it; else its launch would wait for the polling kernel to end."""
    first, second = streams(2)
    polling = Polling(loader, path, first)
    array = gpu.put(loader, np.zeros(1 << 16, np.uint8))
    arguments = pull_all(loader, path, second, array)
    loader.prepare(gpu.pull_rows, *arguments)
    polling.start()
    loader.launch(gpu.pull_rows, 1, *arguments, stream=second)
    if gpu.IS_REHEARSAL:
        until(lambda: gpu.get(arguments[-1])[0] != -1)
    else:
        loader.synchronize(second)
    assert polling.status == Status.PENDING, "the second kernel ran only when the first was over"
    polling.stop()
    assert polling.status == Status.OK
    assert polling.pulls > 0
    assert gpu.get(arguments[-1])[0] == Status.OK
    np.testing.assert_array_equal(gpu.get(array), np.fromfile(path, np.uint8))


def test_two_kernels_poll_at_once(loader, path):
    pollings = [Polling(loader, path, stream) for stream in streams(2)]
    for polling in pollings:
        polling.start()
    before = [loader.statistics().requests.get("OK", 0)]
    until(lambda: loader.statistics().requests.get("OK", 0) > before[0] + 50, "both are served")
    assert [polling.status for polling in pollings] == [Status.PENDING] * 2
    for polling in pollings:
        polling.stop()
    assert [polling.status for polling in pollings] == [Status.OK] * 2
    assert all(polling.pulls > 0 for polling in pollings)


def test_two_loaders_serve_two_kernels_at_once(path):
    with (
        gpu.open_loader(slots=16, staging_buffers=4) as one,
        gpu.open_loader(slots=16, staging_buffers=4) as other,
    ):
        first, second = streams(2)
        pollings = [Polling(one, path, first), Polling(other, path, second)]
        for polling in pollings:
            polling.start()
        for polling in pollings:
            polling.stop()
        assert [polling.status for polling in pollings] == [Status.OK] * 2


def test_host_calls_go_through_while_a_kernel_polls(loader, path):
    """Opening, registering mapped memory, statistics: none of them waits for the kernel."""
    polling = Polling(loader, path, streams(1)[0])
    mapped, _ = gpu.mapped(loader, 512)
    polling.start()
    source = loader.open(path)
    destination = loader.register(mapped)
    loader.statistics()
    destination.unregister()
    source.close()
    assert polling.status == Status.PENDING
    polling.stop()
    assert polling.status == Status.OK


@ONLY_CUDA
def test_registering_waits_for_what_writes_to_the_array_and_holds_up_no_copy(loader, path):
    """A gate holds the array's stream; a kernel on another stream is served meanwhile."""
    import cupy

    writing, polling_on = streams(2)
    polling = Polling(loader, path, polling_on)
    host, words = gpu.mapped(loader, gates.GATE_WORDS)
    gate = gates.Gate(words, loader.queue.control)
    kernel = gates.gate_kernel()
    loader.prepare(kernel, gate, 1, gpu.LONG_NS)
    array = cupy.zeros(1 << 16, np.uint8)
    cupy.cuda.Device().synchronize()
    arguments: list[Any] = []
    with writing:
        array.fill(1)  # loads CuPy's kernel
        writing.synchronize()
        numba_stream = _numba(writing)
        kernel[1, 1, numba_stream](gate, 1, gpu.LONG_NS)
        array.fill(7)
        interface = dict(array.__cuda_array_interface__)
    assert interface["stream"] == writing.ptr
    holder = _Described(array, interface)
    polling.start()
    registering = threading.Thread(target=lambda: arguments.append(loader.register(holder)))
    registering.start()
    until(lambda: gates.has_reached(host, 1), "the gate holds the stream")
    before = loader.statistics().requests.get("OK", 0)
    until(lambda: loader.statistics().requests.get("OK", 0) > before + 20, "copies go on")
    assert registering.is_alive(), "register did not wait for the stream of the array"
    gates.open_gate(host, 1)
    registering.join(WAIT_SECONDS)
    assert not registering.is_alive()
    polling.stop()

    rows = gpu.put(loader, np.array([[0, 1 << 16, 0]], np.int64))
    statuses = gpu.put(loader, np.full(1, -1, np.int64))
    loader.launch(
        gpu.pull_rows, 1, loader.queue, loader.open(path), arguments[0], rows, statuses,
        stream=polling_on,
    )  # fmt: skip
    loader.synchronize(polling_on)
    assert gpu.get(statuses)[0] == Status.OK
    np.testing.assert_array_equal(gpu.get(array), np.fromfile(path, np.uint8))


class _Described:
    """An array as another library would describe it."""

    def __init__(self, array: Any, interface: dict[str, Any]) -> None:
        self.array = array
        self.__cuda_array_interface__ = interface


def _numba(stream: Any) -> Any:
    from numba import cuda

    return cuda.external_stream(stream.ptr)

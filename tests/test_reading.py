"""Reads without kernels: bytes, errors that name what failed, futures, and how they end."""

from __future__ import annotations

import errno
import gc
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_index, write_safetensors
from conftest import WAIT_SECONDS, until
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import SMALL, everywhere, examples, open_loader, run_in_the_simulator

import gpuq
from gpuq import arrays, reading
from gpuq.compiling import SIMULATED
from gpuq.layout import State, Status
from gpuq.testing import readers

SIZE = 100_003  # of the payload


def on_host(array: Any) -> Any:
    """Return a NumPy array; in the simulator new arrays are device arrays that pretend."""
    return array.copy_to_host() if hasattr(array, "copy_to_host") else array


def is_open(loader: gpuq.Loader, path: Path) -> bool:
    return any(s.is_open and s.path == str(path) for s in loader._sources.values())


@pytest.fixture(scope="module")
def loader() -> Iterator[gpuq.Loader]:
    with open_loader() as made:
        yield made


@pytest.fixture(scope="module")
def source(loader: gpuq.Loader, payload_path: Path) -> gpuq.Source:
    return loader.open(payload_path)


# --- bytes ---------------------------------------------------------------------------------------


@everywhere
def test_a_whole_file_is_read_by_default(
    loader: gpuq.Loader, source: gpuq.Source, payload: Any
) -> None:
    np.testing.assert_array_equal(on_host(loader.read(source)), payload)
    np.testing.assert_array_equal(on_host(loader.read(source, 4_000)), payload[4_000:])


@everywhere
@settings(max_examples=examples(60))
@given(ends=st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted))
def test_any_range_is_read(
    loader: gpuq.Loader, source: gpuq.Source, payload: Any, ends: list[int]
) -> None:
    start, end = ends
    np.testing.assert_array_equal(on_host(loader.read(source, start, end)), payload[start:end])


@everywhere
@pytest.mark.parametrize("dtype", ["uint8", "<f8", ">i2", "S5", [("a", "u1"), ("b", "<f4")]])
def test_bytes_are_read_into_an_array_of_any_type(
    loader: gpuq.Loader, source: gpuq.Source, payload: Any, dtype: Any
) -> None:
    out = np.zeros((3, 4), dtype)
    got = loader.read(source, 7, 7 + out.nbytes, out)
    assert got is out
    assert out.tobytes() == payload[7 : 7 + out.nbytes].tobytes()


@everywhere
@pytest.mark.parametrize("in_flight", [1, 3, 1000])
def test_ranges_come_each_once_whatever_their_number(
    loader: gpuq.Loader, source: gpuq.Source, payload: Any, in_flight: int
) -> None:
    """More than there are slots, destinations to hold, and rows of the reading thread."""
    ranges = [(331 * i, 331 * i + i) for i in range(150)]
    seen = []
    for number, array in loader.read_many(source, iter(ranges), in_flight=in_flight):
        start, end = ranges[number]
        np.testing.assert_array_equal(on_host(array), payload[start:end])
        seen.append(number)
    assert sorted(seen) == list(range(150))


@everywhere
def test_no_ranges_are_no_arrays(loader: gpuq.Loader, source: gpuq.Source) -> None:
    assert list(loader.read_many(source, [])) == []


def test_ranges_are_taken_as_reads_end(loader: gpuq.Loader, source: gpuq.Source) -> None:
    taken = []

    def ranges() -> Iterator[tuple[int, int]]:
        for number in range(1_000_000):
            taken.append(number)
            yield number, number + 1

    endless = loader.read_many(source, ranges(), in_flight=4)
    for expected in range(4, 20):
        next(endless)
        assert len(taken) == expected
    endless.close()


# --- files of arrays -----------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype="<f4").reshape(2, 3, 4),
        np.asfortranarray(np.arange(24, dtype=">i8").reshape(4, 6)),
        np.array(7.5),
        np.zeros((3, 0, 2), "<u2"),
        np.array([(1, 2.5), (3, 4.5)], [("a", "u1"), ("b", "<f4")]),
    ],
    ids=["C", "F", "scalar", "empty", "records"],
)
def test_an_npy_file_is_loaded_as_numpy_does(
    loader: gpuq.Loader, tmp_path: Path, array: Any
) -> None:
    np.save(tmp_path / "made.npy", array)
    ((name, loaded),) = loader.load(tmp_path / "made.npy").items()
    loaded = on_host(loaded)
    assert name == "made"
    assert loaded.dtype == array.dtype
    assert loaded.shape == array.shape
    np.testing.assert_array_equal(loaded, array)


@everywhere
@pytest.mark.parametrize("destinations", [1, 5, 100])
def test_tensors_of_a_checkpoint_are_loaded(
    payload: Any, tmp_path: Path, destinations: int
) -> None:
    """More than can be registered; types that NumPy has not, and one smaller than a byte."""
    tensors = {
        f"t{i}": ("U8", [i % 5, 3], payload[i : i + i % 5 * 3].tobytes()) for i in range(100)
    }
    tensors["half"] = ("BF16", [2, 2], payload[:8].tobytes())
    tensors["packed"] = ("F4", [4, 2], payload[10:14].tobytes())
    tensors["wide"] = ("F64", [3], np.arange(3.0).tobytes())
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with open_loader(destinations=destinations) as loader:
        loaded = loader.load(tmp_path / "model.safetensors")
        assert not is_open(loader, tmp_path / "model.safetensors")
    assert list(loaded) == list(tensors)
    for name, (dtype, shape, content) in tensors.items():
        array = on_host(loaded[name])
        assert array.tobytes() == content
        assert list(array.shape) == ([4] if dtype == "F4" else shape)
    np.testing.assert_array_equal(on_host(loaded["wide"]), np.arange(3.0))


@everywhere
def test_some_tensors_of_shards_are_loaded_in_the_order_that_is_asked_for(
    loader: gpuq.Loader, payload: Any, tmp_path: Path
) -> None:
    shards = {
        f"{shard}.safetensors": {
            f"{shard}.{i}": ("U8", [100], payload[100 * i : 100 * i + 100].tobytes())
            for i in range(3)
        }
        for shard in ("one", "two")
    }
    index = write_index(tmp_path / "model.safetensors.index.json", shards)
    wanted = ["two.2", "one.1", "two.0", "one.1"]
    loaded = loader.load(index, wanted)
    assert list(loaded) == ["two.2", "one.1", "two.0"]
    for name, array in loaded.items():
        begin = 100 * int(name[-1])
        np.testing.assert_array_equal(on_host(array), payload[begin : begin + 100])
    with pytest.raises(KeyError, match=r"no array 'three'; it has one.0, one.1"):
        loader.load(index, ["one.1", "three"])


@everywhere
def test_a_checkpoint_that_was_cut_short_is_not_loaded(
    loader: gpuq.Loader, payload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": ("U8", [90], bytes(90)), "b": ("U8", [90], bytes(90))})
    real = gpuq.formats.open_arrays

    def cut(place: Any) -> Any:
        found = real(place)
        with path.open("r+b") as file:
            file.truncate(found["b"].end - 1)
        return found

    monkeypatch.setattr(arrays, "open_arrays", cut)
    with pytest.raises(gpuq.ReadError, match="END_OF_FILE") as caught:
        loader.load(path)
    assert caught.value.path == str(path)
    assert not is_open(loader, path)


# --- what goes wrong -----------------------------------------------------------------------------


@everywhere
def test_a_range_that_the_file_lacks_is_named(
    loader: gpuq.Loader, source: gpuq.Source, payload_path: Path
) -> None:
    for call in (
        lambda: loader.read(source, 9, SIZE + 1),
        lambda: loader.read_async(source, 9, SIZE + 1).result(WAIT_SECONDS),
        lambda: list(loader.read_many(source, [(0, 5), (9, SIZE + 1)])),
    ):
        with pytest.raises(gpuq.ReadError) as caught:
            call()
        error = caught.value
        assert str(error) == f"{payload_path}: bytes 9 to {SIZE + 1}: END_OF_FILE"
        assert (error.path, error.start, error.end) == (str(payload_path), 9, SIZE + 1)
        assert (error.status, error.errno) == (Status.END_OF_FILE, None)
        assert isinstance(error, OSError)
        assert error.filename == str(payload_path)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.status) == (str(error), error.status)


@everywhere
def test_a_range_that_the_source_does_not_allow_is_named(
    loader: gpuq.Loader, payload_path: Path, payload: Any
) -> None:
    with loader.open(payload_path, start=10, end=20) as limited:
        np.testing.assert_array_equal(on_host(loader.read(limited, 10)), payload[10:20])
        with pytest.raises(gpuq.ReadError, match="bytes 10 to 21: OUT_OF_BOUNDS"):
            loader.read(limited, 10, 21)
        with pytest.raises(gpuq.ReadError, match="bytes 0 to 20: OUT_OF_BOUNDS"):
            loader.read(limited)


def test_a_read_that_the_system_refuses_is_named_with_its_errno(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> None:
    loader, _ = make_scripted(payload, [(readers.FAIL, errno.EIO), (readers.READ, -1)])
    source = loader.open(payload_path)
    with pytest.raises(gpuq.ReadError, match=r"READ_FAILED \(Input/output error\)") as caught:
        loader.read(source, 0, 100)
    assert (caught.value.status, caught.value.errno) == (Status.READ_FAILED, errno.EIO)
    np.testing.assert_array_equal(loader.read(source, 0, 100), payload[:100])


@everywhere
@pytest.mark.parametrize(
    ("start", "end"),
    [(5, 4), (-1, 4), (SIZE + 1, None), (2**62, 2**62 + 8), (2**63, 2**63 + 8), (2**70, 2**70)],
)
def test_a_range_that_is_none_is_refused_at_once(
    loader: gpuq.Loader, source: gpuq.Source, start: int, end: int | None
) -> None:
    for call in (loader.read, loader.read_async):
        with pytest.raises(gpuq.SourceError, match=f"the range {start} to .* is none"):
            call(source, start, end)


def test_a_range_beyond_a_words_reach_does_not_end_the_thread_that_reads(
    loader: gpuq.Loader, source: gpuq.Source, payload: Any
) -> None:
    """No row holds such a number: the thread broke at it, and the future was never done."""
    for start in (2**63, 2**64, 0.5):
        with pytest.raises((gpuq.SourceError, TypeError)):
            loader.read_async(source, start, start + 8, np.zeros(8, np.uint8))  # type: ignore[arg-type]
    numbers = np.uint64(0), np.int32(8)
    np.testing.assert_array_equal(loader.read(source, *numbers), payload[:8])  # type: ignore[arg-type]


def test_a_range_that_is_none_does_not_lose_those_before_it(
    loader: gpuq.Loader, source: gpuq.Source, payload: Any
) -> None:
    reads = loader.read_many(source, [(0, 3), (5, 4)], in_flight=1)
    number, array = next(reads)
    assert (number, array.tobytes()) == (0, payload[:3].tobytes())
    with pytest.raises(gpuq.SourceError, match="the range 5 to 4 is none"):
        next(reads)


def test_what_is_no_source_is_named(loader: gpuq.Loader, payload_path: Path) -> None:
    for wrong in (str(payload_path), 7, None):
        with pytest.raises(TypeError, match="a Source of this loader is needed, not "):
            loader.read(wrong)  # type: ignore[arg-type]


@everywhere
def test_an_out_that_does_not_fit_is_refused_at_once(
    loader: gpuq.Loader, source: gpuq.Source
) -> None:
    known = set(loader._destinations)
    for out, says in (
        (np.zeros(9, np.uint8), "out has 9 bytes, and the range 0 to 10 of .* has 10"),
        (np.zeros(11, np.uint8), "out has 11 bytes"),
        (np.zeros(20, np.uint8)[::2], "not C-contiguous"),
        (np.broadcast_to(np.uint8(1), 10), "read-only"),
        (bytearray(10), "must be a NumPy array"),
    ):
        for call in (loader.read, loader.read_async):
            with pytest.raises(gpuq.DestinationError, match=says):
                call(source, 0, 10, out)
    left = [d for h, d in loader._destinations.items() if h not in known and d.is_registered]
    assert left == []


@everywhere
def test_a_source_that_is_not_open_here_is_refused(loader: gpuq.Loader, payload_path: Path) -> None:
    closed = loader.open(payload_path)
    closed.close()
    with open_loader() as other:
        for source in (closed, other.open(payload_path)):
            with pytest.raises(gpuq.SourceError, match="is not open in this loader"):
                loader.read(source)


def test_reads_in_flight_must_be_at_least_one(loader: gpuq.Loader, source: gpuq.Source) -> None:
    with pytest.raises(gpuq.ConfigError, match="in_flight must be at least 1"):
        loader.read_many(source, [], in_flight=0)


# --- order and ends, by a scripted reader --------------------------------------------------------


def test_ranges_come_in_the_order_in_which_they_arrive(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> None:
    loader, reader = make_scripted(payload)
    order = [2, 0, 3, 1]
    reader.order[:4] = order
    reader.words[readers.ORDER] = readers.BY_LIST
    ranges = loader.read_many(loader.open(payload_path), [(i, i + 9) for i in range(4)])
    for answered, expected in enumerate(order, start=1):
        reader.words[readers.LISTED] = answered
        number, array = next(ranges)
        assert number == expected
        np.testing.assert_array_equal(array, payload[number : number + 9])
    assert list(ranges) == []


@pytest.fixture
def held(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> tuple[gpuq.Loader, Any, list[Future[Any]]]:
    """A loader with one read under way that is not answered yet, and one that waits for it."""
    loader, reader = make_scripted(payload, gate=1, slots=2)
    source = loader.open(payload_path)
    futures = [loader.read_async(source, start, start + 50) for start in (0, 50)]
    until(lambda: reader.words[readers.SUBMITTED] == 1, "a read")
    until(lambda: futures[0].running(), "it runs")
    return loader, reader, futures


def test_a_read_can_be_cancelled_until_it_is_posted(held: Any, payload: Any) -> None:
    loader, reader, (first, second) = held
    assert not first.cancel()
    assert second.cancel()
    third = loader.read_async(next(iter(loader._sources.values())), 100, 150)
    reader.words[readers.GATE] = 0
    np.testing.assert_array_equal(first.result(WAIT_SECONDS), payload[:50])
    np.testing.assert_array_equal(third.result(WAIT_SECONDS), payload[100:150])
    with pytest.raises(CancelledError):
        second.result(0)
    assert reader.words[readers.SUBMITTED] == 2
    until(lambda: not any(d.is_registered for d in loader._destinations.values()), "let go")


def test_closing_serves_what_was_posted_and_refuses_the_rest(held: Any, payload: Any) -> None:
    loader, reader, (first, second) = held
    closing = threading.Thread(target=loader.close)
    closing.start()
    until(lambda: loader.state == State.CLOSING, "closing begins")
    reader.words[readers.GATE] = 0
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive()
    np.testing.assert_array_equal(first.result(0), payload[:50])
    with pytest.raises(gpuq.ClosedError):
        second.result(0)
    assert not loader._reads._thread.is_alive()
    with pytest.raises(gpuq.ClosedError):
        loader.read_async(None)  # type: ignore[arg-type]


def test_an_abort_ends_all_reads(held: Any) -> None:
    loader, _, futures = held
    loader.abort()
    for future in futures:
        with pytest.raises(gpuq.ClosedError, match="aborted"):
            future.result(WAIT_SECONDS)


def test_an_abort_ends_a_read_that_found_no_slot(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> None:
    loader, _ = make_scripted(payload, slots=2)
    source = loader.open(payload_path)
    for _ in range(2):
        assert gpuq.try_post(loader.queue, 0, 0, 0, 0, 0) >= 0
    future = loader.read_async(source, 0, 50)
    until(future.running, "it runs")
    loader.abort()
    with pytest.raises(gpuq.ClosedError, match="aborted"):
        future.result(WAIT_SECONDS)


def test_a_read_is_posted_while_another_one_is_waited_for(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The reading thread sits in compiled code until something is answered, or it is rung for."""
    monkeypatch.setattr(reading, "_LOOK_NS", 1 << 60)
    loader, reader = make_scripted(payload, gate=1)
    source = loader.open(payload_path)
    for number in range(1, 4):
        loader.read_async(source, number, number + 50)
        until(lambda number=number: reader.words[readers.SUBMITTED] == number, "a read")
    reader.words[readers.GATE] = 0


def test_a_poller_that_died_is_what_a_read_raises(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> None:
    loader, _ = make_scripted(payload, [(readers.RAISE, 0)])
    source = loader.open(payload_path)
    with pytest.raises(gpuq.PollerDiedError):
        loader.read(source, 0, 100)
    with pytest.raises(gpuq.PollerDiedError):
        loader.read(source, 0, 100)


def test_reads_of_a_loader_that_is_forgotten_end(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> None:
    _, reader = make_scripted(payload, gate=1)
    loader = gpuq.Loader(target="cpu", **SMALL)  # not kept by the fixture
    reads = loader._host_reads()
    future = loader.read_async(loader.open(payload_path), 0, 50)
    until(lambda: reader.words[readers.SUBMITTED] == 1, "a read")
    loader.abort()  # or the finalizer would wait for the read that is held
    reader.words[readers.GATE] = 0
    del loader
    gc.collect()
    with pytest.raises((gpuq.ClosedError, gpuq.ReadError)):
        future.result(WAIT_SECONDS)
    until(lambda: not reads._thread.is_alive(), "its thread ends")


def test_ctrl_c_in_a_read_waits_for_it_and_is_raised(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Until the read is over, its bytes may still arrive in `out`."""
    loader, reader = make_scripted(payload, gate=1)
    out = np.zeros(50, np.uint8)
    real = reading.wait

    class Interrupted(Future):  # type: ignore[type-arg]
        def result(self, timeout: float | None = None) -> Any:
            until(lambda: reader.words[readers.SUBMITTED] == 1, "a read")
            raise KeyboardInterrupt

    def wait(futures: Any, timeout: float) -> Any:
        assert not out.any()
        reader.words[readers.GATE] = 0
        return real(futures, timeout)

    monkeypatch.setattr(reading, "Future", Interrupted)
    monkeypatch.setattr(reading, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        loader.read(loader.open(payload_path), 0, 50, out)
    np.testing.assert_array_equal(out, payload[:50])


def test_a_callback_cannot_wait_for_another_read(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> None:
    """It runs in the thread that would have to read; it may begin one."""
    loader, reader = make_scripted(payload, gate=1)
    source = loader.open(payload_path)
    errors: list[BaseException] = []
    begun: list[Future[Any]] = []

    def call_back(_future: Future[Any]) -> None:
        for wait in (
            lambda: loader.read(source, 0, 5),
            lambda: list(loader.read_many(source, [(0, 5)])),
            lambda: loader.load(payload_path),
        ):
            try:
                wait()
            except RuntimeError as error:
                errors.append(error)
        begun.append(loader.read_async(source, 5, 10))

    loader.read_async(source, 0, 50).add_done_callback(call_back)
    reader.words[readers.GATE] = 0
    until(lambda: begun, "the callback")
    np.testing.assert_array_equal(begun[0].result(WAIT_SECONDS), payload[5:10])
    assert len(errors) == 3


def test_where_the_reading_thread_breaks_nobody_waits_for_it(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loader, _ = make_scripted(payload)
    source = loader.open(payload_path)
    loader.read(source, 0, 5)

    def break_down(*_: Any) -> None:
        raise MemoryError("a test")

    monkeypatch.setattr(reading, "attend", break_down)
    with pytest.raises(MemoryError):
        loader.read_async(source, 0, 5).result(WAIT_SECONDS)
    with pytest.raises(gpuq.GpuqError, match="the thread that reads for the host has ended"):
        loader.read(source, 0, 5)


# --- beside kernels ------------------------------------------------------------------------------


def pull_often(index, size, q, source, destination, statuses):
    for i in range(len(statuses)):
        statuses[i] = gpuq.pull(q, source, destination, i, i + 100, i)


@everywhere
def test_reads_and_kernels_share_a_small_queue(payload: Any, payload_path: Path) -> None:
    with open_loader(slots=2, destinations=3) as loader:
        source, statuses = loader.open(payload_path), np.full(200, -1, np.int64)
        out = np.zeros(100, np.uint8)
        destination = loader.register(out)
        begun = [] if SIMULATED else [loader.read_async(source, 0, 50)]
        loader.launch(pull_often, 1, loader.queue, source, destination, statuses)
        for number, array in loader.read_many(
            source, [(i, i + 9) for i in range(200)], in_flight=1
        ):
            np.testing.assert_array_equal(on_host(array), payload[number : number + 9])
        loader.synchronize()
        assert (statuses == Status.OK).all()
        np.testing.assert_array_equal(out, payload[199:299])
        assert [on_host(future.result(0)).size for future in begun] == [50] * len(begun)


def test_many_threads_read_at_once(loader: gpuq.Loader, source: gpuq.Source, payload: Any) -> None:
    right = []

    def read(number: int) -> None:
        for i in range(40):
            start = 300 * (number + 8 * i)
            got = loader.read(source, start, start + 900)
            right.append(np.array_equal(got, payload[start : start + 900]))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    assert right == [True] * 320


def test_what_a_read_registers_is_not_what_a_kernel_is_bound_to(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> None:
    loader, _ = make_scripted(payload, gate=1)
    source = loader.open(payload_path)
    loader.read_async(source, 0, 50)
    with pytest.raises(gpuq.DestinationError, match="no destination is open"):
        loader.bind()
    loader.register(np.zeros(10, np.uint8))
    loader.bind()


@everywhere
def test_on_a_gpu_a_kernel_reads_for_each_batch(
    payload: Any, payload_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator runs what CUDA would; only the stream is not there."""
    if not SIMULATED:
        return
    streams = types.SimpleNamespace(Stream=lambda non_blocking: None)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=streams))
    monkeypatch.setattr(reading, "_is_cuda", lambda service: True)
    monkeypatch.setattr(reading, "attend", None)
    with open_loader() as loader:
        source = loader.open(payload_path)
        np.testing.assert_array_equal(on_host(loader.read(source)), payload)
        for number, array in loader.read_many(source, [(i, 2 * i) for i in range(50)]):
            np.testing.assert_array_equal(on_host(array), payload[number : 2 * number])
        with pytest.raises(gpuq.ReadError, match="END_OF_FILE"):
            loader.read(source, 0, SIZE + 1)


def test_marked_tests_hold_in_the_simulator() -> None:
    run_in_the_simulator(__file__, __name__)

"""Files of arrays as kernels take them, and whole arrays in memory: where, how much, for whom."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import random_bytes, write_index, write_safetensors
from fake_cuda import FakeCuda
from hypothesis import given
from hypothesis import strategies as st
from targets import everywhere, open_loader, run_in_the_simulator

import gpuq
from gpuq.arrays import check_limit, with_dtype_of_target
from gpuq.compiling import SIMULATED
from gpuq.formats import open_arrays
from gpuq.layout import Status
from gpuq.progress import telling


@pytest.fixture(scope="module")
def loader() -> Iterator[gpuq.Loader]:
    with open_loader() as made:
        yield made


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards with three tensors each: one.0, one.1, ... of 100, 101, ... bytes."""
    shards = {
        f"{shard}.safetensors": {
            f"{shard}.{i}": ("U8", [100 + i], random_bytes(100 + i, i + 10 * (shard == "two")))
            for i in range(3)
        }
        for shard in ("one", "two")
    }
    return write_index(tmp_path_factory.mktemp("shards") / "m.safetensors.index.json", shards)


def content_of(array: Any) -> bytes:
    return Path(array.path).read_bytes()[array.start : array.end]


def on_host(array: Any) -> Any:
    return array.copy_to_host() if hasattr(array, "copy_to_host") else array


def open_sources(loader: gpuq.Loader) -> list[str]:
    return [source.path for source in loader._sources.values() if source.is_open]


# --- for kernels ---------------------------------------------------------------------------------


def pull_array(index, size, q, source, destination, start, end, statuses):
    statuses[index] = gpuq.pull(q, source, destination, start, end, 0)


@everywhere
def test_a_kernel_pulls_every_array_by_its_name(loader: gpuq.Loader, index: Path) -> None:
    with loader.open_arrays(index) as weights:
        assert list(weights) == [f"{shard}.{i}" for shard in ("one", "two") for i in range(3)]
        for array in weights.values():
            destination = loader.register(np.zeros(array.shape, array.dtype))
            statuses = loader.array(np.full(1, -1))
            loader.launch(
                pull_array, 1, loader.queue, array, destination, array.start, array.end, statuses
            )
            loader.synchronize()
            assert loader.to_numpy(statuses)[0] == Status.OK
            assert destination.array.tobytes() == content_of(array)
            destination.unregister()


def test_each_shard_is_opened_once_and_closed_in_the_end(loader: gpuq.Loader, index: Path) -> None:
    paths = [str(index.parent / f"{shard}.safetensors") for shard in ("one", "two")]
    with loader.open_arrays(index) as weights:
        assert open_sources(loader) == paths == [source.path for source in weights.sources]
        assert weights["one.0"].source is weights["one.2"].source is weights.sources[0]
        assert weights["one.0"].handle == weights.sources[0].handle
        assert weights["two.1"].dtype == np.uint8
        assert (weights["two.1"].shape, weights["two.1"].order) == ((101,), "C")
        assert (weights.format, len(weights)) == ("safetensors-index", 6)
    assert open_sources(loader) == []
    weights.close()


def test_only_shards_with_wanted_arrays_are_opened(loader: gpuq.Loader, index: Path) -> None:
    with loader.open_arrays(index, ["two.2", "two.0", "two.2"]) as weights:
        assert list(weights) == ["two.2", "two.0"]
        assert open_sources(loader) == [str(index.parent / "two.safetensors")]
    with pytest.raises(KeyError, match=r"no array 'three'; it has one\.0"):
        loader.open_arrays(index, ["three"])
    with pytest.raises(TypeError, match="a sequence of names"):
        loader.open_arrays(index, "two.2")


def test_where_a_shard_cannot_be_opened_none_stays_open(index: Path) -> None:
    with open_loader(sources=1) as loader:
        with pytest.raises(gpuq.SourceError, match="setting sources"):
            loader.open_arrays(index)
        assert open_sources(loader) == []
        with loader.open_arrays(index, ["two.0"], direct="off") as weights:
            assert not loader.explain(weights.sources[0]).direct


def test_a_raw_file_is_opened_with_the_type_that_is_given(
    loader: gpuq.Loader, tmp_path: Path
) -> None:
    path = tmp_path / "matrix.f32"
    np.arange(12, dtype=np.float32).tofile(path)
    with loader.open_arrays(path, dtype=np.float32, shape=(3, 4)) as arrays:
        matrix = arrays["matrix"]
        assert (matrix.shape, matrix.dtype, matrix.nbytes) == ((3, 4), np.float32, 48)


def test_streams_and_tables_have_the_rows_of_an_array_and_no_others(
    loader: gpuq.Loader, tmp_path: Path
) -> None:
    tensors = {
        "before": ("U8", [1001], bytes(1001)),
        "rows": ("F32", [40, 8], random_bytes(40 * 32, 3)),
        "after": ("U8", [1000], bytes(1000)),
    }
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    with loader.open_arrays(path) as arrays:
        rows = arrays["rows"]
        stream = loader.stream(rows, (16, 8), np.float32)
        table = loader.table(rows, stream.destination, 32)
        for made in (stream.handle, table):
            assert (made.source, made.start) == (rows.source.handle, rows.start)
            assert (made.rows, made.row_bytes) == (40, 32)
        assert stream.handle.start > rows.source.start
        stream.close()


def first_status(index, size, q, stream, first, last, statuses):
    gpuq.stream_open(q, stream, index, first, last)
    status, _, tile = gpuq.stream_next(q, stream, index)
    gpuq.stream_close(q, stream, index)
    statuses[0], statuses[1] = status, len(tile)


@everywhere
def test_a_walk_beyond_an_array_does_not_give_the_bytes_of_its_neighbours(
    loader: gpuq.Loader, tmp_path: Path
) -> None:
    tensors = {name: ("U8", [100], random_bytes(100, 7)) for name in ("before", "rows", "after")}
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    with loader.open_arrays(path) as arrays:
        stream = loader.stream(arrays["rows"], 10)
        statuses = loader.array(np.zeros(2, np.int64))
        bad = int(Status.OUT_OF_BOUNDS)
        for first, last, expected in (
            (90, 100, [0, 10]), (91, 101, [bad, 0]), (-1, 9, [bad, 0]), (100, 110, [bad, 0]),
            (-(2**61), 2**61, [bad, 0]), (2**61, 2**61 + 5, [bad, 0]), (100, 100, [0, 0]),
        ):  # fmt: skip
            loader.launch(first_status, 1, loader.queue, stream, first, last, statuses)
            loader.synchronize()
            assert loader.to_numpy(statuses).tolist() == expected, (first, last)
        stream.close()


# --- in memory: where and how much ---------------------------------------------------------------


def test_a_limit_counts_the_arrays_that_are_asked_for(loader: gpuq.Loader, index: Path) -> None:
    loaded = loader.load(index, ["one.1", "two.2"], memory_limit=203)
    assert sum(array.nbytes for array in loaded.values()) == 203


def test_names_that_can_be_walked_once_are_all_found(loader: gpuq.Loader, index: Path) -> None:
    """A generator was used up by the search for names that are missing, and nothing was loaded."""
    names = ["two.1", "one.0"]
    assert list(loader.load(index, (name for name in names))) == names
    with loader.open_arrays(index, iter(names)) as arrays:
        assert list(arrays) == names
    with pytest.raises(KeyError, match="no array 'x'"):
        loader.load(index, iter(["two.1", "x"]))


def test_numbers_of_numpy_are_numbers(loader: gpuq.Loader, index: Path) -> None:
    assert len(loader.load(index, memory_limit=np.int64(10_000))) == 6
    with pytest.raises(gpuq.ConfigError, match="this loader's arrays are on the CPU"):
        loader.load(index, device=np.int64(0))


def test_what_is_over_the_limit_is_refused_before_anything_is_opened(
    loader: gpuq.Loader, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpuq.Loader, "open", None)
    monkeypatch.setattr(gpuq.Loader, "empty", None)
    monkeypatch.setattr(np, "empty", None)
    with pytest.raises(gpuq.MemoryLimitError, match="takes 203 bytes, and memory_limit is 202"):
        loader.load(index, ["one.1", "two.2"], memory_limit=202)


@given(st.integers(0, 1 << 70), st.integers(0, 1 << 70))
def test_a_limit_is_the_most_that_is_allowed(nbytes: int, limit: int) -> None:
    if nbytes <= limit:
        check_limit("model", nbytes, limit)
    else:
        with pytest.raises(MemoryError, match=f"^model takes {nbytes} .* {limit}$"):
            check_limit("model", nbytes, limit)


@pytest.mark.parametrize("limit", [-1, 1.5, True, "1 GiB"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(
    loader: gpuq.Loader, index: Path, limit: Any
) -> None:
    with pytest.raises(gpuq.ConfigError, match="memory_limit must be a number of bytes"):
        loader.load(index, memory_limit=limit)


@everywhere
def test_host_arrays_can_be_asked_for(loader: gpuq.Loader, index: Path) -> None:
    for array in loader.load(index, device="cpu").values():
        assert type(array) is np.ndarray


@everywhere
@pytest.mark.parametrize("device", ["cuda", 0])
def test_a_gpu_is_refused_where_the_target_is_another(
    loader: gpuq.Loader, index: Path, device: Any
) -> None:
    with pytest.raises(gpuq.ConfigError) as caught:
        loader.load(index, device=device)
    assert f"device={device!r}: this loader's arrays are on the CPU" in str(caught.value)
    assert f"its target is {loader.target}" in str(caught.value)


@pytest.mark.parametrize("device", ["gpu", "cuda:0", True, 1.0])
def test_what_names_no_device_is_refused(loader: gpuq.Loader, index: Path, device: Any) -> None:
    with pytest.raises(gpuq.ConfigError, match='"cpu", "cuda" or the number of a GPU'):
        loader.load(index, device=device)


def test_a_cuda_loader_gives_arrays_of_its_own_gpu_only(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda().install(monkeypatch)
    with gpuq.Loader(target="cuda", reader="threads", slots=8, staging_buffers=3) as loader:
        for device in ("cpu", 1):
            with pytest.raises(gpuq.ConfigError, match="this loader's arrays are on GPU 0"):
                loader.load(index, device=device)
        # Past the device, and refused by the next check.
        for device in (None, "cuda", 0):
            with pytest.raises(gpuq.MemoryLimitError):
                loader.load(index, device=device, memory_limit=1)


@pytest.fixture
def cuda_loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[gpuq.Loader]:
    """A CUDA loader over a CuPy that refuses the dtypes which CuPy 14 refuses."""
    cuda = FakeCuda()

    def empty(shape: Any, dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        is_numpys = dtype.type.__module__ == "numpy" and (dtype.kind in "biufc" or dtype.names)
        if not (is_numpys or dtype.name == "bfloat16") or not dtype.isnative:
            raise ValueError(f"Unsupported dtype {dtype}")
        return cuda.array(np.empty(shape, dtype))

    cuda.module.empty = empty  # type: ignore[attr-defined]
    cuda.install(monkeypatch)
    with gpuq.Loader(target="cuda", reader="threads", slots=8, staging_buffers=3) as made:
        yield made


def test_types_that_cupy_lacks_come_as_integers_of_their_size(
    cuda_loader: gpuq.Loader, tmp_path: Path
) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    tensors = {
        name: (name, [2], bytes(2 * size))
        for name, size in (("F32", 4), ("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1))
    }
    entries = open_arrays(write_safetensors(tmp_path / "m.safetensors", tensors))
    assert entries["F8_E4M3"].dtype == ml_dtypes.float8_e4m3fn
    dtypes = {name: with_dtype_of_target(cuda_loader, entries[name]).dtype for name in tensors}
    assert dtypes == {
        "F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8,
    }  # fmt: skip


def test_types_that_no_integer_stands_for_are_refused_before_anything_is_opened(
    cuda_loader: gpuq.Loader, tmp_path: Path
) -> None:
    np.save(tmp_path / "words.npy", np.array([b"one", b"two"]))
    with pytest.raises(gpuq.DestinationError, match=r"words\.npy: array 'words' is of dtype \|S3"):
        cuda_loader.load(tmp_path / "words.npy")
    assert open_sources(cuda_loader) == []


# --- progress ------------------------------------------------------------------------------------


@everywhere
def test_a_function_is_told_of_each_array(loader: gpuq.Loader, index: Path) -> None:
    told: list[tuple[int, int]] = []
    loader.load(index, ["one.0", "two.1"], progress=lambda *now: told.append(now))
    assert told == [(0, 201), (100, 201), (201, 201)]


def test_what_a_function_raises_ends_the_load(loader: gpuq.Loader, index: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        loader.load(index, progress=stop)
    assert open_sources(loader) == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_appears_on_a_terminal_only(
    loader: gpuq.Loader,
    index: Path,
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    loader.load(index, progress=True)
    loader.load(index)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("m.safetensors.index.json" in captured.err) == is_terminal
    assert ("606/606 bytes" in captured.err) == is_terminal


def test_a_title_cannot_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with telling(True, "[red]a\x1b]0;x\n", 5) as advance:
        advance(5)
    assert "[red]a?]0;x?" in capsys.readouterr().err


# --- for other libraries -------------------------------------------------------------------------

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I8": "<i1", "U8": "<u1"}


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor of shape (3, 5) of each type, its name that of the type."""
    rng = np.random.default_rng(8)
    tensors = {
        name: (name, [3, 5], rng.integers(0, 100, 15).astype(dtype).tobytes())
        for name, dtype in DTYPES.items()
    }
    return write_safetensors(tmp_path_factory.mktemp("typed") / "typed.safetensors", tensors)


def test_dlpack_hands_over_arrays_without_a_copy(loader: gpuq.Loader, typed: Path) -> None:
    for name, array in loader.load(typed).items():
        handed = np.from_dlpack(array)
        assert handed.dtype == DTYPES[name]
        assert np.shares_memory(handed, array)
        np.testing.assert_array_equal(handed, array)


def test_dlpack_hands_over_column_major_arrays(loader: gpuq.Loader, tmp_path: Path) -> None:
    expected = np.asfortranarray(np.arange(15.0).reshape(3, 5))
    np.save(tmp_path / "columns.npy", expected)
    (array,) = loader.load(tmp_path / "columns.npy").values()
    handed = np.from_dlpack(array)
    assert handed.flags.f_contiguous
    np.testing.assert_array_equal(handed, expected)


def test_torch_takes_arrays_without_a_copy(loader: gpuq.Loader, typed: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for array in loader.load(typed).values():
        tensor = torch.from_dlpack(array)
        assert tensor.data_ptr() == array.ctypes.data
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_torch_takes_bfloat16_as_the_docs_say(loader: gpuq.Loader, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    words = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)  # 1, -2, infinity
    path = write_safetensors(tmp_path / "b.safetensors", {"b": ("BF16", [3], words.tobytes())})
    array = loader.load(path)["b"]
    tensor = torch.from_dlpack(array.view(np.uint16)).view(torch.bfloat16)
    assert tensor.tolist() == [1.0, -2.0, float("inf")]


def test_jax_takes_arrays(loader: gpuq.Loader, typed: Path) -> None:
    numpy_of_jax = pytest.importorskip("jax.numpy", reason="jax is not installed")
    array = loader.load(typed)["F32"]
    np.testing.assert_array_equal(np.asarray(numpy_of_jax.from_dlpack(array)), array)


def test_the_metadata_of_a_file_is_kept(loader: gpuq.Loader, tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {"by": "hand"}}).encode()
    path = tmp_path / "empty.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with loader.open_arrays(path) as arrays:
        assert dict(arrays.metadata) == {"by": "hand"}
        assert (len(arrays), arrays.sources) == (0, ())
    assert loader.load(path, progress=True, memory_limit=0) == {}


def test_marked_tests_hold_in_the_simulator() -> None:
    if not SIMULATED:
        run_in_the_simulator(__file__, __name__)

"""Arrays that stand one behind the other in a file are read as one, and are arrays of their own."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_safetensors
from hypothesis import given
from hypothesis import strategies as st
from targets import open_loader

from gpuq import arrays as gpuq_arrays
from gpuq.formats import ArrayEntry
from gpuq.handles import Source


def model_of(sizes: list[int]) -> dict[str, Any]:
    """Return tensors of random bytes, of so many bytes each."""
    generator = np.random.default_rng(len(sizes))
    return {f"t{i}": ("U8", [n], generator.bytes(n)) for i, n in enumerate(sizes)}


def assert_loaded(arrays: Any, tensors: Any) -> None:
    assert list(arrays) == list(tensors)
    for name, (_, _, data) in tensors.items():
        assert arrays[name].tobytes() == data, name


@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 5), st.integers(4000, 9000), st.integers(60_000, 300_000)),
        min_size=1,
        max_size=12,
    ),
    data=st.data(),
)
def test_neighbouring_tensors_are_read_as_one_and_are_arrays_of_their_own(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    tensors = model_of(sizes)
    write_safetensors(path, tensors)
    wanted = data.draw(st.permutations(list(tensors)))[: data.draw(st.integers(1, len(tensors)))]
    direct = data.draw(st.sampled_from(["auto", "off"]))
    with (
        pytest.MonkeyPatch.context() as patch,
        open_loader(direct=direct, staging_bytes=1 << 16, staging_buffers=4) as loader,
    ):
        patch.setattr(
            gpuq_arrays, "_RUN_BYTES", data.draw(st.sampled_from([50_000, 100_000, 1 << 25]))
        )
        got = loader.load(path, wanted)
    assert_loaded(got, {name: tensors[name] for name in wanted})
    for name in wanted:  # no array writes into another one
        got[name][...] = len(name)
        others = [other for other in wanted if other != name]
        assert_loaded({o: got[o] for o in others}, {o: tensors[o] for o in others})
        got[name][...] = np.frombuffer(tensors[name][2], np.uint8)


def test_few_requests_read_many_tensors(tmp_path: Path) -> None:
    tensors = model_of([100_001] * 50)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with open_loader() as loader:
        assert_loaded(loader.load(tmp_path / "model.safetensors"), tensors)
        assert loader.statistics().requests == {"OK": 1}


def test_an_array_outlives_those_that_were_read_with_it(tmp_path: Path) -> None:
    tensors = model_of([3_000_000 + i for i in range(5)])
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with open_loader() as loader:
        arrays = loader.load(tmp_path / "model.safetensors")
    kept = arrays["t2"][5:]
    del arrays
    gc.collect()
    assert kept.tobytes() == tensors["t2"][2][5:]


def test_tensors_that_share_bytes_or_lie_apart_are_not_joined() -> None:
    def entry(name: str, start: int, end: int) -> ArrayEntry:
        return ArrayEntry(name, "model", np.dtype("u1"), "U8", (end - start,), start, end)

    def runs(*entries: ArrayEntry, most: int = 10_000) -> list[list[str]]:
        divided = gpuq_arrays._runs(list(entries), True, lambda entry: most)
        return [[e.name for e in run.entries] for run in divided]

    assert runs(entry("a", 0, 10), entry("b", 5, 20), entry("c", 20, 30)) == [["a"], ["b", "c"]]
    assert runs(entry("c", 5010, 6000), entry("a", 0, 10)) == [["a"], ["c"]]
    apart = [entry("a", 0, 4000), entry("b", 4000, 8000), entry("c", 8000, 9000)]
    assert runs(*apart, most=8000) == [["a", "b"], ["c"]]
    assert runs(*apart, most=10) == [["a"], ["b"], ["c"]]


def test_an_array_longer_than_a_run_is_read_by_several_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One request is one stream out of the page cache, and one core copies.
    monkeypatch.setattr(gpuq_arrays, "_RUN_BYTES", 65536)
    tensors = model_of([3, 300_001, 5])
    write_safetensors(tmp_path / "model.safetensors", tensors)
    told: list[int] = []
    with open_loader() as loader:
        got = loader.load(
            tmp_path / "model.safetensors", progress=lambda done, total: told.append(done)
        )
        requests = loader.statistics().requests
    assert_loaded(got, tensors)
    assert requests == {"OK": 1 + 5 + 1}  # those of the long one end at multiples in the file
    assert told[-1] == 300_009
    assert len(set(told)) >= 6


def test_a_file_that_may_come_from_a_server_is_read_in_shorter_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpuq_arrays, "_RUN_BYTES", 400_000)
    monkeypatch.setattr(gpuq_arrays, "_SHORT_RUN_BYTES", 100_000)
    tensors = model_of([50_000] * 8)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    for may_wait, requests in ((False, 1), (True, 4)):
        monkeypatch.setattr(Source, "_may_wait", may_wait)
        with open_loader() as loader:
            assert_loaded(loader.load(tmp_path / "model.safetensors"), tensors)
            assert loader.statistics().requests == {"OK": requests}

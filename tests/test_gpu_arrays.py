"""On a GPU: whole arrays of files, and the arrays of a file by name, for kernels and for others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu
import numpy as np
import pytest
from checkpoints import random_bytes, write_safetensors

import gpuq
from gpuq.layout import Status

pytestmark = gpu.needs_gpu()
ONLY_CUDA = pytest.mark.skipif(gpu.IS_REHEARSAL, reason="a rehearsal has no CUDA arrays")

TENSORS = {
    "table": ("F32", [300, 257], random_bytes(4 * 300 * 257, 1)),
    "bias": ("F64", [7], np.arange(7.0).tobytes()),
    "half": ("BF16", [3], np.array([0x3F80, 0xC000, 0x4000], np.uint16).tobytes()),
    "small": ("F8_E4M3", [1001], random_bytes(1001, 2)),
    "none": ("F32", [0, 4], b""),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("arrays") / "model.safetensors", TENSORS)


@pytest.fixture(scope="module")
def loader() -> Iterator[gpuq.Loader]:
    with gpu.open_loader(slots=64, staging_buffers=8, staging_bytes=16 << 10) as made:
        yield made


def pull_array(index, size, q, source, destination, start, end, statuses):
    statuses[index] = gpuq.pull_block(q, source, destination, start, end, 0)


def test_every_tensor_is_loaded(loader: gpuq.Loader, path: Path) -> None:
    told: list[Any] = []
    total = sum(len(content) for _, _, content in TENSORS.values())
    loaded = loader.load(
        path, device=loader.target, memory_limit=total, progress=lambda *now: told.append(now)
    )
    assert told[-1] == (total, total)
    assert list(loaded) == list(TENSORS)
    for name, (_, shape, content) in TENSORS.items():
        assert list(loaded[name].shape) == shape
        assert loader.to_numpy(loaded[name]).tobytes() == content


@ONLY_CUDA
def test_they_are_arrays_of_cupy(loader: gpuq.Loader, path: Path) -> None:
    import cupy

    for array in loader.load(path, device=0).values():
        assert isinstance(array, cupy.ndarray)
        assert not array.size or array.__cuda_array_interface__["data"][0] == array.data.ptr


def test_a_kernel_pulls_a_tensor_by_its_name(loader: gpuq.Loader, path: Path) -> None:
    with loader.open_arrays(path) as arrays:
        table = arrays["table"]
        destination = loader.register(loader.empty(table.shape, table.dtype))
        statuses = loader.array([-1])
        loader.launch(
            pull_array, 1, loader.queue, table, destination, table.start, table.end, statuses
        )
        loader.synchronize()
        assert loader.to_numpy(statuses)[0] == Status.OK
        assert loader.to_numpy(destination.array).tobytes() == TENSORS["table"][2]
        destination.unregister()


@ONLY_CUDA
def test_torch_takes_them_without_a_copy(loader: gpuq.Loader, path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch was built without CUDA")
    array = loader.load(path, ["table"])["table"]
    tensor = torch.from_dlpack(array)
    assert tensor.data_ptr() == array.data.ptr
    assert tensor.cpu().numpy().tobytes() == TENSORS["table"][2]


@ONLY_CUDA
def test_jax_takes_them(loader: gpuq.Loader, path: Path) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("jax was built without CUDA")
    array = loader.load(path, ["table"])["table"]
    assert np.asarray(jax.numpy.from_dlpack(array)).tobytes() == TENSORS["table"][2]

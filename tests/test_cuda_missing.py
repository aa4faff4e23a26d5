"""A CUDA driver that is missing, broken, too old, or in use elsewhere: a clear reason, no hang."""

from __future__ import annotations

import ctypes
import functools
import gc
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from kernels import Compiled

import gpuq
from gpuq.host import cuda_device, driver
from gpuq.layout import Status

SMALL = {"reader": "threads", "slots": 4, "staging_buffers": 2, "staging_bytes": 4096}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    made.install(monkeypatch)
    return made


def assert_unusable(what: str, path: Path) -> None:
    """Assert that "cuda" says why not, and that "auto" says so and works on the CPU."""
    with pytest.raises(gpuq.TargetUnavailableError) as caught:
        gpuq.Loader(target="cuda", **SMALL)
    assert what in str(caught.value)
    assert str(caught.value).startswith('target="cuda": ')
    with gpuq.Loader(target="auto", reader_threads=1, **SMALL) as loader:
        assert loader.target == "cpu"
        assert what in loader.target_reason
        assert "\n" not in loader.target_reason
        path.write_bytes(b"0123456789")
        array = np.zeros(4, dtype=np.uint8)
        source, destination = loader.open(path, direct="off"), loader.register(array)
        status = Compiled.pull(loader.queue, source.handle, destination.handle, 3, 7, 0)
        assert status == Status.OK
        assert array.tobytes() == b"3456"


def _break(field: str, name: Any, value: Any) -> Callable[[FakeCuda, pytest.MonkeyPatch], None]:
    def change(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        getattr(cuda.library, field)[name] = value

    return change


def _no_library(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    load = functools.partial(driver.load_library, "libgpuq-is-nowhere.so.1")
    monkeypatch.setattr(cuda_device, "load_library", load)


def _no_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.library.devices = 0


def _no_cupy(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)


def _cupy_too_new(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise cuda.runtime.CUDARuntimeError("cudaErrorInsufficientDriver: too old")

    monkeypatch.setattr(cuda.runtime, "getDevice", refuse)


def _numba_disabled(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.cuda.cudadrv import devices
    from numba.cuda.cudadrv.error import CudaSupportError

    def refuse(number: Any = None) -> Any:
        raise CudaSupportError("CUDA is disabled due to setting NUMBA_DISABLE_CUDA=1")

    monkeypatch.setattr(devices._runtime, "get_or_create_context", refuse)


def _launches_block(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")


def _old_driver(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.library.missing.add("cuDeviceGetAttribute")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param(_no_library, "no CUDA driver: libgpuq-is-nowhere.so.1", id="no-libcuda"),
        pytest.param(_break("results", "cuInit", 100), "(CUDA_ERROR_NO_DEVICE)", id="cuInit-100"),
        pytest.param(_break("results", "cuInit", 803), "cuInit said 803", id="cuInit-803"),
        pytest.param(_break("results", "cuInit", 12345), "(unknown error)", id="cuInit-unknown"),
        pytest.param(_break("results", "cuInit", 3), "forked", id="forked"),
        pytest.param(_no_device, "sees no device", id="no-device"),
        pytest.param(
            _break("attributes", 41, 0), "has no unified addressing", id="no-unified-addressing"
        ),
        pytest.param(_break("attributes", 19, 0), "cannot map host memory", id="no-mapped-memory"),
        pytest.param(_break("attributes", 75, 6), "compute capability 6.0", id="cc-6"),
        pytest.param(_no_cupy, "install gpuq[cuda12] or gpuq[cuda13]", id="no-cupy"),
        pytest.param(_cupy_too_new, "cudaErrorInsufficientDriver", id="cupy-too-new"),
        pytest.param(_numba_disabled, "NUMBA_DISABLE_CUDA", id="numba-disabled"),
        pytest.param(_launches_block, "CUDA_LAUNCH_BLOCKING", id="launch-blocking"),
    ],
)
def test_an_unusable_gpu_is_refused_with_its_reason(cuda, monkeypatch, tmp_path, change, what):
    change(cuda, monkeypatch)
    assert_unusable(what, tmp_path / "ten")
    assert cuda.runtime.names().count("hostAlloc") == 0
    if cuda.context is not None:
        assert not cuda.context.deallocations.is_disabled, "cleanup is deferred for nobody"


def test_a_driver_without_a_function_is_too_old(cuda):
    cuda.library._compiled.pop("cuEventQuery")
    with pytest.raises(gpuq.TargetUnavailableError, match=r"too old: .*cuEventQuery"):
        driver.driver_table(cuda.library)


def test_a_broken_library_leaves_nothing_behind_when_memory_runs_out(cuda, monkeypatch):
    """The third allocation of pinned memory fails: the others are given back, and it is said."""
    real = cuda.runtime.hostAlloc

    def sometimes(nbytes: int, flags: int) -> int:
        if cuda.runtime.names().count("hostAlloc") == 2:
            raise cuda.runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        return real(nbytes, flags)

    monkeypatch.setattr(cuda.runtime, "hostAlloc", sometimes)
    with pytest.raises(gpuq.TargetUnavailableError, match="staging_buffers"):
        gpuq.Loader(target="cuda", **SMALL)
    gc.collect()
    assert cuda.runtime.names().count("freeHost") == 2
    assert not cuda.context.deallocations.is_disabled


def test_a_device_that_works_is_taken_and_named(cuda):
    with gpuq.Loader(target="auto", **SMALL) as loader:
        assert loader.target == "cuda"
        assert loader.target_reason == "a usable GPU is there: Pretended GPU"


# --- a shared library, through ctypes as the real one --------------------------------------------

SOURCE = """
int cuInit(unsigned int flags) { return CUINIT; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int room, int device) { name[0] = 'X'; name[1] = 0; return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 41 ? UNIFIED : 1;
    return 0;
}
int cuGetErrorName(int result, const char **name) { *name = "CUDA_ERROR_PRETENDED"; return 0; }
int cuMemcpyHtoDAsync_v2(unsigned long to, const void *from, unsigned long n, void *stream) {
    return to == 1 && from == (void *)2 && n == 3 && stream == (void *)4 ? 0 : 1;
}
int cuEventRecord(void *event, void *stream) { return event == (void *)5 && stream == (void *)6; }
int cuEventQuery(void *event) { return event == (void *)7 ? 600 : 0; }
"""


def _build(directory: Path, **macros: int) -> Any:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here to build a pretended libcuda with")
    (directory / "cuda.c").write_text(SOURCE)
    library = directory / "libcuda.so.1"
    flags = [f"-D{name}={value}" for name, value in macros.items()]
    command = [compiler, "-shared", "-fPIC", *flags, "-o", str(library), "cuda.c"]
    subprocess.run(command, cwd=directory, check=True)
    return driver.load_library(str(library))


def test_a_real_library_is_asked_by_its_own_signatures(tmp_path):
    library = _build(tmp_path, CUINIT=0, UNIFIED=1)
    facts = driver.usable_gpu(library)
    assert facts == driver.GpuFacts("X", (9, 0), (12, 8), True, True, True)


@pytest.mark.parametrize(("result", "unified"), [(100, 1), (803, 1), (0, 0)])
def test_a_real_library_that_does_not_start_is_refused(tmp_path, monkeypatch, result, unified):
    library = _build(tmp_path, CUINIT=result, UNIFIED=unified)
    monkeypatch.setattr(cuda_device, "load_library", lambda: library)
    what = f"cuInit said {result} (CUDA_ERROR_PRETENDED)" if result else "unified addressing"
    with pytest.raises(gpuq.TargetUnavailableError) as caught:
        driver.usable_gpu(library)
    assert what in str(caught.value)
    if result:
        assert_unusable(what, tmp_path / "ten")


def test_compiled_code_passes_the_words_that_the_functions_expect(tmp_path):
    from numba import njit

    @njit
    def call(addresses: Any) -> Any:
        return (
            driver.call_driver(addresses[0], 1, 2, 3, 4),
            driver.call_driver(addresses[1], 5, 6, 0, 0),
            driver.call_driver(addresses[2], 7, 0, 0, 0),
        )

    table = driver.driver_table(_build(tmp_path, CUINIT=0, UNIFIED=1))
    addresses = np.array(table, dtype=np.int64)
    assert call(addresses) == (0, 1, 600)
    assert call.py_func(addresses) == (0, 1, 600)


def test_a_file_that_is_no_library_is_no_driver(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("not a library")
    with pytest.raises(gpuq.TargetUnavailableError, match="no CUDA driver"):
        driver.load_library(str(tmp_path / "libcuda.so.1"))


def test_the_table_holds_addresses_of_functions(tmp_path):
    library = _build(tmp_path, CUINIT=0, UNIFIED=1)
    table = driver.driver_table(library)
    assert table.event_query == ctypes.cast(library.cuEventQuery, ctypes.c_void_p).value
    assert len(set(table)) == 3

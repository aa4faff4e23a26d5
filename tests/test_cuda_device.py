"""The CUDA device with CUDA played on host memory: what is called, in which order, and what not.

The poller, the copier, Numba's arrays and its kernel loading are the real ones.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import DEVICE_TYPE, HOST_TYPE, FakeCuda, FakeDeviceArray, FakeStream, on_host
from kernels import Compiled
from numba import cuda as numba_cuda

import gpuq
from gpuq import launching
from gpuq.host import cuda_device
from gpuq.host.copier import DEVICE_MEMORY, HOST_MEMORY
from gpuq.host.driver import MEMCPY_HTOD_ASYNC, NOT_READY
from gpuq.layout import State, Status
from gpuq.testing.recording_driver import ILLEGAL_ADDRESS

BUFFERS = 3
SERIALIZING = {"malloc", "hostAlloc", "freeHost", "Event", "Stream", "deviceSynchronize"}
"""Calls that may wait for a running kernel, or that hold up others which then do."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    made.install(monkeypatch)
    return made


@pytest.fixture
def loader(cuda: FakeCuda) -> Iterator[gpuq.Loader]:
    made = gpuq.Loader(
        target="cuda", reader="threads", direct="off", slots=8, staging_buffers=BUFFERS,
        staging_bytes=4096, reader_threads=2,
    )  # fmt: skip
    yield made
    cuda.driver.allow()
    cuda.runtime.statuses.clear()
    made.abort()
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    np.random.default_rng(4).integers(0, 256, 50_000, dtype=np.uint8).tofile(path)
    return path


def nap(monkeypatch: pytest.MonkeyPatch, sleep: Any) -> None:
    """Let the device, and nobody else, sleep by a function of the test."""
    pretended = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(cuda_device, "time", pretended)


# --- a rehearsal of the main job ----------------------------------------------------------------


def test_bytes_reach_device_arrays_and_mapped_host_arrays(cuda, loader, path):
    cuda.driver.delay(5)
    content = np.fromfile(path, np.uint8)
    mapped, _ = loader._service.device.mapped_words(1000)
    array = cuda.array(np.zeros(20_000, np.uint8))
    source = loader.open(path)
    queue = on_host(loader.queue)
    first, second = loader.register(array), loader.register(mapped)
    assert Compiled.pull(queue, source.handle, first.handle, 77, 20_077, 0) == Status.OK
    np.testing.assert_array_equal(array.host, content[77:20_077])
    copies = cuda.driver.calls_of(MEMCPY_HTOD_ASYNC)
    assert Compiled.pull(queue, source.handle, second.handle, 5, 8_005, 0) == Status.OK
    np.testing.assert_array_equal(mapped.view(np.uint8), content[5:8_005])
    assert cuda.driver.calls_of(MEMCPY_HTOD_ASYNC) == copies, "the poller copies there itself"
    loader.close()
    assert cuda.driver.faults() == []


def test_the_queue_starts_as_the_protocol_wants_it(cuda, loader):
    queue = on_host(loader.queue)
    assert not queue.submissions.any()
    assert not queue.flags.any()
    assert queue.tail[0] == 0
    np.testing.assert_array_equal(queue.turns, np.arange(8))
    assert loader.queue.capacity == 8


def test_staging_is_pinned_mapped_and_aligned(cuda, loader):
    portable_and_mapped = 1 | 2
    allocations = [entry for entry in cuda.runtime.log if entry[0] == "hostAlloc"]
    assert {flags for _, _, flags in allocations} == {portable_and_mapped}
    address = loader._service.poller.staging.address
    assert address % 4096 == 0
    begin, end = next(
        (begin, end) for begin, end, kind, _ in cuda.library.regions if begin <= address < end
    )
    assert begin <= address
    assert address + BUFFERS * 4096 <= end


def test_the_stream_does_not_block_and_each_buffer_has_an_event_without_timing(cuda, loader):
    assert [entry for entry in cuda.runtime.log if entry[0] == "Stream"] == [("Stream", True)]
    events = [entry for entry in cuda.runtime.log if entry[0] == "Event"]
    assert events == [("Event", True)] * BUFFERS
    assert len(set(loader._service.poller.copier.events)) == BUFFERS


def test_nothing_that_may_wait_for_a_kernel_is_called_while_one_may_poll(cuda, loader, path):
    arrays = [cuda.array(np.zeros(9_000, np.uint8)) for _ in range(3)]
    cuda.runtime.log.clear()
    source = loader.open(path)
    queue = on_host(loader.queue)
    for array in arrays:
        destination = loader.register(array)
        for _ in range(5):
            status = Compiled.pull(queue, source.handle, destination.handle, 1, 9_001, 0)
            assert status == Status.OK
        loader.statistics()
        destination.unregister()
    source.close()
    assert not SERIALIZING & set(cuda.runtime.names())


def test_kernels_are_handed_arrays_that_name_no_stream(cuda, loader):
    """A view of an array that names a stream is ordered behind that stream, or waits for it."""
    for field in loader.queue:
        if hasattr(field, "__cuda_array_interface__"):
            assert field.__cuda_array_interface__["stream"] is None
            assert field.dtype == np.uint64
            assert type(field).__module__.startswith("numba.cuda")


def test_the_poller_thread_has_the_context_of_the_loader(cuda, monkeypatch):
    seen = []
    real = cuda.runtime.setDevice

    def note(ordinal: int) -> None:
        seen.append((threading.current_thread().name, ordinal))
        real(ordinal)

    monkeypatch.setattr(cuda.runtime, "setDevice", note)
    with gpuq.Loader(target="cuda", slots=2, staging_buffers=1, staging_bytes=4096) as loader:
        name = loader._service._thread.name
        for _ in range(1000):
            if any(thread == name for thread, _ in seen):
                break
            threading.Event().wait(0.01)
    assert (name, 0) in seen


def test_the_current_device_is_left_as_it_was(cuda, loader):
    array = cuda.array(np.zeros(100, np.uint8))
    cuda.runtime.device = 3
    loader.register(array)
    loader.synchronize()
    assert cuda.runtime.device == 3


def test_a_stream_of_tiles_has_its_memory_on_the_gpu(cuda, loader, path):
    stream = loader.stream(loader.open(path), 1000, tiles_in_flight=2)
    handle = stream.handle
    for array, shape in ((handle.tiles, (1, 3, 1000)), (handle.tickets, (1, 3))):
        assert array.shape == shape
        address = array.device_ctypes_pointer.value
        kinds = [kind for begin, end, kind, _ in cuda.library.regions if begin <= address < end]
        assert kinds == [DEVICE_TYPE]
        assert array.__cuda_array_interface__["stream"] is None


# --- destinations -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [1, 2, 0x7000])
def test_registering_waits_for_the_stream_that_the_array_names(cuda, loader, stream):
    cuda.runtime.statuses = [NOT_READY, NOT_READY, NOT_READY]
    cuda.runtime.log.clear()
    loader.register(cuda.array(np.zeros(10, np.uint8), stream=stream))
    assert ("eventRecord", stream) in cuda.runtime.log
    assert cuda.runtime.statuses == [], "it returned before the stream was done"


def test_an_array_that_names_no_stream_is_waited_for_by_nobody(cuda, loader):
    version_2 = cuda.array(np.zeros(10, np.uint8), version=2)
    del version_2.__cuda_array_interface__["stream"]
    cuda.runtime.log.clear()
    loader.register(version_2)
    loader.register(cuda.array(np.zeros(10, np.uint8)))
    assert "eventRecord" not in cuda.runtime.names()


def test_waiting_for_an_arrays_stream_can_be_interrupted(cuda, loader, monkeypatch):
    """The named stream may hold a kernel that polls; nothing else must be held up by it."""
    cuda.runtime.statuses = [NOT_READY] * 1000
    array = cuda.array(np.zeros(10, np.uint8), stream=1)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        nap(patch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            loader.register(array)
    cuda.runtime.statuses.clear()
    assert loader.state == State.RUNNING
    assert loader.register(array).nbytes == 10


def test_no_work_is_put_on_the_stream_of_the_copies(cuda, loader, path):
    """A wait there would stop the copies that a polling kernel waits for."""
    cuda.runtime.log.clear()
    loader.register(cuda.array(np.zeros(10, np.uint8), stream=1))
    copies_stream = int(loader._service.poller.copier.stream)
    assert copies_stream not in {entry[-1] for entry in cuda.runtime.log}


@pytest.mark.parametrize(
    ("make", "what"),
    [
        pytest.param(lambda cuda: np.zeros(10), "plain NumPy array", id="pageable"),
        pytest.param(lambda cuda: bytearray(10), "has neither", id="no-interface"),
        pytest.param(lambda cuda: cuda.array(np.zeros(4), ordinal=1), "on GPU 1", id="other-gpu"),
        pytest.param(lambda cuda: FakeDeviceArray(np.zeros(4)), "knows of no memory", id="nowhere"),
        pytest.param(
            lambda cuda: cuda.array(np.zeros(4), data=(4096, True)), "read-only", id="read-only"
        ),
    ],
)
def test_memory_out_of_reach_is_refused(cuda, loader, make, what):
    with pytest.raises(gpuq.DestinationError, match=what):
        loader.register(make(cuda))


def test_a_tensor_that_gives_its_memory_to_nobody_says_why(loader):
    class Tensor:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad")

    with pytest.raises(gpuq.DestinationError, match="requires grad"):
        loader.register(Tensor())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda a: a.setflags(write=False) or a, id="read-only"),
        pytest.param(lambda a: a[::2], id="strided"),
    ],
)
def test_mapped_host_memory_must_be_writable_and_contiguous(loader, change):
    mapped, _ = loader._service.device.mapped_words(8)
    with pytest.raises(gpuq.DestinationError, match="writable, C-contiguous"):
        loader.register(change(mapped))


def test_numbas_mapped_arrays_are_taken(cuda, loader):
    from numba.cuda.cudadrv.devicearray import MappedNDArray

    array = np.zeros(10, np.int32).view(MappedNDArray)
    begin = array.ctypes.data
    cuda.library.regions.append((begin, begin + 40, HOST_TYPE, 0))
    region = loader._service.device.destination(array)
    assert (region.address, region.nbytes, region.kind) == (begin, 40, HOST_MEMORY)


def test_mapped_memory_behind_an_interface_is_filled_at_the_hosts_address(cuda, loader):
    """Registered memory may have another address on the GPU; the poller writes at the host's."""
    array = FakeDeviceArray(np.zeros(10, np.uint8), data=(0xD000, False))
    cuda.library.regions.append((0xD000, 0xD000 + 10, HOST_TYPE, 0))
    real = type(cuda.library)._cuPointerGetAttribute

    def elsewhere(library: Any, value: Any, attribute: int, address: Any) -> int:
        if attribute == 4:
            value._obj.value = array.host.ctypes.data
            return 0
        return real(library, value, attribute, address)

    type(cuda.library)._cuPointerGetAttribute = elsewhere
    try:
        region = loader._service.device.destination(array)
    finally:
        type(cuda.library)._cuPointerGetAttribute = real
    assert (region.address, region.kind) == (array.host.ctypes.data, HOST_MEMORY)


def test_an_array_without_bytes_is_taken_wherever_it_is(cuda, loader):
    region = loader._service.device.destination(FakeDeviceArray(np.zeros(0), data=(0, False)))
    assert (region.nbytes, region.kind) == (0, DEVICE_MEMORY)


def test_empty_makes_arrays_on_the_gpu(cuda, loader):
    array = loader.empty((3, 4), np.float32)
    kinds = [kind for begin, _, kind, _ in cuda.library.regions if begin == array.data.ptr]
    assert kinds == [DEVICE_TYPE]
    assert loader.register(array).nbytes == 48


@pytest.mark.parametrize("values", [[3, 1, 2], np.arange(12, dtype=np.float32).reshape(3, 4).T])
def test_values_go_to_the_gpu_and_back(cuda, loader, values):
    array = loader.array(values)
    address = array.device_ctypes_pointer.value
    kinds = [kind for begin, end, kind, _ in cuda.library.regions if begin <= address < end]
    assert kinds == [DEVICE_TYPE]
    assert array.__cuda_array_interface__["stream"] is None
    assert loader.register(array).nbytes == np.asarray(values).nbytes
    np.testing.assert_array_equal(loader.to_numpy(array), values)
    assert loader.to_numpy(array).dtype == np.asarray(values).dtype


def test_whatever_kernels_write_to_comes_back(cuda, loader):
    for array in (loader.empty(5, np.int64), loader._service.device.mapped_words(5)[0]):
        memory = array if isinstance(array, np.ndarray) else array.host
        memory[:] = range(5)
        copy = loader.to_numpy(array)
        memory[:] = 0
        assert copy.tolist() == [0, 1, 2, 3, 4]


# --- kernels ------------------------------------------------------------------------------------


@numba_cuda.jit
def pull_kernel(q, source, destination, statuses):
    statuses[0] = gpuq.pull(q, source, destination, 0, 100, 0)


def test_prepare_loads_the_kernel_so_that_its_first_launch_loads_nothing(cuda, loader):
    statuses = cuda.array(np.zeros(1, np.int64))
    cuda.library.calls.clear()
    assert loader.prepare(pull_kernel, loader.queue, 1, 2, statuses) is pull_kernel
    (kernel,) = cuda.loaded
    calls = [(name, arguments[-1].value) for name, arguments in cuda.library.calls]
    assert calls == [("cuKernelGetFunction", kernel), ("cuFuncLoad", kernel + 1)]

    # A launch finds it by its arguments' types, and hands the queue over without any call.
    arguments = (loader.queue, 1, 2, statuses)
    signature = tuple(pull_kernel.typeof_pyval(argument) for argument in arguments)
    compiled = pull_kernel.overloads[signature]
    cuda.runtime.log.clear()
    cuda.library.calls.clear()
    write_back: list[Any] = []
    handed: list[Any] = []
    compiled._prepare_args(signature[0], loader.queue, 0, write_back, handed)
    assert write_back == []
    assert loader.queue.flags.device_ctypes_pointer.value in handed
    assert cuda.runtime.log == cuda.library.calls == []
    assert len(cuda.loaded) == 1


def test_a_kernel_that_cannot_be_loaded_is_said_so_by_prepare(cuda, loader):
    cuda.library.results["cuFuncLoad"] = 2
    with pytest.raises(gpuq.TargetUnavailableError, match="cuFuncLoad said 2"):
        loader.prepare(pull_kernel, loader.queue, 1, 2, cuda.array(np.zeros(1, np.int64)))


def test_an_older_driver_loads_at_once_and_has_no_such_function(cuda, loader):
    cuda.library.missing.add("cuFuncLoad")
    loader.prepare(pull_kernel, loader.queue, 1, 2, cuda.array(np.zeros(1, np.int64)))


def pull_body(index, size, q, source, destination, statuses):
    statuses[index] = gpuq.pull(q, source, destination, 0, 100, index)


@pytest.mark.filterwarnings("ignore:Grid size")
def test_a_body_for_launch_is_loaded_before_its_launch(cuda, loader, path, monkeypatch):
    source, array = loader.open(path), cuda.array(np.zeros(100, np.uint8))
    arguments = (loader.queue, source, loader.register(array), cuda.array(np.zeros(4, np.int64)))
    assert loader.prepare(pull_body, *arguments) is pull_body
    assert len(cuda.loaded) == 1
    kernel = launching.cuda_kernel(pull_body)
    launched = []
    for compiled in kernel.overloads.values():
        monkeypatch.setattr(compiled, "launch", lambda *given: launched.append(given))
    stream = FakeStream(cuda)
    loader.launch(pull_body, 4, *arguments, threads_per_block=32, stream=stream)
    ((handed, grid, block, on, _),) = launched
    assert handed == ((loader.queue, source.handle, arguments[2].handle, arguments[3]),)
    assert (grid, block) == ((4, 1, 1), (32, 1, 1))
    assert int(on.handle) == stream.ptr
    assert len(cuda.loaded) == 1, "the launch compiled another kernel than was prepared"


def test_modules_are_asked_to_load_at_once(cuda, monkeypatch):
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    with gpuq.Loader(target="cuda", slots=2, staging_buffers=1, staging_bytes=4096):
        assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"


# --- waiting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [None, 7, "numba"])
def test_synchronize_waits_for_the_stream_that_it_is_given(cuda, loader, stream):
    from cuda.bindings import driver as binding
    from numba.cuda.cudadrv.driver import Stream

    given = Stream(binding.CUstream(0x55)) if stream == "numba" else stream
    cuda.runtime.statuses = [NOT_READY] * 4
    cuda.runtime.log.clear()
    loader.synchronize(given)
    assert ("eventRecord", {None: 0, 7: 7, "numba": 0x55}[stream]) in cuda.runtime.log
    assert cuda.runtime.statuses == []


def test_ctrl_c_aborts_lets_the_kernel_return_and_is_raised(cuda, loader, monkeypatch):
    """The kernel returns a while after it was told to."""
    cuda.runtime.statuses = [NOT_READY] * 1000
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(loader.state)
        if len(naps) == 3:
            raise KeyboardInterrupt
        if len(naps) == 6:
            cuda.runtime.statuses.clear()

    with monkeypatch.context() as patch:
        nap(patch, sleep)
        with pytest.raises(KeyboardInterrupt):
            loader.synchronize()
    assert naps == [State.RUNNING] * 3 + [State.ABORTED] * 3


def test_a_kernel_that_does_not_return_is_not_waited_for_for_ever(cuda, loader, monkeypatch):
    cuda.runtime.statuses = [NOT_READY] * 1000
    monkeypatch.setattr(cuda_device, "_ABORTED_SECONDS", 0.0)
    nap(monkeypatch, lambda seconds: None)
    assert loader._service.device.settle(None) is False


@pytest.mark.parametrize("status", [ILLEGAL_ADDRESS, 719, 702])
def test_a_kernel_that_failed_is_raised_and_not_waited_for(cuda, loader, status):
    """Else its stream would be asked for ever: a lost context never says complete."""
    cuda.runtime.statuses = [NOT_READY, status]
    with pytest.raises(cuda.runtime.CUDARuntimeError, match=str(status)):
        loader.synchronize()
    cuda.runtime.statuses = [status]
    assert loader._service.device.settle(None) is False


# --- the end ------------------------------------------------------------------------------------


def test_numba_frees_nothing_while_kernels_may_poll(cuda, loader):
    assert cuda.context.deallocations.is_disabled
    assert cuda.context.memory_manager.deallocations.is_disabled
    loader.close()
    assert not cuda.context.deallocations.is_disabled
    assert not cuda.context.memory_manager.deallocations.is_disabled


def test_staging_is_freed_after_the_device_was_idle(cuda, loader):
    address = loader._service._memory[0].owner.address
    cuda.runtime.log.clear()
    cuda.runtime.statuses = [NOT_READY, NOT_READY]
    loader.close()
    names = cuda.runtime.names()
    assert names.index("eventRecord") < names.index("deviceSynchronize") < names.index("freeHost")
    assert ("freeHost", address) in cuda.runtime.log
    assert cuda.runtime.statuses == []


def test_the_queues_memory_outlives_the_loader_for_as_long_as_somebody_holds_it(cuda, loader):
    """A kernel that is launched after the end must read a STATE, and no freed memory."""
    queue = loader.queue
    control = on_host(queue).control
    address = control.ctypes.data
    loader.close()
    gc.collect()
    assert address in cuda.runtime._memory
    assert loader.state == State.CLOSED
    assert control[0] == State.CLOSED
    loader.abort()
    loader.close()
    assert Compiled.pull(on_host(queue), 1, 2, 0, 1, 0) == Status.ABORTED


def test_the_queues_memory_goes_with_the_last_view_of_it(cuda, path):
    loader = gpuq.Loader(target="cuda", slots=2, staging_buffers=1, staging_bytes=4096)
    kept = loader.queue.flags
    loader.close()
    del loader
    gc.collect()
    assert len(cuda.runtime._memory) == 1
    del kept
    gc.collect()
    assert cuda.runtime._memory == {}


def test_an_interrupted_close_frees_nothing_that_a_kernel_may_use(cuda, monkeypatch):
    loader = gpuq.Loader(target="cuda", slots=2, staging_buffers=1, staging_bytes=4096)
    cuda.runtime.statuses = [NOT_READY] * 1000

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        nap(patch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            loader.close()
    allocated = cuda.runtime.names().count("hostAlloc")
    del loader
    gc.collect()
    assert len(cuda.runtime._memory) == allocated
    assert "freeHost" not in cuda.runtime.names()


def test_a_lost_context_is_raised_by_close_and_nothing_is_freed(cuda):
    loader = gpuq.Loader(target="cuda", slots=2, staging_buffers=1, staging_bytes=4096)
    cuda.runtime.statuses = [ILLEGAL_ADDRESS]
    with pytest.raises(cuda.runtime.CUDARuntimeError):
        loader.close()
    assert "freeHost" not in cuda.runtime.names()

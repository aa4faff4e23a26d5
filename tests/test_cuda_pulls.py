"""Whole loaders on the CUDA copier: real files, both readers, and copies that end late."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS, Mode, note_path, skip_where_refused, until
from kernels import Compiled, compiled_kernel, pull_slices
from recording import assert_guards, flag_address, guarded

import gpuq
import gpuq.loader
from gpuq.host.driver import (
    EVENT_QUERY,
    EVENT_RECORD,
    INVALID_VALUE,
    MEMCPY_HTOD_ASYNC,
    OUT_OF_MEMORY,
)
from gpuq.layout import State, Status
from gpuq.testing.recording_driver import (
    ILLEGAL_ADDRESS,
    LAUNCH_FAILED,
    RecordingDevice,
    RecordingDriver,
)

BUFFER = 4096
BUFFERS = 4
DEPTH = 16


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver(room=1 << 16)


@pytest.fixture
def make_cuda_loader(
    driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., gpuq.Loader]]:
    """Make loaders that take the recording driver for a GPU's; let all copies end afterwards."""
    made: list[gpuq.Loader] = []

    def make(mode: Mode | None = None, **given: Any) -> gpuq.Loader:
        settings = {
            "reader": mode.reader if mode else "threads",
            "direct": mode.direct if mode else "off",
            "slots": DEPTH,
            "staging_buffers": BUFFERS,
            "staging_bytes": BUFFER,
            "reader_threads": 3,
            "merge_bytes": 0,
        }
        device = RecordingDevice(driver)
        with monkeypatch.context() as patch:
            patch.setattr(gpuq.loader, "choose_device", lambda target: (device, "recording"))
            made.append(gpuq.Loader(**(settings | given)))
        return made[-1]

    yield make
    driver.allow()
    for loader in made:
        loader.abort()
        with contextlib.suppress(gpuq.PollerDiedError):
            loader.close()


def watch_slices(
    driver: RecordingDriver, loader: gpuq.Loader, address: int, slices: Any, first_ticket: int
) -> None:
    """Let the driver note whether each slice's request was completed at each of its copies."""
    for number, (start, end, offset) in enumerate(slices):
        ticket = first_ticket + number
        begin = address + int(offset)
        driver.watch(
            begin, begin + int(end - start), flag_address(loader.queue, ticket), ticket + 1
        )


def pull(loader: gpuq.Loader, source: Any, destination: Any, slices: Any) -> list[Status]:
    """Run a kernel that pulls rows of (start, end, offset)."""
    rows = np.array(slices, dtype=np.int64).reshape(-1, 3)
    statuses = np.full(len(rows), -1, dtype=np.int64)
    tickets = np.zeros(min(DEPTH, loader.config.slots), dtype=np.int64)
    pull_slices(loader.queue, source.handle, destination.handle, rows, tickets, statuses)
    return [Status(status) for status in statuses]


# Arrays as they lie in files: nothing aligned, sizes around blocks and buffers.
FIRST_ARRAYS = [(3, 4), (17, 528), (1000, 5099), (5099, 5100), (8191, 12_289), (12_289, 31_111)]
SECOND_ARRAYS = [(0, 1), (511, 513), (4095, 8193), (9001, 9001), (20_000, 65_003)]


@pytest.mark.parametrize("queries", [0, 40], ids=["at-once", "late"])
def test_two_files_of_arrays_at_odd_offsets(
    mode, driver, make_cuda_loader, tmp_path, queries, record_property
):
    driver.delay(queries)
    loader = make_cuda_loader(mode)
    ticket = 0
    pulled = 0
    for name, arrays in (("first", FIRST_ARRAYS), ("second", SECOND_ARRAYS)):
        content = np.random.default_rng(len(name)).integers(0, 256, 65_003, dtype=np.uint8)
        path = tmp_path / name
        content.tofile(path)
        source = loader.open(path)
        note_path(loader, source, record_property)
        slices = []
        offset = 5
        for start, end in arrays:
            slices.append((start, end, offset))
            offset += end - start + 3
        array = guarded(offset)
        expected = array.copy()
        destination = loader.register(array)
        watch_slices(driver, loader, array.ctypes.data, slices, ticket)
        assert pull(loader, source, destination, slices) == [Status.OK] * len(slices)
        for start, end, to in slices:
            expected[to : to + end - start] = content[start:end]
            pulled += end - start
        np.testing.assert_array_equal(array, expected)
        assert_guards(array)
        ticket += len(slices)
    assert loader.statistics().bytes == pulled
    loader.close()
    assert driver.faults() == []
    log = driver.log()
    assert sum(call.nbytes for call in log if call.kind == MEMCPY_HTOD_ASYNC) == pulled
    watched = {call.watch for call in log if call.kind == MEMCPY_HTOD_ASYNC}
    empty = {6 + 3}  # the array without bytes needs no copy
    assert watched == set(range(ticket)) - empty


def test_one_array_over_many_buffers_and_many_arrays_over_few(
    mode, driver, make_cuda_loader, tmp_path
):
    """The array needs 25 buffers of the 4; then 200 arrays share them."""
    driver.delay(7)
    content = np.random.default_rng(8).integers(0, 256, 120_001, dtype=np.uint8)
    path = tmp_path / "content"
    content.tofile(path)
    loader = make_cuda_loader(mode)
    source = loader.open(path)
    note_path(loader, source)
    array = guarded(100_003)
    destination = loader.register(array)
    watch_slices(driver, loader, array.ctypes.data, [(77, 77 + 100_003, 0)], 0)
    assert pull(loader, source, destination, [(77, 77 + 100_003, 0)]) == [Status.OK]
    np.testing.assert_array_equal(array, content[77 : 77 + 100_003])
    assert driver.calls_of(MEMCPY_HTOD_ASYNC) >= 25

    starts = np.random.default_rng(9).integers(0, 119_000, 200)
    slices = [(int(start), int(start) + 499, 500 * i) for i, start in enumerate(starts)]
    watch_slices(driver, loader, array.ctypes.data, slices, 1)
    assert pull(loader, source, destination, slices) == [Status.OK] * 200
    for start, end, offset in slices:
        np.testing.assert_array_equal(array[offset : offset + 499], content[start:end])
    assert_guards(array)
    assert loader.statistics().staging_high_water == BUFFERS
    loader.close()
    assert driver.faults() == []


@pytest.mark.parametrize("queries", [0, 40], ids=["at-once", "late"])
def test_neighbours_are_copied_each_with_an_event_of_its_own(
    mode, driver, make_cuda_loader, tmp_path, queries
):
    driver.delay(queries)
    content = np.random.default_rng(10).integers(0, 256, 30_001, dtype=np.uint8)
    path = tmp_path / "content"
    content.tofile(path)
    loader = make_cuda_loader(mode, merge_bytes=BUFFER)
    source = loader.open(path)
    array = guarded(len(content))
    destination = loader.register(array)
    order = np.random.default_rng(11).permutation(300)
    slices = [(100 * int(i), 100 * int(i) + 100, 100 * int(i)) for i in order]
    watch_slices(driver, loader, array.ctypes.data, slices, 0)
    assert pull(loader, source, destination, slices) == [Status.OK] * 300
    np.testing.assert_array_equal(array[:30_000], content[:30_000])
    assert_guards(array)
    assert driver.calls_of(MEMCPY_HTOD_ASYNC) == 300
    loader.close()
    assert driver.faults(may_share=True) == []


def test_a_file_that_was_shortened_after_it_was_opened_has_nothing_copied(
    mode, driver, make_cuda_loader, tmp_path
):
    path = tmp_path / "content"
    content = np.random.default_rng(8).integers(0, 256, 40_000, dtype=np.uint8)
    content.tofile(path)
    loader = make_cuda_loader(mode)
    source = loader.open(path)
    note_path(loader, source)
    array = guarded(40_000)
    destination = loader.register(array)
    os.truncate(path, 10_000)
    beyond = [
        (9_999, 10_001, 0),  # one piece that ends a byte too far
        (12_000, 13_000, 0),  # one piece behind the end
        (0, 40_000, 0),  # many pieces, the first of which are there
    ]
    assert pull(loader, source, destination, beyond) == [Status.END_OF_FILE] * 3
    assert driver.calls == 0
    assert (array == array.base[0]).all()
    assert pull(loader, source, destination, [(5_001, 10_000, 1)]) == [Status.OK]
    np.testing.assert_array_equal(array[1:5_000], content[5_001:10_000])
    loader.close()
    assert driver.faults() == []


# --- failing calls ---------------------------------------------------------------------------


def pull_until_other_body(q, source, destination, nbytes, most, statuses):
    """Pull the first `nbytes` again and again, until a status is not OK; return how often."""
    for i in range(most):
        status = gpuq.pull(q, source, destination, 0, nbytes, i)
        statuses[i] = status
        if status != 0:
            return i + 1
    return most


pull_until_other = compiled_kernel(pull_until_other_body)


@pytest.fixture
def content_path(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    np.random.default_rng(8).integers(0, 256, 40_000, dtype=np.uint8).tofile(path)
    return path


@pytest.mark.parametrize("result", [INVALID_VALUE, OUT_OF_MEMORY])
def test_a_refused_copy_is_the_status_of_its_request_and_of_no_other(
    driver, make_cuda_loader, content_path, reader, result
):
    driver.fail(MEMCPY_HTOD_ASYNC, 5, result)
    loader = make_cuda_loader(Mode(reader, "off"))
    source = loader.open(content_path)
    note_path(loader, source)
    array = guarded(40_000)
    destination = loader.register(array)
    slices = [(i * 1000, i * 1000 + 900, i * 1000) for i in range(30)]
    statuses = pull(loader, source, destination, slices)
    assert sorted(statuses) == [Status.OK] * 29 + [Status.COPY_FAILED]
    content = np.fromfile(content_path, np.uint8)
    for (start, end, offset), status in zip(slices, statuses, strict=True):
        arrived = np.array_equal(array[offset : offset + 900], content[start:end])
        assert arrived == (status == Status.OK)
    loader.check()
    statistics = loader.statistics()
    assert statistics.requests == {"OK": 29, "COPY_FAILED": 1}
    assert statistics.staging_quarantined == 0
    loader.close()
    assert driver.faults() == []


@pytest.mark.parametrize("call", [1, 6])
@pytest.mark.parametrize(
    ("kind", "result", "sticky"),
    [
        (MEMCPY_HTOD_ASYNC, ILLEGAL_ADDRESS, True),
        (MEMCPY_HTOD_ASYNC, LAUNCH_FAILED, False),
        (EVENT_RECORD, INVALID_VALUE, False),
        (EVENT_RECORD, ILLEGAL_ADDRESS, True),
        (EVENT_QUERY, ILLEGAL_ADDRESS, True),
        (EVENT_QUERY, INVALID_VALUE, False),
    ],
)
def test_a_lost_context_releases_the_kernel_and_is_raised(
    driver, make_cuda_loader, content_path, reader, kind, result, sticky, call
):
    driver.fail(kind, call, result, sticky=sticky)
    loader = make_cuda_loader(Mode(reader, "off"))
    source = loader.open(content_path)
    note_path(loader, source)
    array = guarded(40_000)
    destination = loader.register(array)
    statuses = np.full(40, -1, dtype=np.int64)
    done = pull_until_other(loader.queue, source.handle, destination.handle, 3000, 40, statuses)
    assert done < 40
    assert statuses[done - 1] == Status.ABORTED
    assert (statuses[: done - 1] == Status.OK).all()
    assert loader.state == State.ABORTED
    until(lambda: not loader._service.is_serving, "the poller ends")
    with pytest.raises(gpuq.PollerDiedError, match=f"under a copy: CUresult {result}"):
        loader.synchronize()
    with pytest.raises(gpuq.PollerDiedError):
        loader.open(content_path)
    calls = driver.calls
    loader.close()
    assert driver.calls == calls
    statistics = loader.statistics()
    assert statistics.staging_quarantined == 1
    assert statistics.requests.get("OK", 0) == done - 1
    assert statistics.outstanding == 1
    assert not loader._service.device.is_closed, "its memory may still be read by the GPU"
    assert driver.faults(is_over=False) == []


def test_a_copy_that_never_ends_holds_nobody_who_gives_up(driver, make_cuda_loader, content_path):
    driver.hold()
    loader = make_cuda_loader()
    source = loader.open(content_path)
    destination = loader.register(guarded(40_000))
    queue = loader.queue
    ticket = Compiled.post(queue, source.handle, destination.handle, 0, 3000, 0)
    until(lambda: driver.calls_of(EVENT_QUERY) > 3, "the copy is asked for")
    assert Compiled.wait_for(queue, ticket, 1_000_000) == Status.TIMED_OUT
    loader.abort()
    assert Compiled.wait(queue, ticket) == Status.ABORTED
    # The buffer is not given back while the copy may read it, whatever the queue's state.
    assert loader._service.is_serving
    driver.allow()
    loader.close()
    assert driver.faults() == []


def test_a_forgotten_loader_whose_copy_never_ends_keeps_its_memory_and_does_not_hang(
    driver, make_cuda_loader, content_path, monkeypatch
):
    """As when the interpreter ends: bounded, and nothing is freed that the GPU may still read."""
    driver.hold()
    loader = make_cuda_loader()
    service = loader._service
    source = loader.open(content_path)
    destination = loader.register(guarded(40_000))
    Compiled.post(loader.queue, source.handle, destination.handle, 0, 3000, 0)
    until(lambda: driver.calls_of(EVENT_QUERY) > 3, "the copy is asked for")
    monkeypatch.setattr("gpuq.host.service.STUCK_SECONDS", 0.0)
    service.finish()
    assert service.is_serving
    assert service.is_dirty
    assert not service.device.is_closed
    assert len(service._memory) == 1


def test_closing_waits_for_the_copies_under_way(driver, make_cuda_loader, content_path):
    driver.hold()
    loader = make_cuda_loader()
    source = loader.open(content_path)
    array = guarded(40_000)
    destination = loader.register(array)
    ticket = Compiled.post(loader.queue, source.handle, destination.handle, 0, 3000, 0)
    until(lambda: driver.calls_of(EVENT_QUERY) > 3, "the copy is asked for")
    closing = threading.Thread(target=loader.close)
    closing.start()
    until(lambda: loader.state == State.CLOSING, "closing begins")
    queries = driver.calls_of(EVENT_QUERY)
    until(lambda: driver.calls_of(EVENT_QUERY) > queries + 5, "more passes")
    assert closing.is_alive()
    assert not loader._service.device.is_closed
    driver.allow()
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive()
    assert Compiled.wait(loader.queue, ticket) == Status.OK
    np.testing.assert_array_equal(array[:3000], np.fromfile(content_path, np.uint8)[:3000])
    assert loader._service.device.is_closed
    assert driver.faults() == []


def test_unregistering_waits_for_the_copies_under_way(driver, make_cuda_loader, content_path):
    driver.hold()
    loader = make_cuda_loader()
    source = loader.open(content_path)
    destination = loader.register(guarded(40_000))
    ticket = Compiled.post(loader.queue, source.handle, destination.handle, 0, 3000, 0)
    until(lambda: driver.calls_of(EVENT_QUERY) > 3, "the copy is asked for")
    leaving = threading.Thread(target=destination.unregister)
    leaving.start()
    queries = driver.calls_of(EVENT_QUERY)
    until(lambda: driver.calls_of(EVENT_QUERY) > queries + 5, "more passes")
    assert leaving.is_alive()
    driver.allow()
    leaving.join(WAIT_SECONDS)
    assert not leaving.is_alive()
    assert Compiled.wait(loader.queue, ticket) == Status.OK
    assert driver.faults() == []


def test_an_abort_lets_copies_under_way_end_before_memory_goes(
    driver, make_cuda_loader, content_path
):
    driver.hold()
    loader = make_cuda_loader()
    source = loader.open(content_path)
    destination = loader.register(guarded(40_000))
    queue = loader.queue
    tickets = [
        Compiled.post_at(queue, source.handle, destination.handle, i * 4000, 0, 3000, i)
        for i in range(BUFFERS + 2)
    ]
    until(lambda: driver.calls_of(MEMCPY_HTOD_ASYNC) == BUFFERS, "all buffers are copied from")
    loader.abort()
    assert [Compiled.wait(queue, ticket) for ticket in tickets] == [Status.ABORTED] * len(tickets)
    assert not loader._service.device.is_closed
    driver.allow()
    loader.close()
    assert loader._service.device.is_closed
    assert driver.calls_of(MEMCPY_HTOD_ASYNC) == BUFFERS, "a copy was started after the abort"
    assert driver.faults() == []


def test_two_loaders_have_streams_of_their_own(monkeypatch, make_cuda_loader, driver, content_path):
    """A second loader's driver is another one: two pollers never share a log."""
    skip_where_refused(Mode("threads", "off"))
    first = make_cuda_loader()
    other = RecordingDriver()
    with monkeypatch.context() as patch:
        patch.setattr(
            gpuq.loader, "choose_device", lambda target: (RecordingDevice(other), "recording")
        )
        second = gpuq.Loader(
            reader="threads", slots=4, staging_buffers=2, staging_bytes=BUFFER, reader_threads=1
        )
    driver.hold()
    content = np.fromfile(content_path, np.uint8)
    arrays = [guarded(4000), guarded(4000)]
    handles = [
        (loader.open(content_path).handle, loader.register(array).handle)
        for loader, array in zip((first, second), arrays, strict=True)
    ]
    held = Compiled.post(first.queue, *handles[0], 0, 3000, 0)
    assert Compiled.pull(second.queue, *handles[1], 100, 3100, 0) == Status.OK
    np.testing.assert_array_equal(arrays[1][:3000], content[100:3100])
    assert Compiled.poll(first.queue, held) == Status.PENDING
    driver.allow()
    assert Compiled.wait(first.queue, held) == Status.OK
    second.close()
    assert other.faults() == []

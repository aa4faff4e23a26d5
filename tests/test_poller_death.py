"""A poller that dies: kernels are released, the host is told, and nothing is freed too early."""

from __future__ import annotations

import errno
import gc
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import until
from kernels import Compiled
from lives import (
    CLOSED_GATE,
    DATA,
    InThread,
    MakeLoader,
    MakeScripted,
    handles,
    open_gate,
)

import gpuq
from gpuq.host import service, tables
from gpuq.layout import STATE, State, Status
from gpuq.testing import copiers, readers


def let_it_raise(make_scripted: MakeScripted) -> tuple[gpuq.Loader, type[BaseException], str]:
    loader, _ = make_scripted(DATA, [(readers.RAISE, 0)])
    return loader, RuntimeError, "the script says so"


def let_its_flush_fail(make_scripted: MakeScripted) -> tuple[gpuq.Loader, type[BaseException], str]:
    loader, reader = make_scripted(DATA)
    reader.words[readers.FLUSH_ERRNO] = errno.EBADF
    return loader, OSError, "Bad file descriptor"


def let_a_copy_be_uncertain(
    make_scripted: MakeScripted,
) -> tuple[gpuq.Loader, type[BaseException], str]:
    loader, _ = make_scripted(DATA, copies=[copiers.UNCERTAIN])
    return loader, OSError, "Input/output error"


DEATHS = pytest.mark.parametrize("die", [let_it_raise, let_its_flush_fail, let_a_copy_be_uncertain])


@DEATHS
def test_a_dying_poller_releases_kernels_and_is_told_by_the_next_call(
    make_scripted: MakeScripted, payload_path: Path, die: Any
) -> None:
    loader, kind, text = die(make_scripted)
    _, source, destination = handles(loader, payload_path)
    q, s, d = loader.queue, source.handle, destination.handle
    waiting = [InThread(lambda: Compiled.pull(q, s, d, 0, 10, 0)) for _ in range(3)]
    assert [one.result() for one in waiting] == [Status.ABORTED] * 3
    assert Compiled.pull(q, s, d, 0, 10, 0) == Status.ABORTED
    until(lambda: not loader._service.is_serving)
    for call in (
        loader.check,
        lambda: loader.open(payload_path),
        lambda: loader.register(np.zeros(3)),
        lambda: loader.empty(3),
    ):
        with pytest.raises(gpuq.PollerDiedError, match=text) as caught:
            call()
        assert isinstance(caught.value.__cause__, kind)
    loader.close()  # said already
    assert not source.is_open


def test_the_call_after_a_death_is_told_of_the_death_not_of_an_abort(
    make_scripted: MakeScripted, payload_path: Path
) -> None:
    loader, _, _ = let_its_flush_fail(make_scripted)
    _, source, destination = handles(loader, payload_path)
    # The poller raises ABORTED while it holds no interpreter lock; this thread keeps the lock
    # from then until it asks, so that the poller's thread cannot have said why yet.
    interval = sys.getswitchinterval()
    try:
        Compiled.poll(loader.queue, 0)
        sys.setswitchinterval(1000)
        Compiled.post(loader.queue, source.handle, destination.handle, 0, 10, 0)
        while int(loader.queue.control[STATE]) != State.ABORTED:
            pass
        with pytest.raises(gpuq.PollerDiedError, match="Bad file descriptor"):
            loader.check()
    finally:
        sys.setswitchinterval(interval)


@DEATHS
def test_a_death_that_no_call_has_told_is_told_by_close(
    make_scripted: MakeScripted, payload_path: Path, die: Any
) -> None:
    loader, _, text = die(make_scripted)
    _, source, destination = handles(loader, payload_path)
    q, s, d = loader.queue, source.handle, destination.handle
    assert Compiled.pull(q, s, d, 0, 10, 0) == Status.ABORTED
    with pytest.raises(gpuq.PollerDiedError, match=text):
        loader.close()
    assert not source.is_open
    loader.close()


@DEATHS
def test_the_staging_of_a_poller_that_died_is_never_freed(
    make_scripted: MakeScripted, payload_path: Path, die: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(service, "keep_forever", kept.append)
    loader, _, _ = die(make_scripted)
    _, source, destination = handles(loader, payload_path)
    address = loader._service.poller.staging.address
    q, s, d = loader.queue, source.handle, destination.handle
    assert Compiled.pull(q, s, d, 0, 10, 0) == Status.ABORTED
    with pytest.raises(gpuq.PollerDiedError):
        loader.close()
    regions = [
        region.address
        for thing in kept
        for part in thing
        if isinstance(part, list)
        for region in part
    ]
    assert regions == [address]


def test_the_staging_of_a_closed_loader_is_freed(
    make_loader: MakeLoader, payload_path: Path
) -> None:
    loader = gpuq.Loader(target="cpu", slots=4, staging_buffers=2, staging_bytes=4096)
    staging = weakref.ref(loader._service._memory[0].owner)
    assert staging() is not None
    loader.close()
    assert staging() is None, "also while the closed loader is still held"


def test_an_exception_inside_with_aborts_and_passes(
    make_scripted: MakeScripted, payload_path: Path
) -> None:
    loader, reader = make_scripted(DATA, gate=CLOSED_GATE)
    _, source, destination = handles(loader, payload_path)
    q, s, d = loader.queue, source.handle, destination.handle
    waiting = InThread(lambda: Compiled.pull(q, s, d, 0, 10, 0))
    until(lambda: reader.words[readers.SUBMITTED] == 1)

    def body() -> None:
        with loader:
            opening = InThread(lambda: (waiting.result(), open_gate(reader)))
            body.opening = opening  # type: ignore[attr-defined]
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        body()
    assert waiting.result() == Status.ABORTED
    assert loader.state == State.ABORTED
    assert not source.is_open


def test_an_exception_inside_with_carries_the_pollers_death_as_a_note(
    make_scripted: MakeScripted, payload_path: Path
) -> None:
    loader, _ = make_scripted(DATA, [(readers.RAISE, 0)])
    _, source, destination = handles(loader, payload_path)
    q, s, d = loader.queue, source.handle, destination.handle

    def body() -> None:
        with loader:
            Compiled.pull(q, s, d, 0, 10, 0)
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        body()
    assert any("the script says so" in note for note in caught.value.__notes__)


def test_leaving_with_after_a_death_raises_it(
    make_scripted: MakeScripted, payload_path: Path
) -> None:
    loader, _ = make_scripted(DATA, [(readers.RAISE, 0)])
    _, source, destination = handles(loader, payload_path)
    q, s, d = loader.queue, source.handle, destination.handle

    def body() -> None:
        with loader:
            assert Compiled.pull(q, s, d, 0, 10, 0) == Status.ABORTED

    with pytest.raises(gpuq.PollerDiedError, match="the script says so"):
        body()


# --- what a read that went straight still writes to -------------------------------------------


def read_straight(
    make_scripted: MakeScripted, path: Path
) -> tuple[gpuq.Loader, readers.ScriptedReader, gpuq.Source, gpuq.Destination]:
    """Return a loader whose read to a destination does not end before the test's end."""
    loader, reader = make_scripted(DATA, gate=CLOSED_GATE, straight_bytes=1, direct="off")
    array, source, destination = handles(loader, path)
    Compiled.post(loader.queue, source.handle, destination.handle, 0, 4000, 0)
    until(lambda: reader.words[readers.FLUSHED] == 1)
    assert reader.log[0, readers.ADDRESS] == array.ctypes.data
    return loader, reader, source, destination


def let_die(loader: gpuq.Loader, reader: readers.ScriptedReader, source: int, to: int) -> None:
    """Have a reader fail while it holds a read."""
    reader.words[readers.FLUSH_ERRNO] = errno.EBADF
    Compiled.post(loader.queue, source, to, 0, 10, 0)
    until(lambda: not loader._service.is_serving)


@pytest.mark.parametrize("how", ["unregister", "close", "forget"])
def test_an_array_is_kept_that_a_dead_pollers_read_may_still_write_to(
    make_scripted: MakeScripted, payload_path: Path, how: str
) -> None:
    # Where somebody was waiting for `unregister`, it was let go as soon as the poller was dead.
    loader, reader, source, destination = read_straight(make_scripted, payload_path)
    array = weakref.ref(destination.array)
    table, handle = loader._service.destinations, destination.handle
    if how == "unregister":
        closing = InThread(destination.unregister)
        until(lambda: table.word(handle, tables.HANDLE) == 0)
    other = loader.register(np.zeros(10, np.uint8))
    let_die(loader, reader, source.handle, other.handle)
    if how == "unregister":
        closing.result()
        assert not destination.is_registered
    elif how == "close":
        with pytest.raises(gpuq.PollerDiedError):
            loader.close()
    else:
        loader._finalizer()
    del destination
    gc.collect()
    assert array() is not None


@pytest.mark.parametrize("stops", [True, False])
def test_a_file_is_not_closed_that_a_dead_pollers_worker_may_still_read(
    make_scripted: MakeScripted, payload_path: Path, stops: bool
) -> None:
    # Its number would be that of another file when the worker comes to the read.
    loader, reader, source, destination = read_straight(make_scripted, payload_path)
    let_die(loader, reader, source.handle, destination.handle)

    class Workers:
        def stop(self, timeout: float) -> bool:
            return stops

    loader._service.choice.workers = Workers()
    file = source._file
    assert file is not None
    if stops:
        with pytest.raises(gpuq.PollerDiedError):
            loader.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file.buffered)
    else:
        source.close()
        assert not source.is_open
        os.fstat(file.buffered)
        file.close()


def test_an_array_whose_unregistering_was_interrupted_is_kept_until_the_end(
    make_scripted: MakeScripted, payload_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The next call to `register` forgot it, while a read was under way to it.
    loader, reader, _, destination = read_straight(make_scripted, payload_path)
    alive = weakref.ref(destination.array)

    def interrupt(seconds: float) -> None:
        monkeypatch.undo()
        other = loader.register(np.zeros(1))  # of another thread, while this one waits
        assert loader._find(loader._destinations, None, KeyError, "destination") is other
        raise KeyboardInterrupt

    monkeypatch.setattr(service.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        destination.unregister()
    del destination
    gc.collect()
    assert alive() is not None
    open_gate(reader)
    loader.close()
    gc.collect()
    assert alive() is None

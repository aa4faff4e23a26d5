"""The ends of a loader that its owner wants: closing, aborting, also from signal handlers."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import until
from kernels import Compiled, pull_until_refused
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
from gpuq.host import tables
from gpuq.layout import State, Status
from gpuq.testing import readers

# --- close -------------------------------------------------------------------------------------


def test_close_serves_what_was_posted(make_scripted: MakeScripted, payload_path: Path) -> None:
    loader, reader = make_scripted(DATA, gate=CLOSED_GATE)
    array, source, destination = handles(loader, payload_path)
    q = loader.queue
    # More than the buffers can carry at once: some are admitted, some are not issued yet.
    tickets = [
        Compiled.post_at(q, source.handle, destination.handle, 500 * i, i, i + 500, 0)
        for i in range(12)
    ]
    closing = InThread(loader.close)
    until(lambda: loader.state == State.CLOSING)
    assert all(Compiled.poll(q, t) == Status.PENDING for t in tickets)
    assert closing.is_running
    open_gate(reader)
    closing.result()
    assert loader.state == State.CLOSED
    assert [Compiled.wait(q, t) for t in tickets] == [Status.OK] * 12
    expected = np.concatenate([DATA[i : i + 500] for i in range(12)])
    np.testing.assert_array_equal(array[:6000], expected)


def test_a_closed_loader_answers_everything_with_aborted_and_raises_closed_error(
    make_loader: MakeLoader, payload_path: Path
) -> None:
    loader = make_loader()
    array, source, destination = handles(loader, payload_path)
    q, s, d = loader.queue, source.handle, destination.handle
    assert Compiled.pull(q, s, d, 0, 10, 0) == Status.OK
    loader.close()
    for _ in range(2 * loader.config.slots):
        assert Compiled.pull(q, s, d, 0, 10, 0) == Status.ABORTED
    for call in (
        loader.check,
        lambda: loader.open(payload_path),
        lambda: loader.register(np.zeros(3)),
        lambda: loader.empty(3),
    ):
        with pytest.raises(gpuq.ClosedError, match="closed"):
            call()
    assert not source.is_open
    assert not destination.is_registered
    assert loader.statistics().requests == {"OK": 1}
    source.close()
    destination.unregister()
    assert array[0] == np.fromfile(payload_path, np.uint8, 1)[0]


def test_closing_and_aborting_again_does_nothing(make_loader: MakeLoader) -> None:
    for first, second in itertools.product(("close", "abort"), repeat=2):
        loader = make_loader()
        getattr(loader, first)()
        getattr(loader, second)()
        loader.close()
        assert loader.state in (State.CLOSED, State.ABORTED)
        assert not loader._service.is_serving


def test_two_threads_may_close_at_once(make_scripted: MakeScripted, payload_path: Path) -> None:
    loader, reader = make_scripted(DATA, gate=CLOSED_GATE)
    _, source, destination = handles(loader, payload_path)
    Compiled.post(loader.queue, source.handle, destination.handle, 0, 10, 0)
    closing = [InThread(loader.close) for _ in range(3)]
    until(lambda: loader.state == State.CLOSING)
    open_gate(reader)
    for one in closing:
        one.result()
    assert loader.state == State.CLOSED


@pytest.mark.parametrize("depth", [1, 8])
@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_loader_ends_while_kernels_go_on_posting(
    reader: str, make_loader: MakeLoader, payload_path: Path, depth: int, end: str
) -> None:
    loader = make_loader(reader=reader, slots=32)
    _, source, destination = handles(loader, payload_path)
    words = [np.zeros(1, dtype=np.uint64) for _ in range(3)]

    def kernel(mine: Any) -> int:
        tickets = np.zeros(depth, dtype=np.int64)
        return pull_until_refused(
            loader.queue, source.handle, destination.handle, 100, tickets, mine
        )

    running = [InThread(lambda mine=mine: kernel(mine)) for mine in words]
    for mine in words:
        until(lambda mine=mine: mine[0] > 20, "kernels pull")
    ending = InThread(getattr(loader, end))
    ending.result()
    assert [one.result() for one in running] == [Status.ABORTED] * 3
    loader.close()


# --- abort -------------------------------------------------------------------------------------


def test_abort_releases_kernels_while_their_reads_are_in_flight(
    make_scripted: MakeScripted, payload_path: Path
) -> None:
    loader, reader = make_scripted(DATA, gate=CLOSED_GATE, slots=2)
    _, source, destination = handles(loader, payload_path)
    q, s, d = loader.queue, source.handle, destination.handle
    waiting = [InThread(lambda: Compiled.pull(q, s, d, 0, 10, 0)) for _ in range(5)]
    until(lambda: reader.words[readers.SUBMITTED] == 2)
    loader.abort()
    # Two wait for an answer, three for a slot. The gate is still closed.
    assert [one.result() for one in waiting] == [Status.ABORTED] * 5
    assert loader.state == State.ABORTED
    assert loader._service.is_serving, "it waits for the reads, or their buffers could be freed"
    open_gate(reader)
    loader.close()
    assert loader.state == State.ABORTED
    assert not loader._service.is_serving


def test_close_after_abort_waits_for_reads_in_flight(
    make_scripted: MakeScripted, payload_path: Path
) -> None:
    loader, reader = make_scripted(DATA, gate=CLOSED_GATE)
    array, source, destination = handles(loader, payload_path)
    Compiled.post(loader.queue, source.handle, destination.handle, 0, 10_000, 0)
    until(lambda: reader.words[readers.SUBMITTED] == 3)
    loader.abort()
    closing = InThread(loader.close)
    # The descriptor and the array are the loader's until the last read is over.
    until(lambda: loader.state == State.ABORTED)
    assert source.is_open
    assert destination.is_registered
    assert closing.is_running
    open_gate(reader)
    closing.result()
    assert not source.is_open
    assert (array == 0).all()
    assert loader.statistics().requests == {"ABORTED": 1}


# --- signals -----------------------------------------------------------------------------------


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Set what SIGUSR1 does in the main thread."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda act: signal.signal(signal.SIGUSR1, lambda *_: act())  # type: ignore[func-returns-value]
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("calls", [["close"], ["abort"], ["abort", "close"], ["close", "close"]])
def test_ending_from_a_signal_handler(
    make_loader: MakeLoader, on_signal: Any, calls: list[str], payload_path: Path
) -> None:
    loader = make_loader()
    handles(loader, payload_path)
    on_signal(lambda: [getattr(loader, call)() for call in calls])
    signal.raise_signal(signal.SIGUSR1)
    assert loader.state == (State.ABORTED if calls[0] == "abort" else State.CLOSED)
    loader.close()
    assert not loader._service.is_serving


@pytest.mark.parametrize("act", ["abort", "close"])
def test_a_signal_handler_ends_a_loader_that_is_being_closed(
    make_scripted: MakeScripted, on_signal: Any, payload_path: Path, act: str
) -> None:
    """The handler runs inside the main thread's own close()."""
    loader, reader = make_scripted(DATA, gate=CLOSED_GATE)
    _, source, destination = handles(loader, payload_path)
    ticket = Compiled.post(loader.queue, source.handle, destination.handle, 0, 10, 0)
    ran = []

    def handler() -> None:
        ran.append(loader.state)
        loader.abort()
        open_gate(reader)
        getattr(loader, act)()

    on_signal(handler)

    def interrupt() -> None:
        until(lambda: loader.state == State.CLOSING)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    interrupting = InThread(interrupt)
    loader.close()
    interrupting.result()
    assert ran == [State.CLOSING]
    assert Compiled.wait(loader.queue, ticket) in (Status.ABORTED, Status.OK)
    assert not loader._service.is_serving
    assert not source.is_open


@pytest.mark.parametrize("what", ["source", "destination"])
def test_a_signal_handler_closes_the_loader_while_an_entry_is_being_closed(
    make_scripted: MakeScripted, on_signal: Any, payload_path: Path, what: str
) -> None:
    loader, reader = make_scripted(DATA, gate=CLOSED_GATE)
    _, source, destination = handles(loader, payload_path)
    Compiled.post(loader.queue, source.handle, destination.handle, 0, 10, 0)
    until(lambda: reader.words[readers.SUBMITTED] == 1)

    def handler() -> None:
        open_gate(reader)
        loader.close()

    on_signal(handler)
    table = loader._service.sources if what == "source" else loader._service.destinations
    entry = source if what == "source" else destination

    def interrupt() -> None:
        until(lambda: table.word(entry.handle, tables.HANDLE) == 0)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    interrupting = InThread(interrupt)
    (source.close if what == "source" else destination.unregister)()
    interrupting.result()
    assert not source.is_open or what == "destination"
    assert loader.state == State.CLOSED


class Interrupted(Exception):
    pass


# Not run: the poller goes on in memory that was given back, and may end the whole test session.
@pytest.mark.parametrize("what", ["source", "loader"])
def test_an_interrupted_close_does_not_take_a_running_poller_for_a_dead_one(
    make_scripted: MakeScripted, on_signal: Any, payload_path: Path, what: str
) -> None:
    """Ctrl-C in close(): what the poller uses must not be freed, and close() can be done again.

    An exception in Thread.join lets CPython 3.11 believe that a running thread has ended.
    """
    loader, reader = make_scripted(DATA, gate=CLOSED_GATE)
    _, source, destination = handles(loader, payload_path)
    ticket = Compiled.post(loader.queue, source.handle, destination.handle, 0, 10, 0)
    until(lambda: reader.words[readers.SUBMITTED] == 1)

    def handler() -> None:
        raise Interrupted

    on_signal(handler)

    def has_begun() -> bool:
        if what == "loader":
            return loader.state == State.CLOSING
        return loader._service.sources.word(source.handle, tables.HANDLE) == 0

    def interrupt() -> None:
        until(has_begun)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]

    interrupting = InThread(interrupt)
    with pytest.raises(Interrupted):
        (loader.close if what == "loader" else source.close)()
    interrupting.result()
    # The read is still in flight.
    assert source.is_open
    assert loader._service.is_serving
    assert loader._service._memory
    open_gate(reader)
    (loader.close if what == "loader" else source.close)()
    assert not source.is_open
    loader.close()
    assert not loader._service.is_serving
    assert Compiled.wait(loader.queue, ticket) == Status.OK


# --- entries in use ----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["source", "destination"])
def test_an_entry_in_use_is_closed_when_its_requests_are_over(
    make_scripted: MakeScripted, payload_path: Path, what: str
) -> None:
    loader, reader = make_scripted(DATA, gate=CLOSED_GATE)
    array, source, destination = handles(loader, payload_path)
    q, s, d = loader.queue, source.handle, destination.handle
    ticket = Compiled.post(q, s, d, 0, 10_000, 0)
    until(lambda: reader.words[readers.SUBMITTED] == 3)
    closing = InThread(source.close if what == "source" else destination.unregister)
    table = loader._service.sources if what == "source" else loader._service.destinations
    handle = s if what == "source" else d
    until(lambda: table.word(handle, tables.HANDLE) == 0)
    # New requests are refused, the admitted one is not over, and the entry is not given back.
    refused = Status.BAD_SOURCE if what == "source" else Status.BAD_DESTINATION
    assert Compiled.pull(q, s, d, 0, 10, 0) == refused
    assert table.in_flight(handle) == 1
    assert closing.is_running
    reopened = loader.open(payload_path) if what == "source" else loader.register(np.zeros(3))
    assert reopened.handle & 0xFFFFFFFF != handle & 0xFFFFFFFF
    open_gate(reader)
    closing.result()
    assert Compiled.wait(q, ticket) == Status.OK
    np.testing.assert_array_equal(array, DATA[:10_000])


def test_an_entry_is_closed_at_once_on_an_idle_or_dead_loader(
    make_loader: MakeLoader, make_scripted: MakeScripted, payload_path: Path
) -> None:
    idle = make_loader()
    _, source, destination = handles(idle, payload_path)
    source.close()
    destination.unregister()
    dead, _ = make_scripted(DATA, [(readers.RAISE, 0)])
    _, source, destination = handles(dead, payload_path)
    Compiled.pull(dead.queue, source.handle, destination.handle, 0, 10, 0)
    until(lambda: not dead._service.is_serving)
    source.close()
    destination.unregister()

"""The life of a loader: closing, aborting, dying, being forgotten, being forked."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS, until
from kernels import Compiled, pull_until_refused

import gpuq
from gpuq.errors import ReaderUnavailableError
from gpuq.host import service, tables
from gpuq.layout import STATE, State, Status
from gpuq.testing import copiers, readers

DATA = np.random.default_rng(11).integers(0, 256, 50_000, dtype=np.uint8)
CLOSED_GATE = 1
MakeLoader = Callable[..., gpuq.Loader]
MakeScripted = Callable[..., tuple[gpuq.Loader, readers.ScriptedReader]]


def open_gate(reader: readers.ScriptedReader) -> None:
    reader.words[readers.GATE] = 0


def handles(loader: gpuq.Loader, path: Path, nbytes: int = 10_000) -> tuple[Any, Any, Any]:
    """Return (array, source, destination) of a new source and destination."""
    array = np.zeros(nbytes, dtype=np.uint8)
    return array, loader.open(path), loader.register(array)


class InThread:
    """A call in a second thread; `result` waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome.append(call())
        except BaseException as error:
            self._outcome.append(error)

    @property
    def is_running(self) -> bool:
        return self.thread.is_alive()

    def result(self) -> Any:
        self.thread.join(WAIT_SECONDS)
        assert self._outcome, "the call has not returned"
        if isinstance(self._outcome[0], BaseException):
            raise self._outcome[0]
        return self._outcome[0]


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


# --- a poller that dies ------------------------------------------------------------------------


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


# --- forgotten ---------------------------------------------------------------------------------


def poller_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpuq")]


def test_a_collected_loader_stops_its_threads_and_closes_its_files(
    reader: str, payload_path: Path
) -> None:
    gc.collect()
    threads, descriptors = len(poller_threads()), len(os.listdir("/proc/self/fd"))
    loader = gpuq.Loader(
        target="cpu", reader=reader, slots=4, staging_buffers=2, staging_bytes=4096
    )
    array, source, destination = handles(loader, payload_path)
    alive = weakref.ref(array)
    assert Compiled.pull(loader.queue, source.handle, destination.handle, 0, 10, 0) == Status.OK
    assert len(poller_threads()) > threads
    del array, source, destination
    del loader
    gc.collect()
    assert len(poller_threads()) == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert alive() is None


def test_a_collected_loader_releases_kernels_that_still_hold_its_queue(
    make_scripted: MakeScripted, payload_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_STUCK_SECONDS", WAIT_SECONDS)
    reader = readers.make_scripted_reader(DATA)
    reader.words[readers.GATE] = CLOSED_GATE
    make_scripted(DATA)  # leaves its choice in place
    choice = service.ReaderChoice("scripted", "a test", reader)
    monkeypatch.setattr(service, "choose_reader", lambda config: choice)
    loader = gpuq.Loader(target="cpu", slots=4, staging_buffers=2, staging_bytes=4096)
    _, source, destination = handles(loader, payload_path)
    q, s, d = loader.queue, source.handle, destination.handle
    waiting = InThread(lambda: Compiled.pull(q, s, d, 0, 10, 0))
    until(lambda: reader.words[readers.SUBMITTED] == 1)
    opening = InThread(lambda: (waiting.result(), open_gate(reader)))
    del loader, source, destination
    gc.collect()
    assert waiting.result() == Status.ABORTED
    opening.result()


def test_an_array_is_kept_while_a_copy_to_it_may_still_be_under_way(
    make_scripted: MakeScripted, payload_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A loader is forgotten, and its copy does not end within the time that is waited for it.
    monkeypatch.setattr(service, "_STUCK_SECONDS", 0.05)
    make_scripted(DATA, copies=[copiers.LATE])  # leaves its reader and copier in place
    loader = gpuq.Loader(target="cpu", slots=4, staging_buffers=2, staging_bytes=4096)
    array, source, destination = handles(loader, payload_path)
    copier = loader._service.poller.copier
    thread = loader._service._thread
    q, s, d = loader.queue, source.handle, destination.handle
    Compiled.post(q, s, d, 0, 10, 0)
    until(lambda: copier.words[copiers.STARTED] == 1)
    alive = weakref.ref(array)
    del array, source, destination, loader
    gc.collect()
    assert alive() is not None
    copier.ends[:] = 1
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def run_script(text: str, *arguments: object, timeout: float = WAIT_SECONDS) -> Any:
    """Run a program of its own, with the tests' helpers importable."""
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        env=environment, timeout=timeout, capture_output=True, text=True, check=False,
    )  # fmt: skip


BEGIN = """
    import sys, threading
    import numpy as np
    import gpuq
    from kernels import Compiled
    loader = gpuq.Loader(target="cpu", reader=sys.argv[2], slots=4)
    source = loader.open(sys.argv[1])
    array = np.zeros(10_000, np.uint8)
    destination = loader.register(array)
    q, s, d = loader.queue, source.handle, destination.handle
    assert Compiled.pull(q, s, d, 0, 10_000, 0) == gpuq.Status.OK
    print("served", flush=True)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("del loader", 0),
        ("sys.exit(3)", 3),
        ("raise KeyError('mine')", 1),
        ("loader.abort()", 0),
        ("keep = [loader, loader.queue]; gpuq.keep = keep", 0),
        ("cycle = [loader]; cycle.append(cycle); del loader, cycle", 0),
        # A daemon thread of the user's own waits in a kernel for a slot that never comes free.
        (
            "[Compiled.post(q, s, d, 0, 10, 0) for _ in range(4)];"
            "threading.Thread(target=Compiled.post, args=(q, s, d, 0, 10, 0), daemon=True).start()",
            0,
        ),
        # One that is no daemon has its answer before the interpreter, which waits for it, ends.
        (
            "t = threading.Thread(target=Compiled.pull, args=(q, s, d, 0, 10, 0)); t.start()",
            0,
        ),
    ],
)
def test_the_interpreter_ends_without_close(payload_path: Path, end: str, code: int) -> None:
    # The threads reader has worker threads of its own to leave behind.
    done = run_script(textwrap.dedent(BEGIN) + end, payload_path, "threads" if not end else "auto")
    assert done.stdout == "served\n"
    assert done.returncode == code, done.stderr
    if code == 0:
        assert done.stderr == ""
    elif code == 1:
        assert "KeyError: 'mine'" in done.stderr


def test_the_interpreter_ends_although_a_read_never_comes_back(payload_path: Path) -> None:
    done = run_script(
        """
        import sys
        import numpy as np
        import gpuq
        from gpuq.host import service
        from gpuq.host.device import CpuDevice
        from gpuq.testing import copiers, readers
        from kernels import Compiled
        service._STUCK_SECONDS = 0.05
        reader = readers.make_scripted_reader(np.zeros(100, np.uint8))
        reader.words[readers.GATE] = 1
        choice = service.ReaderChoice("scripted", "a test", reader)
        service.choose_reader = lambda config: choice
        CpuDevice.copier = lambda self, leases: copiers.make_scripted_copier(leases)
        loader = gpuq.Loader(target="cpu", slots=4)
        source = loader.open(sys.argv[1])
        destination = loader.register(np.zeros(100, np.uint8))
        Compiled.post(loader.queue, source.handle, destination.handle, 0, 10, 0)
        while reader.words[readers.SUBMITTED] == 0:
            pass
        """,
        payload_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- forked ------------------------------------------------------------------------------------


def in_fork(body: Callable[[], None]) -> int:
    """Run `body` in a forked child; return 0, or 1 where it raised."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_told_and_the_parent_goes_on(
    reader: str, make_loader: MakeLoader, payload_path: Path, payload: Any
) -> None:
    loader = make_loader(reader=reader)
    array, source, destination = handles(loader, payload_path)

    def child() -> None:
        for call in (
            loader.check,
            lambda: loader.open(payload_path),
            lambda: loader.register(np.zeros(3)),
            lambda: loader.empty(3),
        ):
            with pytest.raises(gpuq.ForkedError, match="make one in the forked process"):
                call()
        # Ending what is not its own changes nothing for the parent, whose queue is shared memory.
        loader.abort()
        source.close()
        destination.unregister()
        loader.close()
        loader._finalizer()

    assert in_fork(child) == 0
    assert loader.state == State.RUNNING
    q, s, d = loader.queue, source.handle, destination.handle
    assert Compiled.pull(q, s, d, 5, 10_005, 0) == Status.OK
    np.testing.assert_array_equal(array, payload[5:10_005])


def test_a_forked_child_may_make_its_own_loader(
    reader: str, make_loader: MakeLoader, payload_path: Path, payload: Any
) -> None:
    make_loader(reader=reader)

    def child() -> None:
        with gpuq.Loader(target="cpu", reader=reader, slots=4) as own:
            array, source, destination = handles(own, payload_path)
            q, s, d = own.queue, source.handle, destination.handle
            assert Compiled.pull(q, s, d, 5, 10_005, 0) == Status.OK
            np.testing.assert_array_equal(array, payload[5:10_005])

    assert in_fork(child) == 0


# --- leaks -------------------------------------------------------------------------------------


def test_fifty_loaders_leave_no_descriptor_and_no_thread(reader: str, payload_path: Path) -> None:
    def cycle() -> None:
        with gpuq.Loader(
            target="cpu", reader=reader, slots=4, staging_buffers=2, staging_bytes=4096,
            reader_threads=2,
        ) as loader:  # fmt: skip
            _, source, destination = handles(loader, payload_path)
            q, s, d = loader.queue, source.handle, destination.handle
            assert Compiled.pull(q, s, d, 0, 9000, 0) == Status.OK

    cycle()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count(), mappings()
    for _ in range(50):
        cycle()
    gc.collect()
    after = len(os.listdir("/proc/self/fd")), threading.active_count(), mappings()
    assert after[:2] == before[:2]
    # Threads' stacks are cached by libc, and the allocator keeps some; 50 leaks would show.
    assert after[2] < before[2] + 50


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_a_closed_loader_that_is_still_held_has_no_descriptor(
    reader: str, payload_path: Path, request: pytest.FixtureRequest
) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    loader = gpuq.Loader(
        target="cpu", reader=reader, slots=4, staging_buffers=2, staging_bytes=4096
    )
    loader.open(payload_path)
    loader.close()
    assert len(os.listdir("/proc/self/fd")) == before


# --- the choice of a reader --------------------------------------------------------------------


def refuse_set_up(monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(reads: int) -> None:
        raise ReaderUnavailableError(errno.EPERM, "io_uring is refused with EPERM: a test")

    monkeypatch.setattr(service, "make_uring_reader", refuse)
    return "refused with EPERM: a test"


def refuse_the_trial_read(monkeypatch: pytest.MonkeyPatch) -> str:
    if os.environ.get("GPUQ_READER") == "threads":
        pytest.skip("GPUQ_READER says threads")
    monkeypatch.setattr(service, "probe_reader", lambda reader: errno.EIO)
    return "a read with it failed"


@pytest.mark.parametrize("refuse", [refuse_set_up, refuse_the_trial_read])
def test_auto_falls_back_to_threads_and_says_why(
    make_loader: MakeLoader, payload_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Any
) -> None:
    reason = refuse(monkeypatch)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(gpuq.ReaderUnavailableError, match=reason):
        gpuq.Loader(target="cpu", reader="io_uring")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    loader = make_loader(reader="auto")
    array, source, destination = handles(loader, payload_path)
    explanation = loader.explain(source)
    assert explanation.reader == "threads"
    assert reason in explanation.reader_reason
    q, s, d = loader.queue, source.handle, destination.handle
    assert Compiled.pull(q, s, d, 0, 10_000, 0) == Status.OK
    assert array.any()


def test_a_loader_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for reader in ("auto", "threads"):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                gpuq.Loader(target="cpu", reader=reader, slots=4)
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before

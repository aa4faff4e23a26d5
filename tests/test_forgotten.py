"""Loaders that nobody closes, are forked, or cannot start, and what none may leave behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS, until
from kernels import Compiled
from lives import (
    CLOSED_GATE,
    DATA,
    InThread,
    MakeLoader,
    MakeScripted,
    handles,
    open_gate,
    run_script,
)

import gpuq
from gpuq.errors import ReaderUnavailableError
from gpuq.host import choice as choice_of_reader
from gpuq.host import service
from gpuq.host.choice import ReaderChoice
from gpuq.layout import State, Status
from gpuq.testing import copiers, readers

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
    until(lambda: len(poller_threads()) == threads, "its threads are gone")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert alive() is None


def test_a_collected_loader_releases_kernels_that_still_hold_its_queue(
    make_scripted: MakeScripted, payload_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STUCK_SECONDS", WAIT_SECONDS)
    reader = readers.make_scripted_reader(DATA)
    reader.words[readers.GATE] = CLOSED_GATE
    make_scripted(DATA)  # leaves its choice in place
    choice = ReaderChoice("scripted", "a test", reader)
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
    monkeypatch.setattr(service, "STUCK_SECONDS", 0.05)
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
        from gpuq.host.choice import ReaderChoice
        from gpuq.host.device import CpuDevice
        from gpuq.testing import copiers, readers
        from kernels import Compiled
        service.STUCK_SECONDS = 0.05
        reader = readers.make_scripted_reader(np.zeros(100, np.uint8))
        reader.words[readers.GATE] = 1
        choice = ReaderChoice("scripted", "a test", reader)
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
        # Ending what is not its own changes nothing for the parent.
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


def test_a_lock_that_another_thread_held_at_a_fork_does_not_hold_the_child(
    make_loader: MakeLoader, payload_path: Path
) -> None:
    loader = make_loader()
    _, source, destination = handles(loader, payload_path)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with loader._service.lock:
            held.set()
            over.wait(WAIT_SECONDS)

    holding = InThread(hold)
    held.wait(WAIT_SECONDS)

    def child() -> None:
        signal.alarm(20)  # instead of a wait for ever
        source.close()
        destination.unregister()
        loader._finalizer()

    try:
        assert in_fork(child) == 0
    finally:
        over.set()
        holding.result()


def test_a_kernel_in_a_forked_child_does_not_wait_for_an_answer_that_cannot_come(
    make_loader: MakeLoader, payload_path: Path
) -> None:
    loader = make_loader()
    _, source, destination = handles(loader, payload_path)
    q, s, d = loader.queue, source.handle, destination.handle
    assert Compiled.pull(q, s, d, 0, 10, 0) == Status.OK
    assert Compiled.wait_for(q, 0, 0) == Status.STALE  # compiled by now

    def child() -> None:
        ticket = Compiled.post(q, s, d, 0, 10, 0)
        assert Compiled.wait_for(q, ticket, 200_000_000) == Status.ABORTED

    assert in_fork(child) == 0


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
    until(lambda: threading.active_count() == before[1], "all threads are gone")
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
    def refuse(reads: int, setup: int) -> None:
        raise ReaderUnavailableError(errno.EPERM, "io_uring is refused with EPERM: a test")

    monkeypatch.setattr(choice_of_reader, "make_uring_reader", refuse)
    return "refused with EPERM: a test"


def refuse_the_trial_read(monkeypatch: pytest.MonkeyPatch) -> str:
    if os.environ.get("GPUQ_READER") == "threads":
        pytest.skip("GPUQ_READER says threads")
    monkeypatch.setattr(choice_of_reader, "probe_reader", lambda reader: errno.EIO)
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
    until(lambda: threading.active_count() == before[1], "all threads are gone")
    assert len(os.listdir("/proc/self/fd")) == before[0]

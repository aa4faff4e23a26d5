"""Faults of a file system, produced on order by one of the tests' own; see `fuse_faults`.

The gates are in the server: a read that is held there is really held in the kernel. Whatever a
test waits for has a bound, and the server's gates are opened before a loader is closed.
"""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import system
from asking import Asker
from conftest import READERS, WAIT_SECONDS, Mode, note_path, skip_where_refused, until
from fuse_faults import FaultyFiles, content, serve_faulty_files
from kernels import Compiled
from lives import InThread

import gpuq
from gpuq.host import service, tables
from gpuq.layout import HEARTBEAT, Status
from gpuq.ordering import load_acquire

SIZE = 50_003
BUFFER = 8192
DATA = content(0, SIZE)
DIRECT = ("auto", "off")


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyFiles]:
    with serve_faulty_files(tmp_path_factory.mktemp("fuse") / "files") as files:
        with system.noted_try(request.config, "FUSE"):
            if isinstance(files, str):
                pytest.skip(files)
        yield files


@pytest.fixture
def files(served: FaultyFiles, make_loader: Any) -> FaultyFiles:
    """The server, whose gates are opened before the test's loaders are closed."""
    make_loader.before_close.append(served.open_all_gates)
    return served


@pytest.fixture(params=[(reader, direct) for reader in READERS for direct in DIRECT], ids="-".join)
def asker(request: pytest.FixtureRequest, make_loader: Callable[..., gpuq.Loader]) -> Asker:
    """Each reader, direct as the file system offers it and buffered."""
    reader, direct = request.param
    skip_where_refused(Mode(reader, "off"))
    given = {"reader": reader, "direct": direct, "reader_threads": 6, "staging_bytes": BUFFER}
    return Asker(make_loader(**given), 2 * SIZE)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for a file of this test alone."""
    return request.node.name.replace("/", "-")  # type: ignore[no-any-return]


def assert_served(asker: Asker, files: FaultyFiles) -> None:
    """Assert that a file without a fault is read by this loader, meanwhile."""
    with asker.loader.open(files.add("honest", SIZE)) as source:
        assert asker.pull(source, [(11, SIZE, SIZE)]) == [Status.OK]
    asker.assert_holds([(11, SIZE, SIZE)], DATA)


# --- right bytes ---


def test_a_file_without_a_fault(asker: Asker, files: FaultyFiles, name: str) -> None:
    with asker.loader.open(files.add(name, SIZE)) as source:
        rows = [(0, SIZE, 0), (4095, 4097, SIZE), (SIZE - 1, SIZE, SIZE + 2), (7, 7, 0)]
        assert asker.pull(source, rows) == [Status.OK] * 4
        asker.assert_holds(rows, DATA)
        beyond = [(0, SIZE + 1, 0), (SIZE - 1, SIZE + 1, 0), (SIZE, SIZE + 1, 0)]
        assert asker.pull(source, beyond) == [Status.END_OF_FILE] * 3
        assert asker.taken() == {}
        note_path(asker.loader, source)


def test_direct_reads_that_are_refused_at_open(asker: Asker, files: FaultyFiles, name: str) -> None:
    with asker.loader.open(files.add(name, SIZE, refuses_direct=True)) as source:
        assert not asker.loader.explain(source).direct
        assert asker.pull(source, [(1, SIZE, 0)]) == [Status.OK]
        asker.assert_holds([(1, SIZE, 0)], DATA)


@pytest.mark.parametrize("most", [5000, 4096, 1000, 1])
def test_short_reads_end_in_right_bytes(
    asker: Asker, files: FaultyFiles, name: str, most: int
) -> None:
    size = 20_003 if most > 1 else 300
    with asker.loader.open(files.add(name, size, most=most)) as source:
        rows = [(0, size, 0), (1, size - 1, size), (size - 5, size, 2 * size)]
        assert asker.pull(source, rows) == [Status.OK] * 3
        asker.assert_holds(rows, DATA)
        assert asker.pull(source, [(size - 1, size + 1, 0)]) == [Status.END_OF_FILE]
        assert asker.taken() == {}
    statistics = asker.loader.statistics()
    assert statistics.short_reads > statistics.retries > 0


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN], ids=["EINTR", "EAGAIN"])
def test_an_interrupted_read_is_done_again(
    asker: Asker, files: FaultyFiles, name: str, number: int
) -> None:
    with asker.loader.open(files.add(name, SIZE, number=number, at=30_000, times=3)) as source:
        assert asker.pull(source, [(1, SIZE, 0)]) == [Status.OK]
    asker.assert_holds([(1, SIZE, 0)], DATA)
    reads = [at for at, nbytes in files.seen(name)["reads"] if at <= 30_000 < at + nbytes]
    assert len(reads) == 4
    statistics = asker.loader.statistics()
    # io_uring itself does a read again that got EAGAIN.
    by_kernel = statistics.reader == "io_uring" and number == errno.EAGAIN
    assert statistics.retries == 3 or (by_kernel and statistics.retries < 3)
    assert statistics.short_reads == 0
    assert "READ_FAILED" not in statistics.requests


# --- right statuses ---


def test_an_error_fails_its_own_request_only(asker: Asker, files: FaultyFiles, name: str) -> None:
    bad = 3 * BUFFER + 100
    with asker.loader.open(files.add(name, SIZE, number=errno.EIO, at=bad)) as source:
        rows = [
            (10, 100, 0),
            (bad, bad + 1, 200),  # one piece, the bad byte alone
            (bad - 2000, bad + 50, 300),  # one piece
            (bad + BUFFER, bad + 2 * BUFFER, 4000),
            (SIZE - 3, SIZE, 30_000),
        ]
        tickets = [asker.post(source, *row) for row in rows]
        answers = [asker.answer(ticket) for ticket in tickets]
        ok, failed = (Status.OK, 0), (Status.READ_FAILED, errno.EIO)
        assert answers == [ok, failed, failed, ok, ok]
        asker.assert_holds([rows[0], rows[3], rows[4]], DATA)
        assert asker.loader.statistics().last_errno == errno.EIO
    assert_served(asker, files)


def test_no_byte_of_a_failing_piece_is_copied(asker: Asker, files: FaultyFiles, name: str) -> None:
    with asker.loader.open(files.add(name, SIZE, number=errno.EIO, at=3 * BUFFER + 100)) as source:
        assert asker.answer(asker.post(source, 0, SIZE)) == (Status.READ_FAILED, errno.EIO)
        for at, nbytes in asker.taken().items():
            assert at + nbytes <= 3 * BUFFER or at >= 4 * BUFFER
    assert_served(asker, files)


@pytest.mark.parametrize("real", [0, 100, 4096, 3 * BUFFER + 5])
def test_a_file_that_shrinks_under_a_read(
    asker: Asker, files: FaultyFiles, name: str, real: int
) -> None:
    """The size is still the old one when reads find the end."""
    with asker.loader.open(files.add(name, SIZE, real=real)) as source:
        assert asker.pull(source, [(real, real + 9, 0)]) == [Status.END_OF_FILE]
        assert asker.pull(source, [(max(real - 9, 0), real + 9, 0)]) == [Status.END_OF_FILE]
        assert asker.taken() == {}
        assert asker.pull(source, [(0, SIZE, 0)]) == [Status.END_OF_FILE]
        for at, nbytes in asker.taken().items():
            assert at + nbytes <= real
        if real:
            assert asker.pull(source, [(0, real, 0)]) == [Status.OK]
            asker.assert_holds([(0, real, 0)], DATA)
    assert_served(asker, files)


def test_a_server_that_dies_under_a_read(
    asker: Asker, tmp_path: Path, payload_path: Path, payload: Any
) -> None:
    with serve_faulty_files(tmp_path / "files") as dying:
        if isinstance(dying, str):
            pytest.skip(dying)
        source = asker.loader.open(dying.add("gated", SIZE))
        dying.gate("gated", of="reads", closed=True)
        ticket = asker.post(source, 0, 100)
        until(lambda: dying.seen("gated")["held"])
        dying.kill()
        status, number = asker.answer(ticket)
        assert status == Status.READ_FAILED
        assert number in (errno.ECONNABORTED, errno.ENOTCONN)
        assert asker.answer(asker.post(source, 0, 100)) == (Status.READ_FAILED, errno.ENOTCONN)
        assert asker.taken() == {}
        with asker.loader.open(payload_path) as other:
            assert asker.pull(other, [(3, 90_000, 0)]) == [Status.OK]
        asker.assert_holds([(3, 90_000, 0)], payload.tobytes())
        source.close()


# --- a read that takes its time ---


def hold(files: FaultyFiles, asker: Asker, name: str) -> tuple[gpuq.Source, int]:
    """Post a read and see it held in the server; return the source and the ticket."""
    source = asker.loader.open(files.place / name)
    files.gate(name, of="reads", closed=True)
    ticket = asker.post(source, 0, 100)
    until(lambda: files.seen(name)["held"] == ["reads"], "the read to be held")
    return source, ticket


@pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
def test_a_read_that_hangs_holds_up_no_other(
    asker: Asker, files: FaultyFiles, name: str, payload_path: Path, payload: Any, cached: bool
) -> None:
    files.add(name, SIZE, cached=cached)
    source, ticket = hold(files, asker, name)
    with asker.loader.open(payload_path) as other:
        rows = [(3, 90_000, 5), (1, 2, 0)] * 3
        assert asker.pull(other, rows, depth=2) == [Status.OK] * 6
    asker.assert_holds(rows, payload.tobytes())
    assert_served(asker, files)
    assert not asker.is_answered(ticket)
    files.gate(name, of="reads", closed=False)
    assert asker.answer(ticket) == (Status.OK, 0)
    asker.assert_holds([(0, 100, 0)], DATA)
    source.close()


@pytest.mark.parametrize("in_background", [0, 2])
def test_a_file_system_that_takes_no_more_reads_holds_up_no_other(
    asker: Asker,
    make_loader: Any,
    tmp_path: Path,
    payload_path: Path,
    payload: Any,
    in_background: int,
) -> None:
    """One read hangs where the kernel waits for each; three do where it sends two at once."""
    with serve_faulty_files(tmp_path / "files", in_background=in_background) as busy:
        if isinstance(busy, str):
            pytest.skip(busy)
        make_loader.before_close.append(busy.open_all_gates)
        source = asker.loader.open(busy.add("busy", SIZE))
        busy.gate("busy", of="reads", closed=True)
        rows = [(9000 * n, 9000 * n + 100, 200 * n) for n in range(in_background + 1)]
        tickets = [asker.post(source, *row) for row in rows]
        until(lambda: len(busy.seen("busy")["held"]) >= max(in_background, 1), "reads to be held")
        with asker.loader.open(payload_path) as other:
            assert asker.pull(other, [(3, 1000, 5000)]) == [Status.OK]
        asker.assert_holds([(3, 1000, 5000)], payload.tobytes())
        busy.gate("busy", of="reads", closed=False)
        assert [asker.answer(ticket)[0] for ticket in tickets] == [Status.OK] * len(rows)
        asker.assert_holds(rows, DATA)
        source.close()


def test_a_size_that_hangs_holds_up_no_other(
    asker: Asker, files: FaultyFiles, name: str, payload_path: Path, payload: Any
) -> None:
    """The size is asked for before a request of many pieces is read."""
    source = asker.loader.open(files.add(name, SIZE))
    files.gate(name, of="sizes", closed=True)
    ticket = asker.post(source, 0, SIZE)
    with asker.loader.open(payload_path) as other:
        assert asker.pull(other, [(3, 1000, SIZE)]) == [Status.OK]
    files.gate(name, of="sizes", closed=False)
    assert asker.answer(ticket) == (Status.OK, 0)
    source.close()


def test_abort_releases_a_kernel_at_once_and_close_waits_for_the_read(
    asker: Asker, files: FaultyFiles, name: str
) -> None:
    files.add(name, SIZE)
    _, ticket = hold(files, asker, name)
    loader, log = asker.loader, []

    def wait() -> None:
        log.append(Status(Compiled.wait(loader.queue, ticket)))

    def close() -> None:
        loader.close()
        log.append("closed")

    waiter, closer = threading.Thread(target=wait), threading.Thread(target=close)
    waiter.start()
    loader.abort()
    waiter.join(WAIT_SECONDS)
    assert log == [Status.ABORTED]
    closer.start()
    begun = passes(loader)
    until(lambda: passes(loader) > begun + 100, "the poller to go on")
    assert closer.is_alive()
    log.append("opened")
    files.gate(name, of="reads", closed=False)
    closer.join(WAIT_SECONDS)
    assert log == [Status.ABORTED, "opened", "closed"]
    assert asker.taken() == {}


def passes(loader: gpuq.Loader) -> int:
    return int(load_acquire(loader.queue.control, HEARTBEAT))


LEFT_OPEN = """
import gpuq, numpy as np
from gpuq.host import service
from kernels import Compiled
service.STUCK_SECONDS = 0.2
loader = gpuq.Loader(
    target="cpu", reader=sys.argv[1], staging_buffers=4, staging_bytes=4096,
    straight_bytes=int(sys.argv[3]),
)
array = np.zeros(100, np.uint8)
source, destination = loader.open(sys.argv[2], direct="off"), loader.register(array)
Compiled.post(loader.queue, source.handle, destination.handle, 0, 100, 0)
print("posted", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("straight_bytes", ["0", "1"])
def test_the_interpreter_ends_while_a_read_hangs(
    files: FaultyFiles, name: str, reader: str, straight_bytes: str
) -> None:
    skip_where_refused(Mode(reader, "off"))
    path = files.add(name, SIZE)
    files.gate(name, of="reads", closed=True)
    prelude = f"import sys; sys.path.insert(0, {system.TESTS!r})\n"
    process = subprocess.Popen(
        [sys.executable, "-c", prelude + LEFT_OPEN, reader, str(path), straight_bytes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "posted\n"
        until(lambda: files.seen(name)["held"], "the read to be held")
        process.communicate("go\n", timeout=WAIT_SECONDS)
        assert process.returncode == 0
        # The gate is closed still; the kernel takes back a read that a thread waits in.
        assert len(files.seen(name)["held"]) + files.seen(name)["interrupts"] == 1
    finally:
        files.open_all_gates()
        process.kill()
        process.wait(WAIT_SECONDS)


# --- reads that go straight to the destination ---


@pytest.fixture(params=READERS)
def straight(request: pytest.FixtureRequest, make_loader: Callable[..., gpuq.Loader]) -> Asker:
    """Each reader, all of whose reads go straight; of this file system only buffered ones do."""
    skip_where_refused(Mode(request.param, "off"))
    given = {"reader": request.param, "direct": "off", "reader_threads": 6}
    return Asker(make_loader(**given, staging_bytes=BUFFER, straight_bytes=1), 2 * SIZE)


def assert_all_went_straight(loader: gpuq.Loader) -> None:
    statistics = loader.statistics()
    assert statistics.straight == statistics.bytes > 0


@pytest.mark.parametrize("most", [5000, 1000])
def test_short_reads_that_go_straight(
    straight: Asker, files: FaultyFiles, name: str, most: int
) -> None:
    rows = [(0, SIZE, 0), (1, 100, SIZE), (SIZE - 5, SIZE, SIZE + 200)]
    with straight.loader.open(files.add(name, SIZE, most=most)) as source:
        assert straight.pull(source, rows) == [Status.OK] * 3
        straight.assert_holds(rows, DATA)
    assert_all_went_straight(straight.loader)


@pytest.mark.parametrize("real", [0, 100, 3 * BUFFER + 5])
def test_a_file_that_shrinks_under_reads_that_go_straight(
    straight: Asker, files: FaultyFiles, name: str, real: int
) -> None:
    with straight.loader.open(files.add(name, SIZE, real=real)) as source:
        assert straight.pull(source, [(3, SIZE, 1000)]) == [Status.END_OF_FILE]
        for at, nbytes in straight.taken().items():
            assert at >= 1000
            assert at + nbytes <= 1000 + real - 3
        if real:
            assert straight.pull(source, [(0, real, 7)]) == [Status.OK]
            straight.assert_holds([(0, real, 7)], DATA)


def test_an_error_under_a_read_that_goes_straight(
    straight: Asker, files: FaultyFiles, name: str
) -> None:
    bad = 3 * BUFFER + 100
    with straight.loader.open(files.add(name, SIZE, number=errno.EIO, at=bad)) as source:
        assert straight.answer(straight.post(source, 0, SIZE)) == (Status.READ_FAILED, errno.EIO)
        for at, nbytes in straight.taken().items():
            assert at + nbytes <= 3 * BUFFER or at >= 4 * BUFFER
        rows = [(0, bad, 0), (bad + 1, SIZE, bad + 1)]
        assert straight.pull(source, rows) == [Status.OK] * 2
        straight.assert_holds(rows, DATA)
    assert_all_went_straight(straight.loader)


def test_a_size_that_hangs_is_not_asked_for_one_piece_past_the_end(
    straight: Asker, files: FaultyFiles, name: str, payload_path: Path, payload: Any
) -> None:
    # It was, since the piece might go straight, and every other request waited for the answer.
    source = straight.loader.open(files.add(name, 50))
    files.gate(name, of="sizes", closed=True)
    files.gate(name, of="reads", closed=True)
    ticket = straight.post(source, 0, 100)
    with straight.loader.open(payload_path) as other:
        assert straight.pull(other, [(3, 1000, SIZE)]) == [Status.OK]
    straight.assert_holds([(3, 1000, SIZE)], payload.tobytes())
    files.open_all_gates()
    assert straight.answer(ticket) == (Status.END_OF_FILE, 0)
    assert straight.taken() == {}
    source.close()


def test_an_array_is_unregistered_when_a_read_that_hangs_is_over(
    straight: Asker, files: FaultyFiles, name: str
) -> None:
    loader = straight.loader
    source = loader.open(files.add(name, SIZE))
    array = np.full(BUFFER, 1, np.uint8)
    destination = loader.register(array)
    files.gate(name, of="reads", closed=True)
    handles = source.handle, destination.handle
    ticket = int(Compiled.try_post_at(loader.queue, *handles, 0, 5, 5 + BUFFER, 0))
    until(lambda: files.seen(name)["held"], "the read to be held")
    closing = InThread(lambda: (destination.unregister(), source.close()))
    table = loader._service.destinations
    until(lambda: table.word(destination.handle, tables.HANDLE) == 0)
    assert_served(straight, files)
    begun = passes(loader)
    until(lambda: passes(loader) > begun + 100, "the poller to go on")
    assert closing.is_running
    files.gate(name, of="reads", closed=False)
    closing.result()
    assert straight.answer(ticket) == (Status.OK, 0)
    assert array.tobytes() == DATA[5 : 5 + BUFFER]


def test_an_array_is_kept_when_a_loader_is_forgotten_whose_straight_read_never_ends(
    straight: Asker, files: FaultyFiles, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STUCK_SECONDS", 0.05)
    reader = straight.loader.config.reader
    loader = gpuq.Loader(target="cpu", slots=4, reader=reader, reader_threads=1, straight_bytes=1)
    source = loader.open(files.add(name, SIZE), direct="off")
    array = np.full(BUFFER, 1, np.uint8)
    destination = loader.register(array)
    files.gate(name, of="reads", closed=True)
    Compiled.post(loader.queue, source.handle, destination.handle, 0, BUFFER, 0)
    until(lambda: files.seen(name)["held"], "the read to be held")
    thread, memory = loader._service._thread, weakref.ref(array)
    del loader, source, array, destination
    gc.collect()
    kept = memory()
    assert kept is not None
    assert (kept == 1).all()
    files.gate(name, of="reads", closed=False)
    thread.join(WAIT_SECONDS)
    assert kept.tobytes() == DATA[:BUFFER], "the read was over before the poller was"

"""Life and death, beyond `test_service`: Ctrl-C, ends at every stage, refusals, limits, leaks."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import system
from conftest import WAIT_SECONDS
from kernels import Compiled
from stepping import Stepper

import gpuq
from gpuq.host import choice, records
from gpuq.host.uring_abi import SETUPS
from gpuq.layout import State, Status
from gpuq.testing import copiers, readers

DATA = np.random.default_rng(3).integers(0, 256, 60_000, dtype=np.uint8)
MakeLoader = Callable[..., gpuq.Loader]
MakeScripted = Callable[..., tuple[gpuq.Loader, readers.ScriptedReader]]

# --- Ctrl-C ------------------------------------------------------------------------------------

BEGIN = """
import os, signal, sys, threading, time
import numpy as np
import gpuq
from gpuq.host import service
from gpuq.host.choice import ReaderChoice
from gpuq.host.device import CpuDevice
from gpuq.testing import copiers, readers
from kernels import Compiled
reader = readers.make_scripted_reader(np.zeros(100, np.uint8))
reader.words[readers.GATE] = 1
service.choose_reader = lambda config: ReaderChoice("scripted", "a test", reader)
CpuDevice.copier = lambda self, leases: copiers.make_scripted_copier(leases)
loader = gpuq.Loader(target="cpu", slots=4)
source = loader.open(sys.argv[1])
destination = loader.register(np.zeros(100, np.uint8))
q, s, d = loader.queue, source.handle, destination.handle

def interrupt():
    # The kernel waits once its read was handed over, and waits for ever: the gate is shut.
    while reader.words[readers.SUBMITTED] == 0 or not is_ready.wait(0.0005):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGINT)

is_ready = threading.Event()
threading.Thread(target=interrupt, daemon=True).start()
"""

LAUNCHED = """
def body(index, size, q, s, d, statuses):
    statuses[index] = gpuq.pull(q, s, d, 0, 10, 0)

statuses = np.zeros(1, np.int64)
# Called inside synchronize, on this target for nothing else.
loader._service.device.synchronize = lambda stream: is_ready.set()
loader.launch(body, 1, q, s, d, statuses)
try:
    loader.synchronize()
except KeyboardInterrupt:
    reader.words[readers.GATE] = 0
    loader.close()
    print(gpuq.Status(int(statuses[0])).name, loader.state.name)
"""

DIRECT = """
is_ready.set()
try:
    status = Compiled.pull(q, s, d, 0, 10, 0)
    print("returned", gpuq.Status(int(status)).name)
    for _ in range(1000):
        pass
except KeyboardInterrupt:
    reader.words[readers.GATE] = 0
    loader.close()
    print("interrupted", loader.state.name)
"""


def run_interrupted(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return system.run_python(BEGIN + code, path, timeout=300)


def test_ctrl_c_ends_a_launched_kernel_that_waits(payload_path: Path) -> None:
    done = run_interrupted(LAUNCHED, payload_path)
    assert (done.returncode, done.stdout) == (0, "ABORTED ABORTED\n"), done.stderr


def test_ctrl_c_ends_a_kernel_that_the_main_thread_called_itself(payload_path: Path) -> None:
    """Python's handler cannot run while compiled code does; the service sees the signal."""
    done = run_interrupted(
        "with loader.interruptible():\n" + textwrap.indent(DIRECT, "    "), payload_path
    )
    # The kernel came back with ABORTED, and then Python raised what it could not raise before.
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "interrupted ABORTED", done.stdout


def test_interruptible_leaves_signals_as_they_were(make_loader: MakeLoader) -> None:
    loader = make_loader()
    left, right = os.pipe()
    os.set_blocking(left, False)
    os.set_blocking(right, False)
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    before = signal.set_wakeup_fd(right, warn_on_full_buffer=False)
    try:
        for _ in range(100):
            with loader.interruptible(), loader.interruptible():
                signal.raise_signal(signal.SIGUSR1)
            assert os.read(left, 10) == bytes([signal.SIGUSR1]), "who listened before is told"
        assert signal.set_wakeup_fd(right, warn_on_full_buffer=False) == right
        assert loader.state == State.RUNNING, "by another signal nothing is aborted"
        assert not [t for t in threading.enumerate() if t.name == "gpuq-interrupt"]
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR1, handler)
        os.close(left)
        os.close(right)


def test_interruptible_in_another_thread_does_nothing(make_loader: MakeLoader) -> None:
    loader = make_loader()
    entered = []

    def enter() -> None:
        with loader.interruptible():
            entered.append(True)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert entered == [True]
    assert loader.state == State.RUNNING


# --- a reader that fails in the middle ---------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EBADF])
def test_a_reader_that_fails_in_the_middle_fails_only_what_it_failed(
    make_scripted: MakeScripted, payload_path: Path, number: int
) -> None:
    """Every third read fails; requests have one piece each, in flight together."""
    script = [(readers.FAIL, number) if n % 3 == 1 else (readers.READ, -1) for n in range(12)]
    loader, reader = make_scripted(DATA, script, gate=1, staging_buffers=12)
    array = np.zeros(12_000, dtype=np.uint8)
    source, destination = loader.open(payload_path), loader.register(array)
    q, s, d = loader.queue, source.handle, destination.handle
    tickets = [Compiled.post_at(q, s, d, 1000 * n, 700 * n, 700 * n + 500, 0) for n in range(12)]
    reader.words[readers.GATE] = 0
    errnos = []
    for n, ticket in enumerate(tickets):
        while Compiled.poll(q, ticket) == Status.PENDING:
            pass
        errnos.append(Compiled.errno_of(q, ticket))
        expected = Status.READ_FAILED if n % 3 == 1 else Status.OK
        assert Compiled.wait(q, ticket) == expected
        wanted = DATA[700 * n : 700 * n + 500] * (expected == Status.OK)
        np.testing.assert_array_equal(array[1000 * n : 1000 * n + 500], wanted)
    assert errnos == [number if n % 3 == 1 else 0 for n in range(12)]
    assert Compiled.pull(q, s, d, 5, 505, 0) == Status.OK, "it serves on"
    loader.close()
    assert loader.statistics().outstanding == 0


# --- close and abort at every stage ------------------------------------------------------------

STAGES = range(12)
"""Passes; after the last of them nothing is left to do, see `test_the_stages_are_stages`."""


def at_stage(stage: int) -> tuple[Stepper, list[int]]:
    """Return a poller that has done so many passes over a small and a large request, and tickets.

    The large one has more pieces than there are buffers, and copies end a pass late, so that the
    stages are: posted, read, copied, read on, ..., done.
    """
    s = Stepper(DATA, copies=[copiers.LATE], buffers=2, room=40_000)
    tickets = [s.post(0, 100), s.post(10, 20_000, offset=200), s.post(7, 7), s.post(9, 3)]
    for _ in range(stage):
        s.step()
        s.copier.ends[:] = 1
    return s, tickets


def finish(s: Stepper) -> None:
    """Let the poller come to its end."""
    for _ in range(200):
        s.copier.ends[:] = 1
        if s.step() == 0 and s.poller.cursor[records.REQUESTS] == 0:
            return
        cursor = s.poller.cursor
        if s.queue.control[0] == State.ABORTED and not (
            cursor[records.READS] or cursor[records.COPIES]
        ):
            return
    raise AssertionError("the poller does not come to an end")


@pytest.mark.parametrize("stage", STAGES)
def test_close_at_every_stage_answers_all_that_was_posted(stage: int) -> None:
    s, tickets = at_stage(stage)
    records.raise_state(s.queue.control, int(State.CLOSING))
    finish(s)
    assert [s.status(ticket) for ticket in tickets] == [
        Status.OK, Status.OK, Status.OK, Status.BAD_RANGE,
    ]  # fmt: skip
    np.testing.assert_array_equal(s.bytes[:100], DATA[:100])
    np.testing.assert_array_equal(s.bytes[200 : 200 + 19_990], DATA[10:20_000])
    s.assert_at_rest()
    late = s.post(0, 10)
    s.run()
    assert s.status(late) == Status.PENDING, "a closing queue takes nothing more"
    s.close()


@pytest.mark.parametrize("stage", STAGES)
def test_abort_at_every_stage_leaves_no_read_and_no_copy_in_flight(stage: int) -> None:
    s, tickets = at_stage(stage)
    answered = [s.status(ticket) for ticket in tickets]
    started = int(s.copier.words[copiers.STARTED])
    records.raise_state(s.queue.control, int(State.ABORTED))
    finish(s)
    assert s.poller.cursor[records.READS] == 0
    assert s.poller.cursor[records.COPIES] == 0
    assert s.free_leases == 2
    assert s.copier.words[copiers.STARTED] == started, "no copy begins after an abort"
    for ticket, before in zip(tickets, answered, strict=True):
        # What was answered stays so, and every waiter returns.
        if before != Status.PENDING:
            assert s.status(ticket) == before
        assert gpuq.wait(s.queue, ticket) in (before, Status.ABORTED, Status.OK)
    s.close()


def test_the_stages_are_stages() -> None:
    """After none nothing was admitted, after some a part was copied, after the last all is done."""
    seen = []
    for stage in STAGES:
        s, tickets = at_stage(stage)
        seen.append(sum(s.status(ticket) == Status.PENDING for ticket in tickets))
        s.close()
    assert seen[0] == 4
    assert 1 in seen
    assert seen[-1] == 0, seen


# --- leaks -------------------------------------------------------------------------------------


def resources() -> tuple[int, int, int]:
    """Return descriptors, threads and lines of the memory map."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("\n")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_thousand_sources_and_destinations_come_and_go(
    make_loader: MakeLoader, payload_path: Path, payload: Any
) -> None:
    loader = make_loader(sources=2, destinations=2)
    array = np.zeros(700, dtype=np.uint8)

    def cycle() -> int:
        with loader.open(payload_path) as source:
            destination = loader.register(array)
            s, d = source.handle, destination.handle
            assert Compiled.pull(loader.queue, s, d, 5, 705, 0) == Status.OK
            np.testing.assert_array_equal(array, payload[5:705])
            destination.unregister()
        return source.handle

    for _ in range(20):
        cycle()
    before, memory = resources(), resident_bytes()
    handles = {cycle() for _ in range(1000)}
    after = resources()
    assert len(handles) == 1000, "no handle is given out twice"
    assert after[:2] == before[:2]
    assert after[2] < before[2] + 50
    assert resident_bytes() < memory + (8 << 20)


def test_two_hundred_loaders_leave_nothing(reader: str, payload_path: Path) -> None:
    array = np.zeros(700, dtype=np.uint8)

    def cycle() -> None:
        with gpuq.Loader(
            target="cpu", reader=reader, slots=4, staging_buffers=16, staging_bytes=65536,
            reader_threads=2,
        ) as loader:  # fmt: skip
            source, destination = loader.open(payload_path), loader.register(array)
            s, d = source.handle, destination.handle
            assert Compiled.pull(loader.queue, s, d, 5, 705, 0) == Status.OK

    for _ in range(20):
        cycle()
    before, memory = resources(), resident_bytes()
    for _ in range(200):
        cycle()
    after = resources()
    assert after[:2] == before[:2]
    assert after[2] < before[2] + 50
    # The staging of one in four would show.
    assert resident_bytes() < memory + (50 << 20)


# --- refusals and limits -----------------------------------------------------------------------

PULL = """
import os, sys, threading
import numpy as np
import gpuq
from kernels import Compiled
before = len(os.listdir("/proc/self/fd")), threading.active_count()
loader = gpuq.Loader(target="cpu", slots=4, **eval(sys.argv[2]))
source = loader.open(sys.argv[1])
array = np.zeros(5000, np.uint8)
destination = loader.register(array)
status = Compiled.pull(loader.queue, source.handle, destination.handle, 3, 5003, 0)
assert (array == np.fromfile(sys.argv[1], np.uint8)[3:5003]).all()
print(gpuq.Status(int(status)).name, loader.explain(source).reader)
print(loader.explain(source).reader_reason)
"""

REFUSED = """
import gc, os, sys, threading
import gpuq
before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
try:
    gpuq.Loader(target="cpu", slots=4, reader="io_uring")
except gpuq.ReaderUnavailableError as error:
    number, text = error.errno, error.strerror
gc.collect()
print(number, before == (sorted(os.listdir("/proc/self/fd")), threading.active_count()))
print(text)
"""


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"io_uring_setup": errno.EPERM}, "a seccomp filter"),
        ({"io_uring_setup": errno.ENOSYS}, "a seccomp filter hides it"),
        ({"io_uring_setup": errno.ENOMEM}, "locked-memory limit (ulimit -l)"),
        ({"io_uring_enter": errno.EPERM}, "a read with it failed"),
    ],
    ids=["EPERM", "ENOSYS", "ENOMEM", "enter EPERM"],
)
def test_io_uring_that_is_refused(payload_path: Path, refused: Any, reason: str) -> None:
    (number,) = refused.values()
    auto = system.run_python(PULL, payload_path, {"reader": "auto"}, refused=refused)
    assert auto.returncode == 0, auto.stderr
    assert auto.stdout.startswith("OK threads\n")
    assert reason in auto.stdout
    asked = system.run_python(REFUSED, refused=refused)
    assert asked.stdout.startswith(f"{number} True\n"), asked.stdout + asked.stderr
    assert reason in asked.stdout


def test_a_ring_that_cannot_be_enabled_gives_way_to_a_plain_one(
    reader: str, payload_path: Path
) -> None:
    if reader != "io_uring":
        pytest.skip("only a ring is set up in several ways")
    refused = {"io_uring_register": errno.EPERM}
    done = system.run_python(PULL, payload_path, {"reader": "io_uring"}, refused=refused)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OK io_uring\n")


@pytest.mark.parametrize("setup", SETUPS, ids=["deferred", "cooperative", "plain"])
def test_every_way_to_set_up_a_ring_reads(
    reader: str, payload_path: Path, monkeypatch: pytest.MonkeyPatch, setup: int
) -> None:
    if reader != "io_uring":
        pytest.skip("only a ring is set up in several ways")
    monkeypatch.setattr(choice, "SETUPS", (setup,))
    try:
        loader = gpuq.Loader(target="cpu", slots=4, reader="io_uring", merge_bytes=0)
    except gpuq.ReaderUnavailableError as error:
        pytest.skip(f"this system has no such ring: {error.strerror}")
    with loader:
        source = loader.open(payload_path)
        expected = np.fromfile(payload_path, np.uint8)[:5000]
        array = np.zeros(5000, np.uint8)
        destination = loader.register(array)
        for start in range(0, 5000, 1000):
            at = (source.handle, destination.handle, start, start + 1000, 0)
            assert Compiled.pull(loader.queue, *at) == gpuq.Status.OK
            assert (array[:1000] == expected[start : start + 1000]).all()


NO_FILES = """
import errno, os, resource, sys
import numpy as np
import gpuq
from kernels import Compiled
loader = gpuq.Loader(target="cpu", slots=4, reader=sys.argv[2])
array = np.zeros(100, np.uint8)
destination = loader.register(array)
opened = [loader.open(sys.argv[1])]
Compiled.pull(loader.queue, opened[0].handle, destination.handle, 0, 1, 0)  # is compiled now
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
counts = []
for room in (4, 5, 6, 7):
    top = max(map(int, os.listdir("/proc/self/fd"))) + room
    resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
    before = len(opened)
    try:
        while True:
            opened.append(loader.open(sys.argv[1]))
    except OSError as error:
        assert error.errno == errno.EMFILE, error
        print(error)
    for source in opened:
        status = Compiled.pull(loader.queue, source.handle, destination.handle, 0, 100, 0)
        assert status == gpuq.Status.OK
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for source in opened[before:]:
        source.close()
    del opened[before:]
    counts.append(sorted(os.listdir("/proc/self/fd")))
assert all(count == counts[0] for count in counts), counts
"""


def test_the_limit_of_open_files_is_an_error_and_nothing_is_half_done(
    reader: str, payload_path: Path
) -> None:
    done = system.run_python(NO_FILES, payload_path, reader)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"Too many open files: '{payload_path}'") == 4


NO_DESCRIPTOR = """
import os, resource, sys, threading
import gpuq
from gpuq.host import service
with gpuq.Loader(target="cpu", slots=4):
    pass
threads = threading.active_count()
top = max(map(int, os.listdir("/proc/self/fd")))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
try:
    gpuq.Loader(target="cpu", slots=4, reader="io_uring")
except OSError as error:
    print(type(error).__name__, error.errno, error.strerror)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert max(map(int, os.listdir("/proc/self/fd"))) == top
assert threading.active_count() == threads
"""


def test_a_ring_that_the_limit_of_open_files_refuses_is_an_error_that_says_so(
    reader: str,
) -> None:
    if reader != "io_uring":
        pytest.skip("only a ring needs a descriptor of its own")
    done = system.run_python(NO_DESCRIPTOR)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"ReaderUnavailableError {errno.EMFILE} ")
    assert "Too many open files" in done.stdout


def test_a_locked_memory_limit_of_nothing_is_no_obstacle(payload_path: Path) -> None:
    """Linux up to 5.11 counts rings; later ones do not, and then io_uring is simply there."""
    dropped = [system.CAP_IPC_LOCK] if os.geteuid() == 0 else []
    done = system.run_python(
        PULL, payload_path, {"reader": "auto"}, limits={"RLIMIT_MEMLOCK": 0}, dropped=dropped
    )
    assert done.returncode == 0, done.stderr
    first, reason = done.stdout.splitlines()
    assert first in ("OK io_uring", "OK threads")
    assert first == "OK io_uring" or "locked-memory limit" in reason


NO_MEMORY = """
import os, resource, sys, threading
import gpuq
with gpuq.Loader(target="cpu", slots=4, staging_buffers=2):
    pass
before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    gpuq.Loader(target="cpu", slots=4, staging_buffers=1024, staging_bytes=1 << 20)
except OSError as error:
    print(error.errno, error.strerror)
assert before == (sorted(os.listdir("/proc/self/fd")), threading.active_count())
with gpuq.Loader(target="cpu", slots=4, staging_buffers=2):
    print("serves")
"""


def test_memory_that_staging_does_not_get_is_an_error_and_nothing_is_half_done() -> None:
    done = system.run_python(NO_MEMORY, environment={"GPUQ_READER": "io_uring"})
    assert done.stdout.splitlines() == [f"{errno.ENOMEM} Cannot allocate memory", "serves"], (
        done.stdout + done.stderr
    )

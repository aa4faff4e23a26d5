"""On a GPU: abort, time-outs, Ctrl-C, a driver that fails, and what is launched after the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import numpy as np
import pytest
from conftest import WAIT_SECONDS, until

import gpuq
from gpuq.host import service
from gpuq.host.choice import ReaderChoice
from gpuq.layout import State, Status
from gpuq.testing import readers

pytestmark = gpu.needs_gpu()
ONLY_CUDA = pytest.mark.skipif(gpu.IS_REHEARSAL, reason="a rehearsal calls no CUDA driver")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "content"
    np.random.default_rng(2).integers(0, 256, 1 << 16, dtype=np.uint8).tofile(path)
    return path


def start_pulling(loader: gpuq.Loader, path: Path, workers: int) -> tuple[Any, Any]:
    """Launch workers that pull until a status is not OK; return their statuses, once they run."""
    statuses = gpu.put(loader, np.full(workers, -1, np.int64))
    destination = loader.register(gpu.put(loader, np.zeros(8 * workers, np.uint8)))
    host, words = gpu.mapped(loader, 16)
    arguments = (loader.queue, loader.open(path), destination, words, statuses)
    loader.prepare(gpu.pull_until_refused, *arguments)
    loader.launch(gpu.pull_until_refused, workers, *arguments, threads=workers)
    until(lambda: host[gpu.RUNNING] > 3, "the kernel pulls")
    return statuses, host


def test_an_abort_releases_every_worker(path):
    with gpu.open_loader(slots=8, staging_buffers=2) as loader:
        statuses, _ = start_pulling(loader, path, 2 if gpu.IS_REHEARSAL else 64)
        loader.abort()
        loader.synchronize()
        # Whoever waited for a slot when time and queue ended may have been told so.
        assert set(gpu.get(statuses)) <= {Status.ABORTED, Status.NO_SLOT}
        assert Status.ABORTED in gpu.get(statuses)


def test_closing_answers_what_was_posted_and_then_says_aborted(path):
    with gpu.open_loader(slots=8, staging_buffers=2) as loader:
        statuses, _ = start_pulling(loader, path, 2)
        loader.close()
        assert set(gpu.get(statuses)) == {Status.ABORTED}


def test_a_wait_times_out_and_its_ticket_stays_valid(path, monkeypatch):
    """The reader answers nothing while its gate is closed."""
    content = np.fromfile(path, np.uint8)
    reader = readers.make_scripted_reader(content)
    reader.words[readers.GATE] = 1
    choice = ReaderChoice("scripted", "a test", reader)
    monkeypatch.setattr(service, "choose_reader", lambda config: choice)
    with gpu.open_loader(slots=4, staging_buffers=2) as loader:
        statuses = gpu.put(loader, np.full(1, -1, np.int64))
        array = gpu.put(loader, np.zeros(4096, np.uint8))
        host, words = gpu.mapped(loader, 16)
        loader.launch(
            gpu.wait_in_steps, 1, loader.queue, loader.open(path), loader.register(array), words,
            statuses,
        )  # fmt: skip
        until(lambda: host[gpu.RUNNING] >= 3, "waits have timed out")
        reader.words[readers.GATE] = 0
        loader.synchronize()
        assert gpu.get(statuses)[0] == Status.OK
        np.testing.assert_array_equal(gpu.get(array), content[:4096])


CTRL_C = """
import sys
sys.path.insert(0, sys.argv[1])
import gpu, gpuq
from pathlib import Path
from test_gpu_end import start_pulling

with gpu.open_loader(slots=8, staging_buffers=2) as loader:
    statuses, _ = start_pulling(loader, Path(sys.argv[2]), 2)
    print("polling", flush=True)
    try:
        loader.synchronize()
    except KeyboardInterrupt:
        print(loader.state.name, sorted(gpuq.Status(s).name for s in gpu.get(statuses)), flush=True)
"""


def test_ctrl_c_in_synchronize_ends_the_kernel(path):
    here = str(Path(__file__).parent)
    child = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, here, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "polling\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "ABORTED ['ABORTED', 'ABORTED']\n"
        assert child.wait(WAIT_SECONDS) == 0
    finally:
        child.kill()
        child.wait()


@ONLY_CUDA
def test_a_driver_that_fails_releases_the_kernel_and_is_raised(path):
    from numba import cfunc, int32, int64

    @cfunc(int32(int64, int64, int64, int64))
    def lost(a, b, c, d):
        return 719

    from gpuq.host.driver import EVENT_QUERY

    loader = gpu.open_loader(slots=8, staging_buffers=4)
    statuses, _ = start_pulling(loader, path, 4)
    loader._service.poller.copier.addresses[EVENT_QUERY] = lost.address
    with pytest.raises(gpuq.PollerDiedError, match="CUresult 719"):
        loader.synchronize()
    assert set(gpu.get(statuses)) == {Status.ABORTED}
    assert loader.statistics().staging_quarantined >= 1
    loader.close()


@ONLY_CUDA
def test_a_kernel_that_is_launched_after_the_end_finds_the_state(path):
    loader = gpu.open_loader(slots=8, staging_buffers=2)
    statuses = gpu.put(loader, np.full(1, -1, np.int64))
    destination = loader.register(gpu.put(loader, np.zeros(8, np.uint8)))
    handles = (loader.open(path).handle, destination.handle)
    queue = loader.queue
    _, words = gpu.mapped(loader, 16)
    loader.close()
    assert loader.state == State.CLOSED
    with gpu.open_loader(slots=2, staging_buffers=1) as other:
        other.launch(gpu.pull_until_refused, 1, queue, *handles, words, statuses)
        other.synchronize()
    assert gpu.get(statuses)[0] == Status.ABORTED

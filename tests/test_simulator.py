"""The kernels that the other tests compile, run by Numba's simulator in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conftest import WAIT_SECONDS

PROGRAM = """
import sys
import numpy as np
from numba import cuda
import gpuq
import kernels
from gpuq.layout import Status

path = sys.argv[1]
data = np.fromfile(path, np.uint8)
simulated = cuda.jit(kernels.pull_slices_body)

with gpuq.Loader(slots=8, staging_buffers=2, staging_bytes=4096) as loader:
    assert loader.target == "simulator", loader
    source = loader.open(path)
    room = loader.empty(60_000)
    room[:] = 0xEE
    destination = loader.register(room)
    rng = np.random.default_rng(5)
    starts = rng.integers(0, len(data) - 2000, 30)
    rows = np.stack([starts, starts + 2000 - np.arange(30), 2000 * np.arange(30)], axis=1)
    for depth in (1, 8):
        statuses = np.full(30, -1)
        simulated[1, 1](
            loader.queue, source.handle, destination.handle, rows, np.zeros(depth, np.int64),
            statuses,
        )
        assert (statuses == Status.OK).all(), statuses
        expected = np.full(60_000, 0xEE, np.uint8)
        for start, end, offset in rows:
            expected[offset : offset + end - start] = data[start:end]
        np.testing.assert_array_equal(room.copy_to_host(), expected)
        room[:] = 0xEE
    print("slices", loader.statistics().requests)

    # Sixteen threads of a block, twice as many as there are slots, and two blocks, one request
    # each: the arrays of a launch are copied, those of the queue are shared.
    @cuda.jit
    def each(q, source, destination, statuses):
        i = cuda.grid(1)
        statuses[i] = gpuq.pull_at(q, source, destination, 100 * i, 7 * i, 7 * i + 100, i)

    statuses = np.full(32, -1)
    each[2, 16](loader.queue, source.handle, destination.handle, statuses)
    assert (statuses == Status.OK).all(), statuses
    expected = np.concatenate([data[7 * i : 7 * i + 100] for i in range(32)])
    np.testing.assert_array_equal(room.copy_to_host()[:3200], expected)
    print("threads", 32)

    @cuda.jit
    def odd(q, source, destination, out):
        out[0] = gpuq.pull(q, 0, 0, 0, 0, 0)
        out[1] = gpuq.pull(q, source, destination, 10**9, 10**9 + 1, 0)
        out[2] = gpuq.pull(q, source, 5, 0, 1, 0)
        out[3] = gpuq.pull(q, source, destination, 5, 4, 0)
        out[4] = gpuq.pull(q, source, destination, 0, 1 << 62, 0)
        ticket = gpuq.try_post(q, source, destination, 0, 10, 0)
        while gpuq.poll(q, ticket) == 1:
            pass
        out[5] = gpuq.wait_for(q, ticket, 10**9)
        out[6] = gpuq.wait(q, ticket)

    out = np.full(7, -1)
    odd[1, 1](loader.queue, source.handle, destination.handle, out)
    print("statuses", [Status(int(status)).name for status in out])
    queue = loader.queue

out = np.full(7, -1)
odd[1, 1](queue, source.handle, destination.handle, out)
print("closed", {Status(int(status)).name for status in out[:5]})
"""


def test_the_same_kernels_run_in_the_simulator(payload_path: Path) -> None:
    here = Path(__file__).parent
    environment = os.environ | {
        "NUMBA_ENABLE_CUDASIM": "1",
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path]),
    }
    environment.pop("GPUQ_TARGET", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(payload_path)],
        env=environment, timeout=2 * WAIT_SECONDS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "slices {'OK': 60}",
        "threads 32",
        "statuses ['BAD_SOURCE', 'END_OF_FILE', 'BAD_DESTINATION', 'BAD_RANGE', 'OUT_OF_BOUNDS', "
        "'OK', 'STALE']",
        "closed {'ABORTED'}",
    ]

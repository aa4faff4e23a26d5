"""``gpuq bench idle``: what an idle loader costs, and what its first request costs after that.

Beside it stand two floors of the machine: what a wake-up costs a thread that does nothing else,
and a plain `preadv` of the same file after the same rest.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuq.bench.kernels import sleep_again_and_again, time_pulls
from gpuq.bench.measuring import Meter, Spread, table
from gpuq.bench.reading import BadStatusError, Reading, Work, reading
from gpuq.host.libc import sleep_precisely
from gpuq.host.poller import SLEEP_LONG_NS as SLEEP_NS
from gpuq.layout import Status

_WORK = Work(4 << 10, 1, in_order=False)
_BUSY_PULLS = 200
IDLE_SECONDS = 1.0


def _latencies_us(bound: Reading, pulls: int, seed: int) -> Any:
    latencies_ns = np.zeros(pulls, dtype=np.int64)
    status = time_pulls(
        bound.loader.queue,
        bound.source.handle,
        bound.destination.handle,
        _WORK.block_bytes,
        bound.blocks,
        seed,
        latencies_ns,
    )
    if status != Status.OK:
        raise BadStatusError(f"{bound.source.path}: a request ended with {Status(status).name}")
    return latencies_ns / 1000


class PlainReads:
    """Random reads of a file by `preadv`, with O_DIRECT where it can be had and was asked for."""

    def __init__(self, path: Path, is_direct: bool) -> None:
        self._file = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
        self._blocks = os.fstat(self._file).st_size // _WORK.block_bytes
        self._random = random.Random(1)
        # A mapping of its own is aligned for O_DIRECT.
        self._buffer = mmap.mmap(-1, _WORK.block_bytes)

    def latency_us(self) -> float:
        """Read one block; return how long that took."""
        offset = self._random.randrange(self._blocks) * _WORK.block_bytes
        begun = time.perf_counter_ns()
        os.preadv(self._file, [self._buffer], offset)
        return (time.perf_counter_ns() - begun) / 1000

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
        self._buffer.close()


def _wake_up_us(seconds: float) -> float:
    """Return the processor time that each sleep of a thread costs which does nothing else."""
    costs: list[float] = []

    def sleep() -> None:
        sleep_precisely()
        begun = time.thread_time()
        sleeps = sleep_again_and_again(SLEEP_NS, int(seconds * 1e9))
        costs.append(1e6 * (time.thread_time() - begun) / sleeps)

    thread = threading.Thread(target=sleep)
    thread.start()
    thread.join()
    return costs[0]


def measure(
    path: Path,
    nbytes: int,
    *,
    reader: str = "auto",
    direct: str = "auto",
    seconds: float = 2.0,
    rounds: int = 5,
    idle_seconds: float = IDLE_SECONDS,
) -> dict[str, Any]:
    """Measure, in each round: pulls in a row, rest, processor share while idle, the first pull.

    Parameters
    ----------
    seconds : float
        Over which the share of a core is measured.
    idle_seconds : float
        Rest before that.
    """
    busy, first, shares = [], [], []
    wake_ups, plain_later = [], []
    sleep_again_and_again(SLEEP_NS, 0)
    with reading(path, nbytes, _WORK, reader=reader, direct=direct) as bound:
        _latencies_us(bound, 1, 1)
        for number in range(rounds):
            busy.append(statistics.median(_latencies_us(bound, _BUSY_PULLS, 2 * number + 2)))
            time.sleep(idle_seconds)
            with Meter() as meter:
                time.sleep(seconds)
            shares.append(100 * meter.cpu_seconds / meter.seconds)
            first.append(float(_latencies_us(bound, 1, 2 * number + 3)[0]))
            is_direct = bound.loader.explain(bound.source).direct
    plain = PlainReads(path, is_direct)
    for _ in range(rounds):
        soon = statistics.median(plain.latency_us() for _ in range(_BUSY_PULLS))
        time.sleep(idle_seconds)
        wake_ups.append(_wake_up_us(seconds))
        plain_later.append(plain.latency_us() - soon)
    plain.close()
    return {
        "wake_up_us": Spread.of(wake_ups),
        "plain_later_us": Spread.of(plain_later),
        "idle_share_percent": Spread.of(shares),
        "busy_latency_us": Spread.of(busy),
        "first_latency_us": Spread.of(first),
        "later_us": Spread.of([late - soon for late, soon in zip(first, busy, strict=True)]),
        "idle_seconds": idle_seconds + seconds,
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    rows: Sequence[Sequence[str]] = [
        ("share of a core while idle, %", result["idle_share_percent"].show(".2f")),
        ("latency of a busy loader's request, us", result["busy_latency_us"].show(".0f")),
        ("latency of the first request after idling, us", result["first_latency_us"].show(".0f")),
        ("later by, us", result["later_us"].show(".0f")),
        ("a wake-up of a thread that only sleeps, core-us", result["wake_up_us"].show(".1f")),
        ("a plain read after the same rest, later by, us", result["plain_later_us"].show(".0f")),
    ]
    table("An idle loader", ("", "median (min–max)"), rows)

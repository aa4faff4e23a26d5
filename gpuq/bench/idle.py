"""``gpuq bench idle``: what an idle loader costs, and what its first request costs after that."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpuq.bench.kernels import time_pulls
from gpuq.bench.measuring import Meter, Spread, table
from gpuq.bench.reading import BadStatusError, Reading, Work, reading
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
    with reading(path, nbytes, _WORK, reader=reader, direct=direct) as bound:
        _latencies_us(bound, 1, 1)
        for number in range(rounds):
            busy.append(statistics.median(_latencies_us(bound, _BUSY_PULLS, 2 * number + 2)))
            time.sleep(idle_seconds)
            with Meter() as meter:
                time.sleep(seconds)
            shares.append(100 * meter.cpu_seconds / meter.seconds)
            first.append(float(_latencies_us(bound, 1, 2 * number + 3)[0]))
    return {
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
    ]
    table("An idle loader", ("", "median (min–max)"), rows)

"""``gpuq bench trace``: what it costs to keep a record of each request.

Two threads that spin on two cores measure the scheduler where others are at work. So the poller
is also driven alone: one thread posts, does the poller's passes until there is nothing to do, and
takes the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numba import njit

from gpuq.bench.measuring import (
    Contestant,
    Meter,
    Sample,
    Spread,
    console,
    interleave,
    ratios,
    table,
)
from gpuq.bench.queue import unserved_queue
from gpuq.bench.reading import BadStatusError, Reading, Work
from gpuq.host.poller import poll_once
from gpuq.kernels.queue import post_at, wait
from gpuq.loader import Loader

RECORDS = 1 << 21
"""Of the ring: it must never be full, since a record that is dropped costs less."""
WITHOUT = "without"
WITH = "with"
_SMALL = Work(4 << 10, 32, in_order=False)
_SILENT_BYTES, _SILENT_DEPTH = 8, 512


def measure(
    path: Path, nbytes: int, *, reader: str = "auto", seconds: float = 1.0, rounds: int = 7
) -> list[dict[str, Any]]:
    """Measure three workloads, each with a trace and without, interleaved.

    Parameters
    ----------
    path, nbytes
        File, and how many of its bytes are read.
    reader : str
    seconds : float
        Of one sample.
    rounds : int
        Samples of each.

    Raises
    ------
    ValueError
        A sample was so long that the ring was full.
    """
    workloads: dict[str, Callable[[int], Contestant]] = {
        f"{_SMALL.name}, direct": lambda trace: _reads(
            path, nbytes, reader, "auto", seconds, trace
        ),
        f"{_SMALL.name}, page cache": lambda trace: _reads(
            path, nbytes, reader, "off", seconds, trace
        ),
        "silent reader, one thread": lambda trace: _alone(min(seconds, 0.5), trace),
    }
    results = []
    for name, make in workloads.items():
        contestants = {WITHOUT: make(0), WITH: make(RECORDS)}
        for contestant in contestants.values():
            contestant(0)  # compiles, and brings the file into the cache
        results.append(_summarize(name, interleave(contestants, rounds)))
    return results


def _reads(
    path: Path, nbytes: int, reader: str, direct: str, seconds: float, trace: int
) -> Contestant:
    def run(number: int) -> Sample:
        with Loader(target="cpu", reader=reader, direct=direct, trace=trace) as loader:
            bound = Reading(loader, path, nbytes, _SMALL, direct)
            bound.warm_up()
            with Meter() as meter:
                done, elapsed = bound.run(seed=number + 1, duration_ns=int(seconds * 1e9))
            if trace and loader.trace().lost:
                raise ValueError(f"{done} requests are more than the trace has room for")
        return Sample(done, elapsed, meter.cpu_seconds, meter.others_cores)

    return run


@njit(nogil=True)
def _post_all(q: Any, source: Any, destination: Any, nbytes: Any, tickets: Any) -> None:
    for number in range(len(tickets)):
        tickets[number] = post_at(q, source, destination, 0, 0, nbytes, number)


@njit(nogil=True)
def _count_good(q: Any, tickets: Any) -> Any:
    good = 0
    for ticket in tickets:
        good += wait(q, ticket) == 0
    return good


def _alone(seconds: float, trace: int) -> Contestant:
    """Return a contestant whose one thread is kernel and poller in turn."""

    def run(_number: int) -> Sample:
        tickets = np.zeros(_SILENT_DEPTH, np.int64)
        with unserved_queue(trace) as (q, source, destination, poller):

            def cross() -> int:
                _post_all(q, source, destination, _SILENT_BYTES, tickets)
                while poll_once(poller):
                    pass
                return int(_count_good(q, tickets))

            posted, good = _SILENT_DEPTH, cross()
            with Meter() as meter:
                began = perf_counter()
                while perf_counter() - began < seconds and posted + _SILENT_DEPTH <= RECORDS:
                    good += cross()
                    posted += _SILENT_DEPTH
                elapsed = perf_counter() - began
        if good != posted:
            raise BadStatusError(f"{posted - good} of {posted} requests did not end with OK")
        return Sample(posted - _SILENT_DEPTH, elapsed, meter.cpu_seconds, meter.others_cores)

    return run


def _summarize(name: str, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    rates = {which: [sample.rate for sample in group] for which, group in samples.items()}
    each = {which: [1e9 / rate for rate in group] for which, group in rates.items()}
    others = [sample.others_cores for group in samples.values() for sample in group]
    return {
        "workload": name,
        "without": Spread.of(rates[WITHOUT]),
        "with": Spread.of(rates[WITH]),
        "ratio": ratios(rates[WITH], rates[WITHOUT]),
        "added_ns": Spread.of(
            [mine - bare for mine, bare in zip(each[WITH], each[WITHOUT], strict=True)]
        ),
        "others_cores": Spread.of(others),
        "samples": {which: [asdict(one) for one in group] for which, group in samples.items()},
    }


def show(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    rows = [
        (
            one["workload"],
            _thousands(one["without"]),
            _thousands(one["with"]),
            one["ratio"].show(".2f"),
            one["added_ns"].show(),
        )
        for one in results
    ]
    columns = ("workload", "1,000 requests/s", "with a trace", "ratio", "added ns each")
    table("What a trace costs: median (min–max), pair by pair", columns, rows)
    others = Spread.of([one["others_cores"].median for one in results])
    console.print(f"Other processes kept {others.show('.1f')} cores busy meanwhile.")


def _thousands(rate: Spread) -> str:
    return Spread(rate.median / 1e3, rate.least / 1e3, rate.most / 1e3).show(",.1f")

"""``gpuq bench gil``: whether Python code in the main thread slows the poller.

The same reading three times: beside a pure-Python loop, beside a native loop that never takes the
interpreter lock, and beside a main thread that sleeps. The first two cost the same core, so their
ratio is what the lock costs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuq.bench.kernels import be_busy
from gpuq.bench.measuring import Contestant, Meter, Sample, Spread, interleave, ratios, table
from gpuq.bench.reading import Reading, Work, reading

DEPTH = 32
_HEAD_START_NS = 20_000_000


def _busy_in_python(until_ns: int) -> None:
    total = 0
    while time.monotonic_ns() < until_ns:
        for number in range(1000):
            total += number


def _busy_native(until_ns: int) -> None:
    be_busy(until_ns)


def _asleep(until_ns: int) -> None:
    time.sleep(max(until_ns - time.monotonic_ns(), 0) / 1e9)


BESIDE: dict[str, Callable[[int], None]] = {
    "python": _busy_in_python,
    "native": _busy_native,
    "asleep": _asleep,
}


def measure(
    path: Path,
    nbytes: int,
    *,
    reader: str = "auto",
    direct: str = "auto",
    seconds: float = 2.0,
    rounds: int = 5,
) -> dict[str, Any]:
    """Measure the three; return their rates and the ratio of Python to native, pair by pair."""
    be_busy(0)
    contestants = {
        name: _contestant(busy, path, nbytes, reader, direct, seconds)
        for name, busy in BESIDE.items()
    }
    samples = interleave(contestants, rounds)
    rates = {name: [sample.rate for sample in group] for name, group in samples.items()}
    return {
        "depth": DEPTH,
        "iops": {name: Spread.of(values) for name, values in rates.items()},
        "python_to_native": ratios(rates["python"], rates["native"]),
        "others_cores": Spread.of([s.others_cores for group in samples.values() for s in group]),
        "samples": {name: [asdict(sample) for sample in group] for name, group in samples.items()},
    }


def _contestant(
    busy: Callable[[int], None],
    path: Path,
    nbytes: int,
    reader: str,
    direct: str,
    seconds: float,
) -> Contestant:
    work = Work(4 << 10, DEPTH, in_order=False)

    def run(number: int) -> Sample:
        with reading(path, nbytes, work, reader=reader, direct=direct) as bound, Meter() as meter:
            done, elapsed = _read_beside(busy, bound, int(seconds * 1e9), number)
        return Sample(done, elapsed, meter.cpu_seconds, meter.others_cores)

    return run


def _read_beside(
    busy: Callable[[int], None], bound: Reading, duration_ns: int, number: int
) -> tuple[int, float]:
    """Read in a thread of its own while `busy` has the main thread."""
    outcome: list[tuple[int, float] | BaseException] = []
    begin_ns = time.monotonic_ns() + _HEAD_START_NS

    def read() -> None:
        try:
            outcome.append(bound.run(seed=number + 1, begin_ns=begin_ns, duration_ns=duration_ns))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=read, name="gpuq-bench")
    thread.start()
    busy(begin_ns + duration_ns)
    thread.join()
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    rows: Sequence[Sequence[str]] = [
        (f"main thread: {name}", spread.show()) for name, spread in result["iops"].items()
    ]
    ratio = result["python_to_native"]
    last = ("python / native, pair by pair", ratio.show(".3f") if ratio else "–")
    table(
        f"4 KiB random reads at depth {result['depth']}, beside what the main thread does",
        ("", "IOPS, median (min–max)"),
        [*rows, last],
    )

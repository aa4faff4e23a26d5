"""``gpuq bench cpu``: core-seconds for a GiB and for a million requests, beside fio.

On the CPU target the waiting kernel spins on a core, as one on a GPU does on its own; so the
kernel's thread is told apart from the host's side (poller, reader), which is what fio does too.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuq.bench.fio import find_fio, sample_fio
from gpuq.bench.measuring import Meter, Spread, console, interleave, ratios, table
from gpuq.bench.reading import Work, reading

GPUQ = "gpuq"
FIO = "fio"
GIB = "GiB"
MILLION = "million requests"
WORKS = ((Work(1 << 20, 8, in_order=True), GIB), (Work(4 << 10, 32, in_order=False), MILLION))


@dataclass(frozen=True)
class Cost:
    """What a number of requests cost.

    Attributes
    ----------
    operations : int
    seconds : float
        That they took.
    host_seconds, kernel_seconds : float
        User and system time of the host's side, and of the thread that posts and waits. fio's is
        all of one kind.
    others_cores : float
        Cores that everything else on the machine kept busy meanwhile.
    """

    operations: int
    seconds: float
    host_seconds: float
    kernel_seconds: float
    others_cores: float

    def per(self, unit: str, block_bytes: int) -> float:
        """Return the host's core-seconds for a GiB or for a million requests."""
        return self.host_seconds / self._units(unit, block_bytes)

    def all_per(self, unit: str, block_bytes: int) -> float:
        """Return the core-seconds of host and kernel."""
        return (self.host_seconds + self.kernel_seconds) / self._units(unit, block_bytes)

    def _units(self, unit: str, block_bytes: int) -> float:
        return self.operations * block_bytes / 2**30 if unit == GIB else self.operations / 1e6


def _thread_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_utime + usage.ru_stime


def sample_gpuq(
    path: Path, nbytes: int, work: Work, *, reader: str, direct: str, seconds: float, number: int
) -> Cost:
    """Read through a queue for some seconds; this thread runs the kernel."""
    with reading(path, nbytes, work, reader=reader, direct=direct) as bound, Meter() as meter:
        before = _thread_seconds()
        done, elapsed = bound.run(seed=number + 1, duration_ns=int(seconds * 1e9))
        kernel_seconds = _thread_seconds() - before
    host_seconds = max(meter.cpu_seconds - kernel_seconds, 0.0)
    return Cost(done, elapsed, host_seconds, kernel_seconds, meter.others_cores)


def _sample_fio(
    program: str, path: Path, nbytes: int, work: Work, direct: bool, seconds: float, number: int
) -> Cost:
    sample = sample_fio(program, path, nbytes, work, direct=direct, seconds=seconds, number=number)
    return Cost(sample.operations, sample.seconds, sample.cpu_seconds, 0.0, sample.others_cores)


def measure(
    path: Path,
    nbytes: int,
    *,
    reader: str = "auto",
    direct: str = "auto",
    seconds: float = 2.0,
    rounds: int = 5,
) -> list[dict[str, Any]]:
    """Measure both workloads; return for each the costs and gpuq's ratio to fio's, pair by pair.

    Parameters
    ----------
    path, nbytes
        File, and how many of its bytes are read.
    seconds : float
        Of one sample.
    rounds : int
        Samples of each.
    """
    program = find_fio()
    results = []
    for work, unit in WORKS:
        contestants: dict[str, Callable[[int], Cost]] = {
            GPUQ: _bind(path, nbytes, work, reader, direct, seconds)
        }
        if program is not None:
            contestants[FIO] = _bind_fio(program, path, nbytes, work, direct != "off", seconds)
        results.append(_summarize(work, unit, interleave(contestants, rounds)))
    return results


def _bind(
    path: Path, nbytes: int, work: Work, reader: str, direct: str, seconds: float
) -> Callable[[int], Cost]:
    return lambda number: sample_gpuq(
        path, nbytes, work, reader=reader, direct=direct, seconds=seconds, number=number
    )


def _bind_fio(
    program: str, path: Path, nbytes: int, work: Work, direct: bool, seconds: float
) -> Callable[[int], Cost]:
    return lambda number: _sample_fio(program, path, nbytes, work, direct, seconds, number)


def _summarize(work: Work, unit: str, samples: dict[str, list[Cost]]) -> dict[str, Any]:
    size = work.block_bytes
    ours, theirs = samples[GPUQ], samples.get(FIO)
    host = [one.per(unit, size) for one in ours]
    everything = [one.all_per(unit, size) for one in ours]
    peer = [one.per(unit, size) for one in theirs] if theirs else None
    return {
        "workload": work.name,
        "depth": work.depth,
        "unit": unit,
        "host": Spread.of(host),
        "host_and_kernel": Spread.of(everything),
        "fio": Spread.of(peer) if peer else None,
        "ratio": ratios(host, peer) if peer else None,
        "ratio_with_kernel": ratios(everything, peer) if peer else None,
        "rate_ratio": _rates(ours, theirs) if theirs else None,
        "others_cores": Spread.of([one.others_cores for one in ours]),
        "samples": {name: [asdict(one) for one in group] for name, group in samples.items()},
    }


def _rates(ours: Sequence[Cost], theirs: Sequence[Cost]) -> Spread | None:
    return ratios(*([one.operations / one.seconds for one in group] for group in (ours, theirs)))


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    rows = []
    for one in results:
        is_gib = one["unit"] == GIB
        form = ".2f" if is_gib else ".1f"
        rows.append(
            (
                f"{'GiB' if is_gib else 'million'} ({one['workload']}, {one['depth']})",
                one["host"].show(form),
                one["fio"].show(form) if one["fio"] else "–",
                one["ratio"].show(".1f") if one["ratio"] else "–",
                f"{one['ratio_with_kernel'].median:.1f}" if one["ratio_with_kernel"] else "–",
                f"{one['rate_ratio'].median:.2f}" if one["rate_ratio"] else "–",
            )
        )
    columns = ("core-seconds per", "gpuq's host side", "fio", "ratio", "+ kernel", "rate")
    table("Processor time, median (min–max); ratios gpuq / fio, pair by pair", columns, rows)
    if results[0]["fio"] is None:
        console.print("fio is not installed: nothing to compare with.")
    others = Spread.of([one["others_cores"].median for one in results])
    console.print(f"Other processes kept {others.show('.1f')} cores busy meanwhile.")

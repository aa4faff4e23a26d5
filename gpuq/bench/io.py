"""``gpuq bench io``: reads through the queue beside fio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuq.bench.fio import find_fio, sample_fio
from gpuq.bench.measuring import (
    Contestant,
    Sample,
    Spread,
    console,
    interleave,
    ratios,
    table,
)
from gpuq.bench.reading import Work, sample_queue

FIO = "fio"
RANDOM_BYTES = 4 << 10
SEQUENTIAL_BYTES = (128 << 10, 1 << 20)
SEQUENTIAL_DEPTH = 8
DEPTHS = (1, 32, 128)


def workloads(depths: Sequence[int]) -> list[Work]:
    """Return what is read: small random blocks at each depth, then large ones in order."""
    small = [Work(RANDOM_BYTES, depth, in_order=False) for depth in depths]
    return small + [Work(size, SEQUENTIAL_DEPTH, in_order=True) for size in SEQUENTIAL_BYTES]


def measure(
    path: Path,
    nbytes: int,
    *,
    depths: Sequence[int] = DEPTHS,
    readers: Sequence[str] = ("auto",),
    direct: str = "auto",
    seconds: float = 2.0,
    rounds: int = 5,
    watch: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Measure every workload; return for each what `summarize` says.

    Parameters
    ----------
    path, nbytes
        File, and how many of its bytes are read.
    depths, readers, direct
        What is tried; ``direct="off"`` lets fio read through the page cache too.
    seconds : float
        Of one sample.
    rounds : int
        Samples of each contestant.
    watch : callable
        Told what is being measured.
    """
    program = find_fio()
    results = []
    for work in workloads(depths):
        watch(f"{work.name}, depth {work.depth}")
        contestants: dict[str, Contestant] = {
            reader: _queue(path, nbytes, work, reader, direct, seconds) for reader in readers
        }
        if program is not None:
            contestants[FIO] = _fio(program, path, nbytes, work, direct != "off", seconds)
        samples = interleave(contestants, rounds)
        results += [summarize(work, reader, samples) for reader in readers]
    return results


def _queue(
    path: Path, nbytes: int, work: Work, reader: str, direct: str, seconds: float
) -> Contestant:
    return lambda number: sample_queue(
        path, nbytes, work, reader=reader, direct=direct, seconds=seconds, number=number
    )


def _fio(
    program: str, path: Path, nbytes: int, work: Work, direct: bool, seconds: float
) -> Contestant:
    return lambda number: sample_fio(
        program, path, nbytes, work, direct=direct, seconds=seconds, number=number
    )


def summarize(work: Work, reader: str, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Return a workload's figures: medians, the ratio pair by pair, and the samples themselves."""
    ours, theirs = samples[reader], samples.get(FIO, [])
    mine = [sample.rate for sample in ours]
    others = [sample.others_cores for group in samples.values() for sample in group]
    return {
        "workload": work.name,
        "block_bytes": work.block_bytes,
        "depth": work.depth,
        "reader": reader,
        "gpuq_iops": Spread.of(mine),
        "fio_iops": Spread.of([sample.rate for sample in theirs]) if theirs else None,
        "ratio": ratios(mine, [sample.rate for sample in theirs]) if theirs else None,
        "gpuq_mb_per_second": Spread.of(mine).median * work.block_bytes / 1e6,
        "gpuq_cpu_per_million": _cost(ours),
        "fio_cpu_per_million": _cost(theirs) if theirs else None,
        "others_cores": Spread.of(others),
        "samples": {
            name: [asdict(sample) for sample in samples[name]]
            for name in (reader, *([FIO] if theirs else []))
        },
    }


def _cost(samples: Sequence[Sample]) -> float:
    return Spread.of([sample.cpu_per_million for sample in samples]).median


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    several = len({result["reader"] for result in results}) > 1
    rows = []
    for result in results:
        fio, ratio, cost = result["fio_iops"], result["ratio"], result["fio_cpu_per_million"]
        reader = f" {result['reader']}" if several else ""
        rows.append(
            (
                f"{result['workload']} {result['depth']}{reader}",
                f"{result['gpuq_iops'].median:,.0f}",
                f"{fio.median:,.0f}" if fio else "–",
                ratio.show(".2f") if ratio else "–",
                f"{result['gpuq_mb_per_second']:,.0f}",
                f"{result['gpuq_cpu_per_million']:,.1f}",
                f"{cost:,.1f}" if cost is not None else "–",
            )
        )
    columns = (
        "depth",
        "gpuq IOPS",
        "fio IOPS",
        "ratio",
        "MB/s",
        "core-s/M gpuq",
        "fio",
    )
    table("Reads through the queue beside fio: medians, ratio pair by pair", columns, rows)
    others = Spread.of([result["others_cores"].median for result in results])
    console.print(f"Other processes kept {others.show('.1f')} cores busy meanwhile.")

"""What all benchmarks share: interleaved rounds, medians with their spread, tables, reports."""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from gpuq.bench.machine import cpu_seconds_of_all

# A table of figures cut at 80 columns says nothing; a terminal narrower than this wraps it.
console = Console(highlight=False, width=max(shutil.get_terminal_size().columns, 100))


@dataclass(frozen=True)
class Sample:
    """One contestant in one round.

    Attributes
    ----------
    operations : int
        Requests done.
    seconds : float
        That they took.
    cpu_seconds : float
        User and system time that they cost, over all threads.
    others_cores : float
        Cores that everything else on the machine kept busy meanwhile: how noisy it was.
    """

    operations: int
    seconds: float
    cpu_seconds: float
    others_cores: float = 0.0

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.operations / self.seconds if self.seconds > 0 else 0.0

    @property
    def cpu_per_million(self) -> float:
        """Core-seconds for a million operations."""
        return self.cpu_seconds / self.operations * 1e6 if self.operations else 0.0


@dataclass(frozen=True)
class Spread:
    """A median, and the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value or more."""
        return cls(statistics.median(values), min(values), max(values))

    def show(self, form: str = ",.0f") -> str:
        """Return ``median (least-most)``."""
        return f"{self.median:{form}} ({self.least:{form}}–{self.most:{form}})"


Contestant = Callable[[int], Sample]
"""Runs once and says what it did; it is given the number of the round."""


Outcome = TypeVar("Outcome")


def interleave(
    contestants: Mapping[str, Callable[[int], Outcome]], rounds: int
) -> dict[str, list[Outcome]]:
    """Run all contestants in every round, in turned order from round to round: A B, B A, A B.

    What drifts (a host's cache, a disk's credit, a neighbour's load) then hits all of them alike,
    and the samples of one round can be compared pair by pair.
    """
    samples: dict[str, list[Outcome]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            samples[name].append(contestants[name](number))
    return samples


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """Return the spread of the ratios, pair by pair; None where a pair has no second figure."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True) if b > 0]
    return Spread.of(pairs) if pairs else None


class Meter:
    """Measures the cost of a ``with`` block: time, own processor time, and that of others.

    Attributes
    ----------
    seconds, cpu_seconds, others_cores : float
        See `Sample`; set when the block is left. Children that ended inside count as own.
    """

    seconds = 0.0
    cpu_seconds = 0.0
    others_cores = 0.0

    def __enter__(self) -> Meter:
        self._began = (time.perf_counter(), _own_cpu_seconds(), cpu_seconds_of_all())
        return self

    def __exit__(self, *exception: object) -> None:
        began, own, everybody = self._began
        self.seconds = time.perf_counter() - began
        self.cpu_seconds = _own_cpu_seconds() - own
        others = cpu_seconds_of_all() - everybody - self.cpu_seconds
        self.others_cores = max(others, 0.0) / self.seconds


def _own_cpu_seconds() -> float:
    # os.times counts in clock ticks of 10 ms, too coarse for an idle loader.
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def resident_bytes(name: str = "VmRSS") -> int:
    """Return this process's resident memory, ``VmRSS`` now or ``VmHWM`` at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(f"/proc/self/status has no {name}")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table under its title; the first column is text, the others are figures."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        made.add_column(column, justify="left" if position == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    console.print(f"\n{title}")
    console.print(made)


def report(bench: str, machine: Any, settings: Mapping[str, Any], results: Any) -> dict[str, Any]:
    """Return what a benchmark's JSON file holds."""
    return {
        "bench": bench,
        "machine": asdict(machine),
        "settings": dict(settings),
        "results": results,
    }


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    """Write a report, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else str(value)

"""``gpuq bench all``: every benchmark that has an aim, in one run, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuq.bench import cpu, fair, gil, idle, io, load, memory, queue, start
from gpuq.bench.files import bench_file
from gpuq.bench.measuring import Spread, table

FAIR_SECONDS = 5.0
"""A sample of `fair` is so many times longer: its p99 needs some hundred small reads."""
_MEMORY_TIMES = 4
_IO_AIMS = {1: 0.90, 32: 0.97, 128: 0.97}
_IO_LARGE_AIM = 0.98
_MIB = 1 << 20


@dataclass(frozen=True)
class Goal:
    """An aim, and what came out.

    Attributes
    ----------
    bench, what : str
    limit : float
    is_least : bool
        Whether `limit` is the least that is asked for, instead of the most.
    came_out : Spread or None
        None where there was nothing to compare with.
    form : str
        How the figures are written.
    unit : str
        Behind them.
    """

    bench: str
    what: str
    limit: float
    is_least: bool
    came_out: Spread | None
    form: str = ".2f"
    unit: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the median meets the aim; None where there is none."""
        if self.came_out is None:
            return None
        median = self.came_out.median
        return median >= self.limit if self.is_least else median <= self.limit

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table's row."""
        sign = "≥" if self.is_least else "≤"
        verdict = {True: "met", False: "missed", None: "not compared"}[self.is_met]
        shown = self.came_out.show(self.form) if self.came_out else "–"
        aim = f"{sign} {self.limit:{self.form}}{self.unit}"
        return f"{self.bench}: {self.what}", aim, shown, verdict


def measure(
    directory: Path,
    nbytes: int,
    *,
    peers_python: str,
    direct: str = "auto",
    seconds: float = 1.0,
    rounds: int = 5,
    cold: bool = True,
    watch: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run them one after another over one file; return the results by the benchmarks' names.

    Parameters
    ----------
    directory : Path
        Where the files are made: the disk to measure.
    nbytes : int
        Of the file; `memory` pulls one that is four times as large.
    peers_python : str
        The Python that has the peers' packages.
    direct : str
    seconds : float
        Of one sample; one of `fair` takes `FAIR_SECONDS` times as long.
    rounds : int
        Samples of each contestant.
    cold : bool
        Whether `start` empties the cache, too.
    watch : callable
        Told what is being measured.

    Raises
    ------
    BadStatusError, FioError, WorkerError, WrongBytesError, CacheStateError
    """
    # What can be refused is found before anything was measured.
    load.find_missing(peers_python)
    results: dict[str, Any] = {}
    watch("memory")
    with bench_file(None, nbytes * _MEMORY_TIMES, directory, keep=False) as (path, size):
        results["memory"] = memory.measure(path, size, direct=direct, rounds=min(rounds, 3))
    pace: dict[str, Any] = {"direct": direct, "seconds": seconds, "rounds": rounds}
    with bench_file(None, nbytes, directory, keep=False) as (path, size):
        watch("queue")
        results["queue"] = queue.measure(seconds=seconds / 2, rounds=rounds)
        results["io"] = io.measure(path, size, watch=lambda work: watch(f"io, {work}"), **pace)
        for name, bench in {"gil": gil, "cpu": cpu, "idle": idle}.items():
            watch(name)
            results[name] = bench.measure(path, size, **pace)
        watch("fair")
        results["fair"] = fair.measure(path, size, **{**pace, "seconds": seconds * FAIR_SECONDS})
        watch("start")
        results["start"] = start.measure(path, rounds=rounds, cold=cold)
    watch("load")
    results["load"] = load.measure(
        nbytes,
        directory,
        peers_python=peers_python,
        rounds=rounds,
        watch=lambda group: watch(f"load, {group}"),
    )
    return results


def goals(results: Mapping[str, Any]) -> list[Goal]:
    """Return every aim with what came out."""
    return [
        *_goals_of_io(results["io"]),
        *_goals_of_load(results["load"]),
        *_goals_of_queue(results["queue"]),
        Goal("gil", "python / native", 0.97, True, results["gil"]["python_to_native"]),
        Goal("fair", "p99 / fio's", 1.2, False, results["fair"]["ratio"].get("p99")),
        *_goals_of_idle(results["idle"]),
        *_goals_of_start(results["start"]),
        _goal_of_memory(results["memory"]),
        *(
            Goal("cpu", f"core-s for a {one['unit']} / fio's", 1.5, False, one["ratio"])
            for one in results["cpu"]
        ),
    ]


def _goals_of_io(results: list[dict[str, Any]]) -> Iterator[Goal]:
    for one in results:
        is_small = one["block_bytes"] == io.RANDOM_BYTES
        limit = _IO_AIMS[one["depth"]] if is_small else _IO_LARGE_AIM
        yield Goal("io", f"{one['workload']}, {one['depth']} / fio's", limit, True, one["ratio"])


def _goals_of_load(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield what is asked of a group: to be the first, or near to it where the file is cached."""
    for group in result["groups"]:
        peers = {name: way for name, way in group["ways"].items() if name != load.OURS}
        limit = 0.95 if group["state"] == "cached" else 1.0
        best = max(peers, key=lambda name: float(peers[name]["mb_per_second"].median), default="")
        what = f"{group['mode']}, {group['state']} / {best or 'the best'}"
        yield Goal("load", what, limit, True, peers[best]["gpuq_ratio"] if best else None)


def _goals_of_queue(result: dict[str, Any]) -> Iterator[Goal]:
    for one in result["results"]:
        if one["name"].startswith(queue.SILENT):
            is_one = one["depth"] == 1
            what = "round trip / ping-pong" if is_one else "rate at depth 512 / the ring's"
            yield Goal("queue", what, 1.5 if is_one else 1.0, not is_one, one["ratio"])


def _goals_of_idle(result: dict[str, Any]) -> Iterator[Goal]:
    yield Goal("idle", "share of a core", 2, False, result["idle_share_percent"], ".1f", " %")
    yield Goal("idle", "first request later by", 150, False, result["later_us"], ".0f", " us")


def _goals_of_start(result: dict[str, Any]) -> Iterator[Goal]:
    yield Goal("start", "import adds", 0.15, False, result["import_adds_seconds"], ".2f", " s")
    for state, limit in (("warm", 0.7), ("cold", 15.0)):
        if state in result["start_seconds"]:
            took = result["start_seconds"][state]["first_completion"]
            yield Goal("start", f"first completion, {state}", limit, False, took, ".2f", " s")


def _goal_of_memory(result: dict[str, Any]) -> Goal:
    grown = result["growth_bytes"]
    came_out = Spread(grown.median / _MIB, grown.least / _MIB, grown.most / _MIB)
    limit = result["staging_bytes"] / _MIB + 32
    return Goal("memory", "resident growth", limit, False, came_out, ".1f", " MiB")


def show(results: Mapping[str, Any]) -> None:
    """Print every benchmark's own tables, and what came out beside the aims."""
    for name, bench in {
        "io": io,
        "load": load,
        "queue": queue,
        "gil": gil,
        "fair": fair,
        "idle": idle,
        "start": start,
        "memory": memory,
        "cpu": cpu,
    }.items():
        bench.show(results[name])
    rows = [goal.row() for goal in goals(results)]
    table("What was aimed at", ("", "aim", "came out, median (min–max)", ""), rows)

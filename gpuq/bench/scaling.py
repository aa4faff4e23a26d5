"""``gpuq bench scale``: one GPU with N NVMe drives, as a model and as a simulation of it.

Nothing is measured here. A request is a path through stations, the same for the closed form and
for the discrete-event simulation: the GPU posts, the poller handles it, a drive reads, the copy
goes over the GPU's link, the GPU sees the flag. `INPUTS` is the one table of figures that go in,
each with where it comes from.

The closed form is the bound of a closed network with `depth` requests: the rate is at most
``1 / max(demand)`` and at most ``depth / (sum of times)`` (operational analysis; Denning and Buzen
1978). The simulation adds what the bound leaves out: requests that wait for each other, pollers
that are busy with one request while another arrives, uneven drives.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuq.bench.measuring import console, table

KIB = 1 << 10
SIZES = (4 * KIB, 64 * KIB, 1024 * KIB)
DRIVES = (1, 4, 8)


@dataclass(frozen=True)
class Input:
    """A figure that goes into the model: its value, unit and origin."""

    value: float
    unit: str
    origin: str


INPUTS: dict[str, Input] = {
    "drive_bytes": Input(14e9, "B/s", "given: a drive on PCIe 5.0 x4"),
    "drive_iops": Input(3e6, "1/s", "given: 4 KiB random reads of such a drive"),
    "drive_ns": Input(60_000, "ns", "assumed: unloaded read of flash"),
    "link_bytes": Input(55e9, "B/s", "assumed, of 63e9 by specification: PCIe 5.0 x16"),
    "dram_bytes": Input(300e9, "B/s", "assumed: host memory, reads and writes together"),
    "poll_ns": Input(1250, "ns", "assumed: the GPU loads a mapped word, there and back"),
    "poll_gap_ns": Input(200, "ns", "code: the longer pause of `relax` on a GPU"),
    "poll_link_bytes": Input(32, "B", "assumed: an answer of 8 bytes with its headers"),
    "queue_ns": Input(200, "ns", "measured: `gpuq bench queue`, silent reader, 512"),
    "read_ns": Input(1500, "ns", "assumed: a direct read by io_uring, kernel time"),
    "copy_call_ns": Input(2500, "ns", "assumed: cuMemcpyHtoDAsync, cuEventRecord"),
    "copy_look_ns": Input(500, "ns", "assumed: cuEventQuery"),
    "copy_engine_ns": Input(1500, "ns", "assumed: of a copy besides its bytes"),
    "batch": Input(32, "copies", "assumed: of one call, where they are batched"),
    "batched_engine_ns": Input(300, "ns", "assumed: of a copy in a batch besides its bytes"),
    "gds_ns": Input(1000, "ns", "assumed: a GPUDirect Storage read over a plain one"),
    "staging_bytes": Input(512 * KIB, "B", "code: a loader's default; the most of one read"),
    "slots": Input(1024, "", "code: a loader's default, requests of one queue"),
}

AS_BUILT = "as built"
BATCHED = "batched copies"
MAPPED = "kernel copies"
GDS = "GPUDirect Storage"
DESIGNS = (AS_BUILT, BATCHED, MAPPED, GDS)

GPU = "GPU's poll"
POLLER = "poller"
DRIVE = "drives"
DRIVE_LATENCY = "flash"
ENGINE = "copy engine"
LINK = "GPU's link"
DRAM = "host memory"
_DELAYS = (GPU, DRIVE_LATENCY)
"""Stations where nobody waits for another: pure time."""


@dataclass(frozen=True)
class Visit:
    """A request's stay at a station: nanoseconds of one of its servers."""

    station: str
    ns: float


@dataclass(frozen=True)
class Case:
    """What is modelled.

    Attributes
    ----------
    size : int
        Bytes of a request.
    drives : int
    pollers : int
        Each with a queue and a core of its own.
    design : str
        One of DESIGNS.
    """

    size: int
    drives: int
    pollers: int
    design: str = AS_BUILT

    @property
    def servers(self) -> dict[str, int]:
        """How many servers a station has, 1 where it is not named."""
        return {POLLER: self.pollers, DRIVE: self.drives}


def values_of(changes: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the inputs' values, with some changed.

    Raises
    ------
    ValueError
        A name is no input, or a value is not positive.
    """
    values = {name: given.value for name, given in INPUTS.items()}
    for name, value in (changes or {}).items():
        if name not in values:
            raise ValueError(f"{name!r} is no input; the inputs are {', '.join(INPUTS)}")
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive, not {value}")
        values[name] = value
    return values


def path_of(case: Case, v: Mapping[str, float]) -> list[Visit]:
    """Return the visits of a request, in order.

    The pieces of a large request are taken together: their times at a station add up.
    """
    size = case.size
    pieces = -(-size // int(v["staging_bytes"]))
    drive_ns = max(pieces * 1e9 / v["drive_iops"], size / v["drive_bytes"] * 1e9)
    link_ns = size / v["link_bytes"] * 1e9
    # A request's bytes are written to staging and read from it.
    dram_ns = 2 * size / v["dram_bytes"] * 1e9
    poll_ns = v["poll_ns"] + v["poll_gap_ns"] / 2
    before, after = v["queue_ns"] / 2 + pieces * v["read_ns"], v["queue_ns"] / 2
    start = [Visit(GPU, v["poll_ns"] / 2)]
    read = [Visit(DRIVE, drive_ns), Visit(DRIVE_LATENCY, v["drive_ns"])]
    if case.design == GDS:
        before += pieces * v["gds_ns"]
        middle = [Visit(LINK, link_ns), Visit(POLLER, after)]
    elif case.design == MAPPED:
        # The flag says that the bytes are in staging; the kernel loads them over the link.
        middle = [Visit(DRAM, dram_ns), Visit(POLLER, after), Visit(LINK, link_ns)]
    else:
        calls = 1.0 if case.design == AS_BUILT else v["batch"]
        engine = v["copy_engine_ns"] if case.design == AS_BUILT else v["batched_engine_ns"]
        copy_ns = pieces * v["copy_call_ns"] / calls
        look_ns = pieces * v["copy_look_ns"] / calls
        middle = [
            Visit(POLLER, copy_ns),
            Visit(DRAM, dram_ns),
            # The engine is busy for as long as the bytes are on the link.
            Visit(ENGINE, pieces * engine + link_ns),
            Visit(POLLER, look_ns + after),
        ]
    return [*start, Visit(POLLER, before), *read, *middle, Visit(GPU, poll_ns)]


def demands_of(path: Sequence[Visit], servers: Mapping[str, int]) -> dict[str, float]:
    """Return the nanoseconds that a request takes of each station, over its servers."""
    demands: dict[str, float] = {}
    for visit in path:
        if visit.station not in _DELAYS:
            share = visit.ns / servers.get(visit.station, 1)
            demands[visit.station] = demands.get(visit.station, 0.0) + share
    return demands


@dataclass(frozen=True)
class Bound:
    """The closed form of a case.

    Attributes
    ----------
    rate : float
        Requests per second.
    bottleneck : str
        The station that sets it, or "depth".
    alone_ns : float
        What a request takes where no other is.
    """

    rate: float
    bottleneck: str
    alone_ns: float


def bound_of(path: Sequence[Visit], servers: Mapping[str, int], depth: int | None = None) -> Bound:
    """Return the most that `depth` requests at once can reach; None is any number."""
    demands = demands_of(path, servers)
    # Where pollers are added until they are no bottleneck, they may tie with what is one.
    station = max(demands, key=lambda name: (round(demands[name], 6), name != POLLER))
    alone_ns = sum(visit.ns for visit in path)
    rate = 1e9 / demands[station]
    if depth is not None and depth * 1e9 / alone_ns < rate:
        return Bound(depth * 1e9 / alone_ns, "depth", alone_ns)
    return Bound(rate, station, alone_ns)


def pollers_needed(size: int, drives: int, design: str, v: Mapping[str, float]) -> int:
    """Return how many pollers it takes until something else is the bottleneck."""
    demands = demands_of(path_of(Case(size, drives, 1, design), v), {DRIVE: drives})
    poller = demands.pop(POLLER)
    return max(math.ceil(poller / max(demands.values()) - 1e-9), 1)


def depth_needed(bound: Bound) -> int:
    """Return the requests that must be outstanding: rate times time (Little's law), half more."""
    return max(math.ceil(1.5 * bound.rate * bound.alone_ns / 1e9), 1)


def poll_share(case: Case, depth: int, v: Mapping[str, float]) -> float:
    """Return the share of the link that polling takes where each request is waited for by itself.

    The link's answers to polls go the way of the copies: from host to GPU.
    """
    polls = depth * 1e9 / (v["poll_ns"] + v["poll_gap_ns"])
    return polls * v["poll_link_bytes"] / v["link_bytes"]


@dataclass(frozen=True)
class Simulated:
    """What a simulation saw, after its first tenth.

    Attributes
    ----------
    rate : float
        Requests per second.
    mean_ns, p99_ns : float
        From post to the flag being seen.
    busy : dict of str to float
        Share of the time that a station's servers worked.
    """

    rate: float
    mean_ns: float
    p99_ns: float
    busy: dict[str, float]


class _Station:
    """Servers and who waits for them, first come, first served."""

    def __init__(self, servers: float) -> None:
        self.free = servers
        self.waiting: deque[tuple[int, int]] = deque()
        self.busy_ns = 0.0


def simulate(
    path: Sequence[Visit],
    servers: Mapping[str, int],
    depth: int,
    requests: int,
    *,
    seed: int = 0,
    spread: float = 0.0,
) -> Simulated:
    """Run `depth` requests through the stations, each posted again when it is over.

    Parameters
    ----------
    requests : int
        To finish; at least twice `depth`.
    seed : int
        The same seed gives the same run.
    spread : float
        0: every visit takes its time exactly. 1: exponential times of that mean. Between: a mix.

    Raises
    ------
    ValueError
    """
    if requests < 2 * depth or depth < 1:
        raise ValueError(f"{requests} requests are too few for {depth} at once")
    generator = np.random.default_rng(seed)
    stations = {
        visit.station: _Station(
            math.inf if visit.station in _DELAYS else servers.get(visit.station, 1)
        )
        for visit in path
    }
    events: list[tuple[float, int, int, int]] = []  # (time, order, request, visit that ends)
    posted = [0.0] * depth
    order = 0

    def begin(request: int, number: int, now: float) -> None:
        nonlocal order
        station, ns = stations[path[number].station], path[number].ns
        if spread:
            ns *= 1 - spread + spread * float(generator.exponential())
        station.free -= 1
        station.busy_ns += ns
        order += 1
        heapq.heappush(events, (now + ns, order, request, number))

    def arrive(request: int, number: int, now: float) -> None:
        station = stations[path[number].station]
        if station.free > 0:
            begin(request, number, now)
        else:
            station.waiting.append((request, number))

    for request in range(depth):
        arrive(request, 0, 0.0)
    took: list[float] = []
    ended: list[float] = []
    while len(took) < requests:
        now, _, request, number = heapq.heappop(events)
        station = stations[path[number].station]
        station.free += 1
        if station.waiting:
            begin(*station.waiting.popleft(), now)
        if number + 1 < len(path):
            arrive(request, number + 1, now)
        else:
            took.append(now - posted[request])
            ended.append(now)
            posted[request] = now
            arrive(request, 0, now)
    return _seen(stations, servers, depth, took, ended)


def _seen(
    stations: Mapping[str, _Station],
    servers: Mapping[str, int],
    depth: int,
    took: Sequence[float],
    ended: Sequence[float],
) -> Simulated:
    first = len(took) // 10
    # Whole rounds of all requests: they may end in bunches, and half a bunch would count wrongly.
    counted = (len(took) - 1 - first) // depth * depth
    rate = counted / (ended[first + counted] - ended[first]) * 1e9
    busy = {
        name: min(station.busy_ns / servers.get(name, 1) / ended[-1], 1.0)
        for name, station in stations.items()
        if name not in _DELAYS
    }
    settled = np.array(took[first:])
    return Simulated(rate, float(settled.mean()), float(np.percentile(settled, 99)), busy)


def measure(
    *,
    sizes: Sequence[int] = SIZES,
    drives: Sequence[int] = DRIVES,
    requests: int = 4_000,
    spread: float = 0.5,
    seed: int = 1,
    changes: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Model and simulate each case: with one poller as built, and with as many as it takes.

    Raises
    ------
    ValueError
        See `values_of`.
    """
    v = values_of(changes)
    rows = []
    for size in sizes:
        for count in drives:
            for design in DESIGNS:
                needed = pollers_needed(size, count, design, v)
                for pollers in dict.fromkeys((1, needed) if design == AS_BUILT else (needed,)):
                    case = Case(size, count, pollers, design)
                    rows.append(_row(case, v, requests, seed, spread))
    inputs = {name: vars(given) | {"value": v[name]} for name, given in INPUTS.items()}
    return {"inputs": inputs, "rows": rows}


def _row(
    case: Case, v: Mapping[str, float], requests: int, seed: int, spread: float
) -> dict[str, Any]:
    path = path_of(case, v)
    bound = bound_of(path, case.servers)
    depth = depth_needed(bound)
    seen = simulate(path, case.servers, depth, max(requests, 12 * depth), seed=seed, spread=spread)
    return {
        "case": vars(case),
        "bottleneck": bound.bottleneck,
        "bound_rate": bound.rate,
        "depth": depth,
        "queues": -(-depth // int(v["slots"])),
        "simulated_rate": seen.rate,
        "simulated_gb_per_second": seen.rate * case.size / 1e9,
        "p99_ns": seen.p99_ns,
        "busy": seen.busy,
        "poll_share": poll_share(case, depth, v),
    }


def show(result: dict[str, Any]) -> None:
    """Print the inputs and a table of the cases."""
    table(
        "What goes in; change one with --input NAME=VALUE",
        ("", "value", "unit", "origin"),
        [
            (name, f"{given['value']:.10g}", given["unit"], given["origin"])
            for name, given in result["inputs"].items()
        ],
    )
    for size in dict.fromkeys(row["case"]["size"] for row in result["rows"]):
        rows = [_cells(row) for row in result["rows"] if row["case"]["size"] == size]
        table(f"Requests of {size >> 10} KiB", _COLUMNS, rows)
    console.print(
        "pollers: one, or as many as it takes. bound, sim.: million requests a second by the "
        "closed form and by simulation. depth: requests outstanding, half more than the bound "
        "needs. polls: share of the GPU's link that polling takes where each request is waited "
        "for alone."
    )


_COLUMNS = (
    "drives, design", "pollers", "bound", "sim.", "GB/s", "bottleneck", "depth", "p99 us", "polls",
)  # fmt: skip


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['case']['drives']}, {row['case']['design']}",
        f"{row['case']['pollers']}",
        f"{row['bound_rate'] / 1e6:.3g}",
        f"{row['simulated_rate'] / 1e6:.3g}",
        f"{row['simulated_gb_per_second']:.1f}",
        row["bottleneck"],
        f"{row['depth']}",
        f"{row['p99_ns'] / 1000:.0f}",
        f"{row['poll_share']:.0%}",
    )

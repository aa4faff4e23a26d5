"""A trace in figures: how long requests took, where the time went, how much came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuq.host.taken import Trace
from gpuq.trace.naming import name_path, name_source, name_status
from gpuq.trace.phases import PHASES, depths_of, steps_of, was_read

PERCENTILES = (50.0, 90.0, 99.0, 99.9, 100.0)
_SHOWN_SOURCES = 10


@dataclass(frozen=True)
class Phase:
    """What one phase took, of all requests for which a read was made.

    Attributes
    ----------
    share : float
        Of the time of all phases of all requests; 0 to 1.
    median_ns, p99_ns : float
    """

    share: float
    median_ns: float
    p99_ns: float


@dataclass(frozen=True)
class Group:
    """Requests that have something in common.

    Attributes
    ----------
    requests : int
    bytes : int
        That reached destinations.
    median_ns : float
        From admission to completion.
    """

    requests: int
    bytes: int
    median_ns: float


@dataclass(frozen=True)
class Summary:
    """A trace in figures. Made by `summarize`; its text is for people.

    Attributes
    ----------
    target, reader : str
    requests, lost : int
        Records in the trace, and records that it lacks; no figure covers those.
    seconds : float
        From the first admission to the last completion.
    bytes : int
        That reached destinations.
    reads : int
        Handed to the operating system.
    bytes_per_second : float or None
        None where the trace is empty.
    latency_ns : dict of float to float
        Percentile to nanoseconds from admission to completion, of the requests for which a
        read was made; empty where there are none.
    phases : dict of str to Phase
        By the names in `gpuq.trace.phases.PHASES`.
    depth_mean, depth_most : float, int
        Requests admitted and not completed, over the time.
    by_status, by_path, by_source : dict of str to Group
        Largest first.
    """

    target: str
    reader: str
    requests: int
    lost: int
    seconds: float
    bytes: int
    reads: int
    bytes_per_second: float | None
    latency_ns: dict[float, float]
    phases: dict[str, Phase]
    depth_mean: float
    depth_most: int
    by_status: dict[str, Group]
    by_path: dict[str, Group]
    by_source: dict[str, Group]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def summarize(trace: Trace) -> Summary:
    """Return a trace in figures."""
    records = trace.records
    steps = steps_of(records)
    times = steps[:, -1] - steps[:, 0]
    span_ns = int(steps[:, -1].max() - steps[:, 0].min()) if len(steps) else 0
    read = was_read(records)
    nbytes = int(records["bytes"].sum())
    return Summary(
        target=trace.target,
        reader=trace.reader,
        requests=len(records),
        lost=trace.lost,
        seconds=span_ns / 1e9,
        bytes=nbytes,
        reads=int(records["reads"].sum()),
        bytes_per_second=nbytes / (span_ns / 1e9) if span_ns else None,
        latency_ns=_percentiles(times[read]),
        phases=_phases(np.diff(steps[read], axis=1)),
        depth_mean=float(times.sum() / span_ns) if span_ns else 0.0,
        depth_most=int(depths_of(records)[1].max(initial=0)),
        by_status=_groups(records, times, "status", name_status),
        by_path=_groups(records, times, "path", name_path),
        by_source=_groups(records, times, "source", lambda handle: name_source(trace, handle)),
    )


def _percentiles(times: NDArray[np.int64]) -> dict[float, float]:
    if not len(times):
        return {}
    return dict(zip(PERCENTILES, np.percentile(times, PERCENTILES).tolist(), strict=True))


def _phases(durations: NDArray[np.int64]) -> dict[str, Phase]:
    if not len(durations):
        return {}
    total = max(int(durations.sum()), 1)
    return {
        name: Phase(
            share=int(column.sum()) / total,
            median_ns=float(np.median(column)),
            p99_ns=float(np.percentile(column, 99)),
        )
        for name, column in zip(PHASES, durations.T, strict=True)
    }


def _groups(
    records: Any, times: NDArray[np.int64], field: str, name: Callable[[int], str]
) -> dict[str, Group]:
    values, group_of = np.unique(records[field], return_inverse=True)
    named = [name(int(value)) for value in values]
    # A file that was opened twice has two handles and one name.
    names = list(dict.fromkeys(named))
    merged = np.array([names.index(one) for one in named], np.int64)[group_of]
    order = np.argsort(merged, kind="stable")
    ends = np.cumsum(np.bincount(merged, minlength=len(names)))[:-1]
    members = np.split(order, ends) if names else []
    found = {
        one: Group(
            requests=len(rows),
            bytes=int(records["bytes"][rows].sum()),
            median_ns=float(np.median(times[rows])),
        )
        for one, rows in zip(names, members, strict=True)
    }
    return dict(sorted(found.items(), key=lambda item: item[1].requests, reverse=True))


def _lines(summary: Summary) -> list[str]:
    lines = [f"{summary.requests:,} requests, target {summary.target}, reader {summary.reader}"]
    if summary.lost:
        lines.append(
            f"{summary.lost:,} MORE WERE LOST: the ring was full, and no figure here counts them"
        )
    if not summary.requests:
        return lines
    rate = summary.bytes_per_second or 0.0
    lines.append(
        f"{summary.bytes:,} bytes in {summary.seconds:.4f} s: {rate / 1e6:,.1f} MB/s, "
        f"by {summary.reads:,} reads"
    )
    lines.append(
        f"under way at once: {summary.depth_mean:.1f} on average, {summary.depth_most:,} at most"
    )
    if summary.latency_ns:
        lines += _latency_lines(summary)
    for heading, groups in (
        ("status", summary.by_status),
        ("how it was read", summary.by_path),
        ("file", summary.by_source),
    ):
        lines += _group_lines(heading, groups)
    return lines


def _latency_lines(summary: Summary) -> list[str]:
    least, *between, most = summary.latency_ns.items()
    shown = [f"median {show_ns(least[1])}"]
    shown += [f"{percent:g} % within {show_ns(time)}" for percent, time in between]
    shown.append(f"longest {show_ns(most[1])}")
    lines = ["", "from admission to completion", "  " + ", ".join(shown), ""]
    lines.append(f"{'where the time went':<28}{'share':>8}{'median':>12}{'99 % within':>14}")
    for name, phase in summary.phases.items():
        median, p99 = show_ns(phase.median_ns), show_ns(phase.p99_ns)
        lines.append(f"  {name:<26}{phase.share:>8.1%}{median:>12}{p99:>14}")
    return lines


def _group_lines(heading: str, groups: dict[str, Group]) -> list[str]:
    width = 28
    lines = ["", f"{heading:<{width}}{'requests':>12}{'bytes':>18}{'median':>12}"]
    for name, group in list(groups.items())[:_SHOWN_SOURCES]:
        figures = f"{group.requests:>12,}{group.bytes:>18,}{show_ns(group.median_ns):>12}"
        if len(name) > width - 3:
            lines.append(f"  {name}")
            name = ""
        lines.append(f"  {name:<{width - 2}}{figures}")
    if len(groups) > _SHOWN_SOURCES:
        lines.append(f"  and {len(groups) - _SHOWN_SOURCES:,} more")
    return lines


def show_ns(nanoseconds: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return (
                f"{nanoseconds / size:.3g} {unit}"
                if nanoseconds < 999.5 * size
                else (f"{nanoseconds / size:,.0f} {unit}")
            )
    return f"{nanoseconds:.0f} ns"

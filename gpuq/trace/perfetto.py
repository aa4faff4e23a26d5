"""A trace for https://ui.perfetto.dev: JSON in Chrome's Trace Event Format.

Each source is a process there. Its requests overlap, so they stand on lanes, each on the first
one that is free; a lane is a thread. A request is a slice with a slice for each phase inside. The
number of requests under way is a counter.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gpuq.host.taken import Trace
from gpuq.trace.naming import name_path, name_source, name_status
from gpuq.trace.phases import PHASES, depths_of, in_order_of_admission, steps_of

_ALL = 1
"""The process that has what belongs to no source; those of the sources follow."""


def write_perfetto(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace for Perfetto; times begin with the first admission.

    Raises
    ------
    OSError
        It cannot be written.
    """
    with open(path, "w", encoding="ascii") as file:
        head = {"lost": trace.lost, "target": trace.target, "reader": trace.reader}
        file.write(f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(head)}, "traceEvents": [')
        separator = "\n"
        for event in _events(trace):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    records = in_order_of_admission(trace.records)
    begin = int(records["admitted_ns"][0]) if len(records) else 0
    yield _name("process_name", _ALL, 0, "gpuq: all requests")
    if trace.lost:
        name = f"{trace.lost} records were lost: the ring was full"
        yield {"ph": "i", "s": "g", "name": name, "pid": _ALL, "tid": 0, "ts": 0}
    for time, depth in zip(*depths_of(records), strict=True):
        what = {"ph": "C", "name": "requests under way", "pid": _ALL, "ts": _us(time - begin)}
        yield what | {"args": {"requests": int(depth)}}
    for number, handle in enumerate(np.unique(records["source"]).tolist()):
        process = _ALL + 1 + number
        yield _name("process_name", process, 0, name_source(trace, handle))
        yield from _requests(records[records["source"] == handle], process, begin)


def _requests(records: Any, process: int, begin: int) -> Iterator[dict[str, Any]]:
    """Yield the slices of one source's requests, which are sorted by admission."""
    steps = steps_of(records) - begin
    lanes = _lanes(zip(steps[:, 0].tolist(), steps[:, -1].tolist(), strict=True))
    for record, times, (lane, is_new) in zip(records, steps.tolist(), lanes, strict=True):
        if is_new:
            yield _name("thread_name", process, lane, f"lane {lane}")
        status = name_status(int(record["status"]))
        name = f"{int(record['end']) - int(record['start'])} bytes"
        where = {"ph": "X", "pid": process, "tid": lane}
        yield where | {
            "name": name if status == "OK" else f"{name}: {status}",
            "cat": "request",
            "ts": _us(times[0]),
            "dur": _us(times[-1] - times[0]),
            "args": _arguments(record, status),
        }
        for phase, first, last in zip(PHASES, times[:-1], times[1:], strict=True):
            if last > first:
                span = {"ts": _us(first), "dur": _us(last - first)}
                yield where | {"name": phase, "cat": "phase"} | span


def _arguments(record: Any, status: str) -> dict[str, Any]:
    numbers = ("ticket", "tag", "destination", "start", "end", "bytes", "reads", "errno")
    said = {name: _exact(int(record[name])) for name in numbers}
    return said | {"status": status, "path": name_path(int(record["path"]))}


def _exact(number: int) -> int | str:
    # Beyond 2**53 a number of JavaScript is another one.
    return number if abs(number) < 1 << 53 else str(number)


def _lanes(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, bool]]:
    """Give each span, sorted by begin, a lane that is free then; say whether it is a new one."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    count = 0
    for first, last in spans:
        while busy and busy[0][0] <= first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        is_new = not free
        lane = heapq.heappop(free) if free else count
        count += is_new
        # One that begins and ends at once still takes its place in the picture.
        heapq.heappush(busy, (max(last, first + 1), lane))
        yield lane, is_new


def _name(kind: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def _us(nanoseconds: int) -> float:
    """Return microseconds, the unit of the format."""
    return int(nanoseconds) / 1000

"""A trace as a picture: what each request did when, how long requests took, how much came."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np

from gpuq.errors import ConfigError
from gpuq.host.taken import Trace
from gpuq.trace.naming import name_path
from gpuq.trace.phases import PHASES, depths_of, in_order_of_admission, steps_of, was_read

COLOURS = ("#c9d1d9", "#2f6fd0", "#f2c14e", "#8a6fc8")
"""Of the phases: grey waits for a buffer, blue reads, yellow waits for a copy, violet copies."""

_MOST_LINES = 2_000
_MOST_PATHS = 5
_BINS = 80


def plot(trace: Trace, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw a trace.

    Above, a line for each request, coloured by what it waited for, over time, in the order of
    admission. Below, how long requests took, and the bytes that came over time with the number
    of requests under way. Needs matplotlib.

    Parameters
    ----------
    trace : Trace
    path : path-like, optional
        Write it here too; the ending chooses the format: ``.png``, ``.svg``, ``.pdf``.

    Returns
    -------
    matplotlib.figure.Figure
        A notebook shows it.

    Raises
    ------
    ConfigError
        matplotlib is not installed, or does not know the ending.
    OSError
        The file cannot be written.
    """
    figure = _make_figure()
    if path is not None:
        _check_ending(figure, os.fspath(path))
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    _draw_title(figure, trace)
    if len(trace.records):
        records = in_order_of_admission(trace.records)
        _draw_requests(figure.add_subplot(grid[0, :]), records)
        _draw_times(figure.add_subplot(grid[1, 0]), records)
        _draw_rate(figure.add_subplot(grid[1, 1]), records)
    if path is not None:
        figure.savefig(path)
    return figure


def _make_figure() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a plot needs matplotlib, which is not installed; the extra `notebook` brings it: "
            "pip install 'gpuq[notebook]'"
        ) from None

    class Picture(Figure):
        """A figure that a notebook shows without any setting."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    # Without pyplot: it would choose a window system, and keep every figure.
    figure = Picture(figsize=(10, 7), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _check_ending(figure: Any, path: str) -> None:
    known = figure.canvas.get_supported_filetypes()
    ending = os.path.splitext(path)[1].removeprefix(".").lower()
    if ending not in known:
        raise ConfigError(f"{path}: a plot ends in one of .{', .'.join(sorted(known))}")


def _draw_title(figure: Any, trace: Trace) -> None:
    title = f"{len(trace.records):,} requests, target {trace.target}, reader {trace.reader}"
    if trace.lost:
        title += f"; {trace.lost:,} more were lost, since the ring was full"
    figure.suptitle(title, color="#b3261e" if trace.lost else "black")


def _draw_requests(axes: Any, records: Any) -> None:
    from matplotlib.collections import LineCollection

    every = -(-len(records) // _MOST_LINES)
    steps = (steps_of(records[::every]) - int(records["admitted_ns"][0])) / 1e6
    rows = np.arange(0, len(records), every)
    width = max(0.4, min(6.0, 250 / len(rows)))
    for number, (phase, colour) in enumerate(zip(PHASES, COLOURS, strict=True)):
        ends = np.stack([steps[:, number], rows, steps[:, number + 1], rows], axis=1)
        lines = LineCollection(
            list(ends.reshape(-1, 2, 2)), colors=colour, linewidths=width, label=phase
        )
        axes.add_collection(lines)
    axes.set_xlim(0, max(steps[:, -1].max(), 1e-6))
    axes.set_ylim(len(records), -1)
    axes.set_xlabel("ms since the first admission")
    axes.set_ylabel("request" if every == 1 else f"request (each {every}th is drawn)")
    # A line of the legend is as thick as in the picture, which may be too thin to see.
    for line in axes.legend(loc="upper right").get_lines():
        line.set_linewidth(4)


def _draw_times(axes: Any, records: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    read = records[was_read(records)]
    axes.set_xlabel("us from admission to completion")
    axes.set_ylabel("requests")
    if not len(read):
        axes.set_title("no request was read for")
        return
    times = np.maximum((read["completed_ns"] - read["admitted_ns"]) / 1e3, 1e-3)
    paths, counts = np.unique(read["path"], return_counts=True)
    largest = paths[np.argsort(counts)[::-1]][:_MOST_PATHS].tolist()
    groups = {name_path(path): times[read["path"] == path] for path in largest}
    others = times[~np.isin(read["path"], largest)]
    if len(others):
        groups["others"] = others
    bins = np.geomspace(times.min() * 0.99, times.max() * 1.01, _BINS // 2)
    axes.hist(list(groups.values()), bins, stacked=True, label=list(groups))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend()


def _draw_rate(axes: Any, records: Any) -> None:
    begin = int(records["admitted_ns"][0])
    ends = (records["completed_ns"] - begin) / 1e6
    last = max(ends.max(), 1e-6)
    came, edges = np.histogram(ends, _BINS, (0, last), weights=records["bytes"].astype(np.float64))
    axes.stairs(came / (last / _BINS / 1e3) / 1e6, edges, fill=True, color=COLOURS[1], alpha=0.5)
    axes.set_xlabel("ms since the first admission")
    axes.set_ylabel("MB/s", color=COLOURS[1])
    axes.set_xlim(0, last)
    times, depths = depths_of(records)
    beside = axes.twinx()
    beside.step((times - begin) / 1e6, depths, where="post", color="black", linewidth=0.7)
    beside.set_ylabel("requests under way")
    beside.set_ylim(bottom=0)

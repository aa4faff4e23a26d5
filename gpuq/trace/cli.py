"""``gpuq trace``: what a file of `gpuq.trace.save` says, and what it is turned into."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from gpuq.ending import reporting


def trace(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Written by gpuq pull --trace, or by gpuq.trace.save.",
            show_default=False,
        ),
    ],
    csv: Annotated[
        str | None,
        typer.Option(metavar="OUT.csv", help="Write a row for each request.", show_default=False),
    ] = None,
    perfetto: Annotated[
        str | None,
        typer.Option(
            metavar="OUT.json", help="Write it for https://ui.perfetto.dev.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="OUT.png|OUT.svg",
            help="Draw it; needs the extra `notebook`.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text, and nothing else.")
    ] = False,
) -> None:
    """Say what happened to requests: how long they took, where the time went, how much came.

    docs/trace.md says how to get a trace and how to read this.

    The exit code is 0, or 1 if the file is no trace or something cannot be written.
    """
    with reporting(as_json=False):
        from gpuq import trace as traces
        from gpuq.report import printable
        from gpuq.trace.recording import check_apart

        for out in (csv, perfetto, plot):
            check_apart(out, [file])
        taken = traces.load(file)
        summary = traces.summarize(taken)
        if as_json:
            print(json.dumps(asdict(summary), indent=2))
        else:
            for line in str(summary).splitlines():
                print(printable(line))
        if csv is not None:
            traces.write_csv(taken, csv)
        if perfetto is not None:
            traces.write_perfetto(taken, perfetto)
        if plot is not None:
            traces.plot(taken, plot)

"""How a race is shown: a table for people, a dictionary for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuq.race.board import Figures, Run
from gpuq.race.schedule import BLOCK_BYTES, BUFFERS
from gpuq.report import print_trimmed

_HEADINGS = {"event-recheck": "event recheck"}


def show_race(console: Console, runs: Sequence[Run]) -> None:
    """Print the figures of all pools, then what arrived."""
    title = (
        f"The race of NVIDIA DALI issue 6623: {BUFFERS} buffers of {BLOCK_BYTES >> 20} MiB, two "
        "readers, one stream"
    )
    print_trimmed(console, Text(title, style="bold", overflow="fold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline")
    table.add_column("figure", no_wrap=True)
    for run in runs:
        table.add_column(_HEADINGS.get(run.pool, run.pool), justify="right", no_wrap=True)
    for name in (field.name for field in fields(Figures)):
        table.add_row(name, *(_format(getattr(run.figures, name)) for run in runs))
    print_trimmed(console, table)
    print_trimmed(console, Text())
    outcomes = Table.grid(padding=(0, 2))
    for run in runs:
        outcomes.add_row(_HEADINGS.get(run.pool, run.pool), _outcome(run))
    print_trimmed(console, outcomes)


def describe_race(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the same, for JSON."""
    return [
        {
            "pool": run.pool,
            **asdict(run.figures),
            "wrong": [block._asdict() for block in run.wrong],
        }
        for run in runs
    ]


def _format(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower()


def _outcome(run: Run) -> Text:
    if run.figures.watchdog_fired:
        return Text("the watchdog opened the gates: this run proves nothing", style="bold red")
    if not run.wrong:
        return Text(f"all {run.samples} blocks are right", style="green")
    texts = [
        f"block {block.sample} should hold {block.expected} and holds {block.found}"
        for block in run.wrong
    ]
    return Text("; ".join(texts), style="bold red")

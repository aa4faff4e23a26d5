"""How a soak is shown: a table for people, a dictionary for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuq.report import print_trimmed
from gpuq.soak.run import Soak


def show_soak(console: Console, soak: Soak) -> None:
    """Print what was done, and what came of it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row("seed", str(soak.seed))
    table.add_row("seconds", f"{soak.seconds:.1f}")
    table.add_row("loaders", _list(soak.loaders))
    table.add_row("rounds", f"{soak.rounds:,}")
    table.add_row("requests", f"{soak.requests:,} by kernels")
    table.add_row("answers", _list(soak.statuses))
    table.add_row("reading", _list(soak.reading))
    table.add_row("meddling", _list(soak.meddling))
    table.add_row("check", _verdict(soak))
    print_trimmed(console, table)


def describe_soak(soak: Soak) -> dict[str, Any]:
    """Return the same, for JSON."""
    return {"ok": soak.fault is None, **vars(soak)}


def _verdict(soak: Soak) -> Text:
    if soak.fault is not None:
        return Text(soak.fault, style="bold red")
    return Text(f"all {soak.bytes_checked:,} bytes of destinations are right", style="green")


def _list(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"

"""How a diagnosis is shown: a table for people, a dictionary for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuq.doctor import Finding, obstacles
from gpuq.report import print_trimmed, printable
from gpuq.version import __version__

_STYLES = {
    "yes": "green",
    "degraded": "yellow",
    "no": "yellow",
    "unknown": "dim",
    "stops": "bold red",
}


def show_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print the findings in groups, the machine's and each path's, and what follows from them."""
    for path, group in groupby(findings, lambda finding: finding.path):
        if path:
            print_trimmed(console, Text(f"\n{printable(path)}", style="bold", overflow="fold"))
        print_trimmed(console, _table(list(group), has_header=not path))
    stops = obstacles(findings)
    if stops:
        verdict = Text('A kernel cannot pull what was asked for; see "stops" above.')
    else:
        target = next((finding.value for finding in findings if finding.name == "target"), "")
        verdict = Text(f"A kernel can pull files here, on the {target} target.", style="green")
    print_trimmed(console, Text("\n") + verdict)


def describe_findings(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the same as `show_findings` prints, for JSON."""
    stops = obstacles(findings)
    return {
        "gpuq": __version__,
        "ok": not stops,
        "stopped_by": stops,
        "findings": [asdict(finding) for finding in findings],
    }


def _table(findings: Sequence[Finding], has_header: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    table.show_header = has_header
    table.add_column("what", no_wrap=True, min_width=19)
    table.add_column("works", no_wrap=True, min_width=8)
    table.add_column("which; why; -> what to do", overflow="fold")
    for finding in findings:
        table.add_row(
            finding.name, Text(finding.ok, style=_STYLES[finding.ok]), _explanation(finding)
        )
    return table


def _explanation(finding: Finding) -> Text:
    said = "; ".join(printable(part) for part in (finding.value, finding.reason) if part)
    text = Text(said, overflow="fold")
    if finding.advice:
        text.append(f"\n-> {printable(finding.advice)}", style="italic")
    return text

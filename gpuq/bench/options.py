"""Options that several benchmarks have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gpuq.config import DIRECT_MODES, READERS


def one_of(allowed: tuple[str, ...]) -> Callable[[Any], Any]:
    """Return a callback that refuses what is not allowed, alone or in a list."""

    def check(value: Any) -> Any:
        for one in value if isinstance(value, list) else [value]:
            if one not in allowed:
                raise typer.BadParameter(f"{one!r} is none of {', '.join(allowed)}")
        return value

    return check


File = Annotated[Path | None, typer.Option(help="Read this file instead of making one.")]
Size = Annotated[int, typer.Option(min=1 << 20, help="Bytes of the file.")]
Directory = Annotated[Path, typer.Option(help="Where the file is made: the disk to measure.")]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the file that was made.")]
Seconds = Annotated[float, typer.Option(min=0.001, help="Of one sample.")]
Rounds = Annotated[int, typer.Option(min=1, help="Samples of each contestant.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures here.")]
Reader = Annotated[str, typer.Option(callback=one_of(READERS), help="auto, io_uring or threads.")]
Direct = Annotated[str, typer.Option(callback=one_of(DIRECT_MODES), help="auto, require or off.")]
PeersPython = Annotated[
    str, typer.Option(help="The Python that has the peers' packages; this one by default.")
]
Cold = Annotated[
    bool, typer.Option(help="Measure starts with an empty cache too; they compile everything.")
]


def changes_of(given: list[str]) -> dict[str, float]:
    """Return what options of the form NAME=NUMBER say."""
    changes = {}
    for one in given:
        name, _, value = one.partition("=")
        try:
            changes[name] = float(value)
        except ValueError:
            raise typer.BadParameter(f"{one!r} is not of the form NAME=NUMBER") from None
    return changes

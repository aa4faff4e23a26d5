"""What ``gpuq race`` does."""

from __future__ import annotations

import json

from gpuq.race.board import write_trace
from gpuq.race.picture import check_picture_path, write_picture
from gpuq.race.report import describe_race, show_race
from gpuq.race.schedule import faults, run_race
from gpuq.report import open_console
from gpuq.version import __version__


def race_pools(
    trace: str | None,
    picture: str | None,
    watchdog_seconds: float,
    leaves_gate_shut: bool,
    as_json: bool,
) -> list[str]:
    """Run the race, print it and write what was asked for; return what is not as it must be.

    Raises
    ------
    ConfigError
        The picture cannot be written under its name. Nothing was run.
    OSError
        A file cannot be written.
    """
    if picture is not None:
        check_picture_path(picture)
    runs = run_race(watchdog_seconds=watchdog_seconds, leaves_gate_shut=leaves_gate_shut)
    if trace is not None:
        with open(trace, "w", encoding="utf-8", newline="") as file:
            write_trace(file, runs)
    if picture is not None:
        write_picture(picture, runs)
    found = faults(runs)
    if as_json:
        document = {"gpuq": __version__, "ok": not found, "faults": found}
        print(json.dumps(document | {"pools": describe_race(runs)}, indent=2))
    else:
        show_race(open_console(), runs)
    return found

"""A trace as CSV: a row for each request."""

from __future__ import annotations

import csv
import os

from gpuq.host.taken import Trace
from gpuq.host.tracing import FIELDS
from gpuq.trace.naming import name_path, name_source, name_status

_NAMED = ("source_path", "status_name", "path_name", "lost")


def write_csv(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a row for each request: the fields of its record, then their names.

    The last column, ``lost``, is how many records the whole trace lacks, the same in each row.

    Raises
    ------
    OSError
        It cannot be written.
    """
    # Names of files may hold what is no text.
    with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*FIELDS, *_NAMED))
        for record in trace.records:
            named = (
                name_source(trace, int(record["source"])),
                name_status(int(record["status"])),
                name_path(int(record["path"])),
                trace.lost,
            )
            writer.writerow((*record.item(), *named))

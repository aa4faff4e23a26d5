"""What is written down while a schedule runs: rows of the trace, moments, figures."""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TextIO

NOTHING = -1
"""Stands for a buffer or a sample where a row has none."""


class Row(NamedTuple):
    """A row of the trace.

    Attributes
    ----------
    pool : str
    step : int
        From 1 in each pool. The order is forced, so a step is all the time that there is.
    thread : str
        ``A``, ``B``, ``poller``, ``stream``, ``schedule`` or ``watchdog``.
    event : str
        ``ask``, ``lease``, ``fill``, ``queue_copy``, ``submit_copy``, ``record_event``,
        ``end_copy``, ``sleep``, ``wake``, ``shut_gate_1``, ``open_gate_1`` and so on, ``free``, or
        ``free_too_early`` where a copy from the buffer was still to come.
    buffer : int
        Number of the staging buffer; NOTHING where the row is about none.
    offset : int
        Where the sample's bytes begin in the destination, in bytes.
    sample : int
        The block of bytes that is in the buffer, or is asked for.
    """

    pool: str
    step: int
    thread: str
    event: str
    buffer: int
    offset: int
    sample: int


class Holder(Enum):
    """Who holds a buffer."""

    FREE = "free"
    READER = "being filled by a reader"
    FILLED = "filled, its copy waits for the batch"
    COPYING = "its copy is still to come"
    COPIED = "its copy has ended, nobody took it back yet"
    FREE_TOO_EARLY = "given back although its copy is still to come"
    FILLED_TOO_EARLY = "filled again although its copy is still to come"


class Moment(NamedTuple):
    """A step of the schedule that is worth a picture.

    Attributes
    ----------
    number : int
        Of the step in the package's docstring.
    holders : tuple of Holder
        One for each buffer.
    """

    number: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True)
class Figures:
    """The figures of the published table, which says what each means: see `gpuq.race`."""

    wait_hook_calls: int | None
    ready_after_a: int
    scheduled_after_a: int
    premature_ready_buffers: int
    first_lease_still_pending: bool
    bad_samples: int
    bad_uint64_values: int
    watchdog_fired: bool


class WrongBlock(NamedTuple):
    """A block that arrived wrong: the words that it should hold and the first one that differs."""

    sample: int
    expected: int
    found: int


@dataclass(frozen=True)
class Run:
    """A pool's run.

    Attributes
    ----------
    pool : str
    figures : Figures
    wrong : tuple of WrongBlock
    samples : int
        How many blocks there were in all.
    rows : tuple of Row
    moments : tuple of Moment
    """

    pool: str
    figures: Figures
    wrong: tuple[WrongBlock, ...]
    samples: int
    rows: tuple[Row, ...]
    moments: tuple[Moment, ...]


class Board:
    """Takes notes from all threads of a run.

    Parameters
    ----------
    pool : str
    block_bytes : int
    """

    def __init__(self, pool: str, block_bytes: int) -> None:
        self.pool = pool
        self.rows: list[Row] = []
        self.moments: list[Moment] = []
        self._block_bytes = block_bytes
        self._leased_for: dict[int, int] = {}
        self._lock = threading.Lock()

    def note(
        self, event: str, buffer: int = NOTHING, sample: int = NOTHING, thread: str | None = None
    ) -> None:
        """Add a row; where no sample is given, it is the one that the buffer was leased for."""
        with self._lock:
            if event == "lease":
                self._leased_for[buffer] = sample
            elif sample == NOTHING:
                sample = self._leased_for.get(buffer, NOTHING)
            offset = NOTHING if sample == NOTHING else sample * self._block_bytes
            name = threading.current_thread().name if thread is None else thread
            self.rows.append(
                Row(self.pool, len(self.rows) + 1, name, event, buffer, offset, sample)
            )

    def keep(self, number: int, holders: Iterable[Holder]) -> None:
        """Keep a moment for the picture."""
        self.moments.append(Moment(number, tuple(holders)))


def write_trace(file: TextIO, runs: Iterable[Run]) -> None:
    """Write the rows of all runs as CSV; NOTHING becomes an empty field."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Row._fields)
    for run in runs:
        for row in run.rows:
            writer.writerow([_field(value) for value in row])


def _field(value: Any) -> Any:
    return "" if value == NOTHING else value

"""Gather: rows of a table in a file, by an array of indices, all of them in flight at once.

Every row is a counted request of its own, except that a run of consecutive indices is one
request: its rows are neighbours in the file and, since rows are gathered one behind the other,
in the destination too. So no ticket is held, and a block waits for one word. An index that is
out of range gets ``OUT_OF_BOUNDS`` and no read.

A counter says that something failed and not what. Then the runs are pulled once more, one by
one, and the rows of a run that fails, too: so each row has a status of its own.

All functions are block forms: every thread of the block must call them, and rank 0 does the work
(see `gpuq.kernels.scopes`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpuq.compiling import protocol
from gpuq.kernels.cooperation import block_broadcast, block_rank
from gpuq.kernels.counters import post_counted_at, wait_counter
from gpuq.kernels.queue import pull_at
from gpuq.layout import Status
from gpuq.ordering import as_signed

_MOST_BYTES = 1 << 62
_OK = int(Status.OK)
_PENDING = int(Status.PENDING)
_OUT_OF_BOUNDS = int(Status.OUT_OF_BOUNDS)
_BAD_OPTIONS = int(Status.BAD_OPTIONS)
_ABORTED = int(Status.ABORTED)


class Table(NamedTuple):
    """What a kernel is handed of a table of rows, made by ``loader.table(...)``.

    Attributes
    ----------
    source, destination : int
        Handles.
    start : int
        Byte of the file where row 0 begins.
    rows : int
    row_bytes : int
    counter : int
        Handle of worker 0's counter; the others' follow it.
    workers : int
    """

    source: int
    destination: int
    start: int
    rows: int
    row_bytes: int
    counter: int
    workers: int


@protocol
def run_length(indices: Any, first: Any, rows: Any) -> Any:
    """Return how many indices from `first` on are consecutive rows of the table; 0: not one."""
    index = as_signed(indices[first])
    if index < 0 or index >= rows:
        return 0
    length = 1
    while (
        first + length < len(indices)
        and index + length < rows
        and as_signed(indices[first + length]) == index + length
    ):
        length += 1
    return length


@protocol
def place_of(table: Any, row: Any) -> Any:
    """Return the byte of the destination where a row begins; -1, for which no room is, where none.

    A product beyond 64 bits would be the place of another row.
    """
    return row * table.row_bytes if 0 <= row <= _MOST_BYTES // table.row_bytes else -1


@protocol
def mark(statuses: Any, first: Any, length: Any, status: Any) -> None:
    """Give some rows a status."""
    for i in range(first, first + length):
        statuses[i] = status


@protocol
def post_runs(q: Any, table: Any, worker: Any, indices: Any, row: Any, statuses: Any) -> None:
    """Post all runs, counted by the worker's counter; the rows of those posted are PENDING."""
    refusal = _OK
    first = 0
    while first < len(indices):
        length = run_length(indices, first, table.rows)
        if length == 0:
            statuses[first] = _OUT_OF_BOUNDS
            first += 1
            continue
        if refusal == _OK:
            start = table.start + as_signed(indices[first]) * table.row_bytes
            refusal = post_counted_at(
                q,
                table.counter + worker,
                table.source,
                table.destination,
                place_of(table, row + first),
                start,
                start + length * table.row_bytes,
                worker,
            )
        mark(statuses, first, length, _PENDING if refusal == _OK else refusal)
        first += length


@protocol
def wait_for_runs(q: Any, table: Any, worker: Any, indices: Any, row: Any, statuses: Any) -> Any:
    """Wait for all that was posted and settle what is PENDING; return the first failure or OK."""
    posted = 0
    first = 0
    while first < len(indices):
        if statuses[first] == _PENDING:
            posted += 1
            first += run_length(indices, first, table.rows)
        else:
            first += 1
    outcome = wait_counter(q, table.counter + worker, posted)
    failure = _OK
    first = 0
    while first < len(indices):
        length = 1
        if statuses[first] == _PENDING:
            length = run_length(indices, first, table.rows)
            if outcome == _OK or outcome == _ABORTED:
                mark(statuses, first, length, outcome)
            else:
                settle_run(q, table, indices, row, statuses, first, length)
        for i in range(first, first + length):
            if failure == _OK and statuses[i] != _OK:
                failure = as_signed(statuses[i])
        first += length
    return failure


@protocol
def settle_run(
    q: Any, table: Any, indices: Any, row: Any, statuses: Any, first: Any, length: Any
) -> None:
    """Pull a run again, then each of its rows if it fails, and note the statuses."""
    # The first turn takes the run as one, the second row by row.
    step = length
    while True:
        status = _OK
        for i in range(first, first + length, step):
            start = table.start + as_signed(indices[i]) * table.row_bytes
            offset = place_of(table, row + i)
            end = start + step * table.row_bytes
            status = pull_at(q, table.source, table.destination, offset, start, end, i)
            mark(statuses, i, step, status)
        if step == 1 or status == _OK:
            return
        step = 1


@protocol
def can_gather(table: Any, worker: Any, indices: Any, statuses: Any) -> Any:
    """Whether the table has this worker, and each index a status."""
    return 0 <= worker < table.workers and len(indices) <= len(statuses)


@protocol
def post_gather(q: Any, table: Any, worker: Any, indices: Any, row: Any, statuses: Any) -> None:
    """Ask for rows like `gather`, without waiting for them: `wait_gather` does.

    In between, `indices` and `statuses` must stay as they are. A worker has one gather under way;
    who wants two uses two workers' numbers.
    """
    number = as_signed(worker)
    if block_rank() == 0 and can_gather(table, number, indices, statuses):
        post_runs(q, table, number, indices, as_signed(row), statuses)


@protocol
def wait_gather(q: Any, table: Any, worker: Any, indices: Any, row: Any, statuses: Any) -> Any:
    """Wait for what `post_gather` asked for with these arguments; return what `gather` does."""
    number = as_signed(worker)
    status = _BAD_OPTIONS
    if block_rank() == 0 and can_gather(table, number, indices, statuses):
        status = wait_for_runs(q, table, number, indices, as_signed(row), statuses)
    return block_broadcast(status)


@protocol
def gather(q: Any, table: Any, worker: Any, indices: Any, row: Any, statuses: Any) -> Any:
    """Gather rows of a table by their indices; row ``indices[i]`` lands in row ``row + i``.

    Parameters
    ----------
    q : Queue
    table : Table
        From ``loader.table(...)``.
    worker : int
        Number of the calling block, less than the table's workers.
    indices : array of int, one dimension
        Rows of the table. Runs of consecutive ones cost one request.
    row : int
        Row of the destination for the first.
    statuses : array of int, as long as `indices`
        Receives the `Status` of each row. ``OUT_OF_BOUNDS``: the table has no such row, or the
        destination no room for it.

    Returns
    -------
    int
        ``Status.OK`` when every row arrived, else the first row's status that did not; the same
        in every thread of the block. ``BAD_OPTIONS``: the table has no such worker, or
        `statuses` is too short; nothing was read.
    """
    post_gather(q, table, worker, indices, row, statuses)
    return wait_gather(q, table, worker, indices, row, statuses)

"""The schedule of `gpuq.race`, forced on each pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gpuq.host import staging as leases
from gpuq.race.board import Board, Figures, Run, WrongBlock
from gpuq.race.order import Actor, Stop, Watchdog
from gpuq.race.product import ProductPool
from gpuq.race.shared_event import SharedEventPool
from gpuq.race.stream import Gate, GatedStream, Layout

BLOCK_BYTES = 2 << 20
BUFFERS = 64
BATCH = 32
"""Copies are submitted when more than so many wait."""
FIRST_BATCH = BATCH + 1
LAST = BUFFERS + 2
"""The block that A waits to read, behind the 64 that fill all buffers and the 2 that B adds."""
VALUES = [*range(1, LAST + 1), 999]
"""What each block is to hold."""

PUBLISHED = {
    "original": Figures(2, 63, 0, 32, True, 1, 262144, False),
    "event-recheck": Figures(2, 30, 33, 0, False, 0, 0, False),
}
"""The figures that are known of the two forms of the shared event."""

POOLS = (*PUBLISHED, "gpuq")
WATCHDOG_SECONDS = 30.0


def run_race(
    block_bytes: int = BLOCK_BYTES,
    watchdog_seconds: float = WATCHDOG_SECONDS,
    leaves_gate_shut: bool = False,
) -> list[Run]:
    """Run the schedule against each pool, one after another; see `run_pool`."""
    return [run_pool(pool, block_bytes, watchdog_seconds, leaves_gate_shut) for pool in POOLS]


def run_pool(
    pool: str,
    block_bytes: int = BLOCK_BYTES,
    watchdog_seconds: float = WATCHDOG_SECONDS,
    leaves_gate_shut: bool = False,
) -> Run:
    """Run the schedule against one pool.

    Parameters
    ----------
    pool : {"original", "event-recheck", "gpuq"}
    block_bytes : int
        Bytes of a block and of a buffer; a multiple of 4096.
    watchdog_seconds : float
        When the watchdog opens the gates, from the begin of the schedule.
    leaves_gate_shut : bool
        Leave gate 1 shut for the watchdog to open.

    Raises
    ------
    StuckError
        The schedule did not end although the gates had been opened.
    """
    destination = np.zeros((LAST + 1, block_bytes // 8), dtype=np.uint64)
    board = Board(pool, block_bytes)
    watchdog = Watchdog(watchdog_seconds)

    def open_first(stream: GatedStream, gate: Gate) -> None:
        if not leaves_gate_shut:
            stream.open(gate)

    if pool == "gpuq":
        figures = _run_product(board, watchdog, destination, open_first)
    else:
        rechecks = pool == "event-recheck"
        figures = _run_model(board, watchdog, destination, open_first, rechecks)
    wrong = tuple(_wrong_blocks(destination))
    figures = replace(
        figures,
        bad_samples=len(wrong),
        bad_uint64_values=sum(
            int(np.count_nonzero(destination[block.sample] != block.expected)) for block in wrong
        ),
        watchdog_fired=watchdog.has_fired,
    )
    return Run(pool, figures, wrong, LAST + 1, tuple(board.rows), tuple(board.moments))


def faults(runs: list[Run]) -> list[str]:
    """Say what is not as it must be: a published figure, a fault of gpuq, a watchdog."""
    found = [f"{run.pool}: the watchdog fired" for run in runs if run.figures.watchdog_fired]
    if found:
        return found
    for run in runs:
        if run.pool in PUBLISHED:
            if run.figures != PUBLISHED[run.pool]:
                found.append(f"{run.pool}: other figures than the published ones")
        elif (
            run.wrong
            or run.figures.premature_ready_buffers
            or run.figures.first_lease_still_pending
        ):
            found.append(f"{run.pool}: a buffer was used again too early")
    return found


Opening = Callable[[GatedStream, Gate], None]


def _run_model(
    board: Board, watchdog: Watchdog, destination: Any, open_first: Opening, rechecks: bool
) -> Figures:
    memory = np.zeros((BUFFERS, destination.shape[1]), dtype=np.uint64)
    layout = Layout(memory.ctypes.data, destination.ctypes.data, destination[0].nbytes)
    stream = GatedStream(layout, board)
    a_stops = Stop(watchdog)

    def wait_hook() -> None:
        # Only the first sleep ends in a stop: that of A.
        if not a_stops.reached.is_set():
            a_stops.stop()

    pool = SharedEventPool(
        stream, board, buffers=BUFFERS, batch=BATCH, rechecks=rechecks, wait_hook=wait_hook
    )

    def fill(buffer: int, sample: int) -> None:
        memory[buffer] = VALUES[sample]
        board.note("fill", buffer, sample)

    def read(sample: int) -> None:
        buffer = pool.borrow(sample)
        fill(buffer, sample)
        pool.copy_out(buffer, sample)

    with _cast(watchdog, stream) as (a, b, _):
        gate_1 = stream.shut()
        for sample in range(BUFFERS):
            (a, b)[sample % 2].do(read, sample)
        gate_2 = stream.shut()

        borrowed = a.begin(pool.borrow, LAST)
        watchdog.wait(stream.somebody_sleeps)
        board.keep(1, pool.holders())

        open_first(stream, gate_1)
        watchdog.wait(a_stops.reached)
        board.keep(2, pool.holders())

        b.do(read, BUFFERS)
        b.do(read, BUFFERS + 1)
        board.keep(3, pool.holders())

        a_stops.go_on()
        buffer = watchdog.result(borrowed)
        pending = stream.pending_buffers()
        figures = Figures(
            wait_hook_calls=pool.wait_hook_calls,
            ready_after_a=len(pool.ready),
            scheduled_after_a=len(pool.scheduled),
            premature_ready_buffers=len(pending.intersection(pool.ready)),
            first_lease_still_pending=buffer in pending,
            bad_samples=0,
            bad_uint64_values=0,
            watchdog_fired=False,
        )
        a.do(fill, buffer, LAST)
        board.keep(4, pool.holders())

        stream.open(gate_2)
        a.do(pool.copy_out, buffer, LAST)
        a.do(pool.flush)
    return figures


def _run_product(
    board: Board, watchdog: Watchdog, destination: Any, open_first: Opening
) -> Figures:
    pool = ProductPool(board, watchdog, BUFFERS, destination, VALUES)
    stream = pool.stream
    try:
        pool.start()
        with _cast(watchdog, stream) as (a, b, poller):
            gate_1 = stream.shut()
            for sample in range(BUFFERS):
                (a, b)[sample % 2].do(pool.ask, sample)
                poller.do(pool.poll_until, partial(stream.has_taken, sample + 1))
                if sample + 1 == FIRST_BATCH:
                    gate_2 = stream.shut()

            # The one place where another thread can overtake A: its ticket is taken, and what
            # it asks for not yet published.
            ticket = a.do(pool.claim, LAST)
            b.do(pool.ask, BUFFERS)
            b.do(pool.ask, BUFFERS + 1)
            poller.do(pool.poll_until, partial(pool.has_admitted, BUFFERS + 2))
            board.keep(1, pool.holders())

            open_first(stream, gate_1)
            board.keep(2, pool.holders())

            poller.do(pool.poll_until, partial(stream.has_taken, BUFFERS + 2))
            board.keep(3, pool.holders())

            a.do(pool.publish, ticket, LAST)
            poller.do(pool.poll_until, partial(pool.has_lease, LAST))
            pending = stream.pending_buffers()
            figures = Figures(
                wait_hook_calls=None,
                ready_after_a=len(pool.in_phase(leases.FREE)),
                scheduled_after_a=len(pool.in_phase(leases.COPYING)),
                premature_ready_buffers=len(pending & pool.in_phase(leases.FREE)),
                first_lease_still_pending=pool.lease_of(LAST) in pending,
                bad_samples=0,
                bad_uint64_values=0,
                watchdog_fired=False,
            )
            board.keep(4, pool.holders())

            poller.do(pool.poll_until, partial(stream.has_taken, LAST + 1))
            stream.open(gate_2)
            poller.do(pool.poll_until, partial(pool.has_answered, LAST + 1))
            pool.finish()
    finally:
        pool.close()
    return figures


@contextmanager
def _cast(watchdog: Watchdog, stream: GatedStream) -> Iterator[tuple[Actor, Actor, Actor]]:
    """Give the threads A, B and the poller's, with the watchdog behind them."""
    watchdog.releases(stream.release)
    # What is entered last ends first: the gates open before the threads are let go.
    with (
        Actor("A", watchdog) as a,
        Actor("B", watchdog) as b,
        Actor("poller", watchdog) as poller,
        watchdog,
    ):
        yield a, b, poller


def _wrong_blocks(destination: Any) -> Iterator[WrongBlock]:
    for sample, expected in enumerate(VALUES):
        words = destination[sample]
        differing = words != expected
        if differing.any():
            yield WrongBlock(sample, expected, int(words[int(differing.argmax())]))


assert len(VALUES) == LAST + 1
assert FIRST_BATCH < BUFFERS < 2 * FIRST_BATCH

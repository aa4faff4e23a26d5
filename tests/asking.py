"""Requests one by one, with a bound on every wait, and a destination that shows every byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from conftest import until
from kernels import Compiled

import gpuq
from gpuq.layout import Status

GUARD = 0xEE
_EDGE = 64


class Asker:
    """Asks a loader for bytes, as a kernel would.

    Parameters
    ----------
    loader : Loader
    room : int
        Bytes of the destination.
    """

    def __init__(self, loader: gpuq.Loader, room: int) -> None:
        self.loader = loader
        self._array = np.full(room + 2 * _EDGE, GUARD, dtype=np.uint8)
        self._destination = loader.register(self._array[_EDGE:-_EDGE])

    def post(self, source: gpuq.Source, start: int, end: int, offset: int = 0) -> int:
        """Post a request; return its ticket."""
        handles = source.handle, self._destination.handle
        ticket = int(Compiled.try_post_at(self.loader.queue, *handles, offset, start, end, 0))
        assert ticket >= 0
        return ticket

    def is_answered(self, ticket: int) -> bool:
        return bool(Compiled.poll(self.loader.queue, ticket) != Status.PENDING)

    def answer(self, ticket: int) -> tuple[Status, int]:
        """Wait for an answer; return its status and errno."""
        until(lambda: self.is_answered(ticket), f"an answer to ticket {ticket}")
        number = int(Compiled.errno_of(self.loader.queue, ticket))
        return Status(Compiled.wait(self.loader.queue, ticket)), number

    def pull(
        self, source: gpuq.Source, rows: Sequence[tuple[int, int, int]], depth: int = 8
    ) -> list[Status]:
        """Pull rows of (start, end, offset), some at once; return their statuses."""
        statuses = []
        for first in range(0, len(rows), depth):
            tickets = [self.post(source, *row) for row in rows[first : first + depth]]
            statuses += [self.answer(ticket)[0] for ticket in tickets]
        return statuses

    def taken(self) -> dict[int, int]:
        """Return where in the destination something stands, and how much; clear it."""
        changed = np.flatnonzero(self._array != GUARD) - _EDGE
        self._array[:] = GUARD
        runs = np.split(changed, np.flatnonzero(np.diff(changed) != 1) + 1)
        return {int(run[0]): len(run) for run in runs if len(run)}

    def assert_holds(self, rows: Sequence[tuple[int, int, int]], data: bytes) -> None:
        """Assert that the destination holds these slices of `data` and nothing else; clear it."""
        expected = np.full_like(self._array, GUARD)
        for start, end, offset in rows:
            place = slice(_EDGE + offset, _EDGE + offset + end - start)
            expected[place] = np.frombuffer(data[start:end], dtype=np.uint8)
        np.testing.assert_array_equal(self._array, expected)
        self._array[:] = GUARD

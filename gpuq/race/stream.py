"""One copy stream in software: what was given to it ends in that order, and gates hold it.

The same stream serves all pools; how copies and events behave is the CUDA Driver API's contract
of cuMemcpyHtoDAsync, cuEventRecord, cuEventQuery and cuEventSynchronize.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

from gpuq.race.board import Board


@dataclass(frozen=True)
class Layout:
    """Where the bytes are: blocks in staging buffers and in the destination.

    Attributes
    ----------
    staging, destination : int
        Addresses.
    block_bytes : int
    """

    staging: int
    destination: int
    block_bytes: int

    def buffer_at(self, address: int) -> int:
        """Return the number of the staging buffer at an address."""
        return (address - self.staging) // self.block_bytes

    def sample_at(self, address: int) -> int:
        """Return the number of the block whose place in the destination is at an address."""
        return (address - self.destination) // self.block_bytes


@dataclass(eq=False)
class Gate:
    """Holds what was submitted behind it until it is opened."""

    number: int
    is_open: bool


@dataclass(frozen=True)
class _Copy:
    to: int
    origin: int
    nbytes: int


class _Record:
    """Where an event was recorded."""


class GatedStream:
    """Copies, records of events, and gates, in one order.

    Parameters
    ----------
    layout : Layout
    board : Board
    """

    def __init__(self, layout: Layout, board: Board) -> None:
        self.layout = layout
        self.somebody_sleeps = threading.Event()
        """Set once a thread sleeps on an event."""
        self._board = board
        self._operations: list[Gate | _Copy | _Record] = []
        self._ended = 0
        self._copies = 0
        self._gates = 0
        self._is_released = False
        self._changed = threading.Condition()

    # --- gates ---

    def shut(self) -> Gate:
        """Put a shut gate behind all that was submitted."""
        with self._changed:
            self._gates += 1
            gate = Gate(self._gates, is_open=self._is_released)
            self._operations.append(gate)
            self._board.note(f"shut_gate_{gate.number}", thread="schedule")
            self._advance()
            return gate

    def open(self, gate: Gate, thread: str = "schedule") -> None:
        """Open a gate; what it held ends before this returns."""
        with self._changed:
            if not gate.is_open:
                gate.is_open = True
                self._board.note(f"open_gate_{gate.number}", thread=thread)
                self._advance()

    def release(self, thread: str) -> None:
        """Open all gates, those that are still to be shut included."""
        with self._changed:
            self._is_released = True
            for gate in [one for one in self._operations if isinstance(one, Gate)]:
                self.open(gate, thread)

    # --- copies and events ---

    def copy(self, to: int, origin: int, nbytes: int) -> None:
        """Submit a copy."""
        with self._changed:
            self._operations.append(_Copy(to, origin, nbytes))
            self._copies += 1
            buffer, sample = self.layout.buffer_at(origin), self.layout.sample_at(to)
            self._board.note("submit_copy", buffer, sample)
            self._advance()

    def has_taken(self, copies: int) -> bool:
        """Say whether so many copies, or more, were submitted."""
        with self._changed:
            return self._copies >= copies

    def record(self) -> int:
        """Put a mark behind all that was submitted and return it."""
        with self._changed:
            self._operations.append(_Record())
            self._advance()
            return len(self._operations)

    def has_reached(self, mark: int) -> bool:
        """Say whether all before a mark has ended."""
        with self._changed:
            return self._ended >= mark

    def sleep_until(self, mark: int) -> None:
        """Return when all before a mark has ended."""
        with self._changed:
            if self._ended < mark:
                self._board.note("sleep")
                self.somebody_sleeps.set()
                self._changed.wait_for(lambda: self._ended >= mark)

    def pending_buffers(self) -> set[int]:
        """Return the buffers from which a copy is still to come: the truth about them."""
        with self._changed:
            return {
                self.layout.buffer_at(operation.origin)
                for operation in self._operations[self._ended :]
                if isinstance(operation, _Copy)
            }

    def _advance(self) -> None:
        """End what no gate holds, in order."""
        while self._ended < len(self._operations):
            operation = self._operations[self._ended]
            if isinstance(operation, Gate) and not operation.is_open:
                break
            if isinstance(operation, _Copy):
                ctypes.memmove(operation.to, operation.origin, operation.nbytes)
                buffer = self.layout.buffer_at(operation.origin)
                self._board.note(
                    "end_copy", buffer, self.layout.sample_at(operation.to), thread="stream"
                )
            self._ended += 1
        self._changed.notify_all()


class StreamEvent:
    """An event of a stream; to record it again is to forget where it was recorded before.

    Parameters
    ----------
    stream : GatedStream
    """

    def __init__(self, stream: GatedStream) -> None:
        self._stream = stream
        self._mark = 0

    def record(self) -> None:
        """Record it behind all that was submitted."""
        self._mark = self._stream.record()

    def is_complete(self) -> bool:
        """Say whether all before the last record has ended; true where it was never recorded."""
        return self._stream.has_reached(self._mark)

    def synchronize(self) -> None:
        """Sleep until all before the record that is the last one *now* has ended."""
        self._stream.sleep_until(self._mark)

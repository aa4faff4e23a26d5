"""Pollers and loaders whose copies go through the real CUDA copier to a recording driver."""

from __future__ import annotations

from typing import Any

import numpy as np
from stepping import GUARD, Stepper

import gpuq
from gpuq.host import poller as serving
from gpuq.host import records, tables
from gpuq.host import staging as leases
from gpuq.host.copier import DEVICE_MEMORY
from gpuq.layout import FLAG_WORDS
from gpuq.testing.recording_driver import RecordingDriver


def flag_address(queue: gpuq.Queue, ticket: int) -> int:
    """Return where the completion flag of a ticket stands."""
    slot = ticket & (queue.capacity - 1)
    return int(queue.flags.ctypes.data) + slot * FLAG_WORDS * 8


class CudaStepper(Stepper):
    """A poller over scripted reads and recorded copies, its destination in "device" memory.

    Parameters
    ----------
    driver : RecordingDriver
    plain : bool
        Whether the poller runs as the Python that it is written in, for copiers of a test.
    copier : NamedTuple, optional
        Instead of the real one over `driver`.
    **given
        For `Stepper`.
    """

    def __init__(
        self,
        data: Any,
        driver: RecordingDriver,
        *,
        plain: bool = False,
        copier: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(data, **given)
        self.driver = driver
        buffers = len(self.staging.free)
        self.poller = self.poller._replace(
            copier=driver.copier(buffers) if copier is None else copier
        )
        self.room_address = self.room.ctypes.data + 64
        self.destination = self.destinations.publish(
            self.destinations.reserve(),
            {
                tables.ADDRESS: self.room_address,
                tables.NBYTES: len(self.bytes),
                tables.KIND: DEVICE_MEMORY,
            },
        )
        self._poll_once = serving.poll_once.py_func if plain else serving.poll_once

    def step(self) -> int:
        """Let the poller do one pass."""
        return int(self._poll_once(self.poller))

    def post(self, start: int, end: int, offset: int = 0, **words: int) -> int:
        """Post a request and let the driver watch the bytes that it asks for."""
        ticket = super().post(start, end, offset, **words)
        begin = self.room_address + offset
        self.driver.watch(begin, begin + end - start, flag_address(self.queue, ticket), ticket + 1)
        return ticket

    def holds(self, start: int, end: int, offset: int = 0) -> bool:
        """Say whether the destination holds these bytes of the source."""
        there = self.bytes[offset : offset + end - start]
        return bool(np.array_equal(there, self.data[start:end]))

    def leases_in(self, phase: int) -> set[int]:
        """Return the leases that are in a phase."""
        return {int(n) for n in np.flatnonzero(self.staging.leases[:, leases.PHASE] == phase)}

    @property
    def failure(self) -> int:
        """The errno that ended the queue; 0 while none."""
        return int(self.poller.cursor[records.FAILURE])


def guarded(nbytes: int) -> Any:
    """Return an array of `nbytes` inside one with 64 guard bytes on each side."""
    return np.full(nbytes + 128, GUARD, dtype=np.uint8)[64:-64]


def assert_guards(array: Any) -> None:
    """Assert that nothing was written beside a `guarded` array."""
    whole = array.base
    assert (whole[:64] == GUARD).all()
    assert (whole[-64:] == GUARD).all()

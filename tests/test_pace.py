"""How much the poller does in a pass, and how long it sleeps between passes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import njit
from stepping import DATA, Stepper

from gpuq.host import poller as serving
from gpuq.host import records
from gpuq.host.libc import thread_cpu_ns
from gpuq.testing import readers

US = 1_000


@njit(nogil=True)
def read_thread_cpu() -> Any:
    """Read the clock as compiled code does."""
    return thread_cpu_ns()


@njit(nogil=True)
def spin_ns(duration: Any) -> None:
    """Compute until this thread has used so much processor time."""
    begun = thread_cpu_ns()
    while thread_cpu_ns() - begun < duration:
        pass


@pytest.fixture
def stepper() -> Iterator[Stepper]:
    made = Stepper(DATA, capacity=16, buffers=16)
    yield made
    made.close()


def test_the_first_pass_over_a_lot_takes_one_read_the_next_two_then_four(stepper: Stepper) -> None:
    for lot in range(2):
        stepper.reader.words[readers.GATE] = 1
        tickets = [stepper.post(512 * i, 512 * (i + 1), 512 * i) for i in range(15)]
        stepper.run()
        stepper.reader.words[readers.GATE] = 0
        in_flight = []
        while stepper.poller.cursor[records.READS] > 0:
            stepper.step()
            in_flight.append(int(stepper.poller.cursor[records.READS]))
        assert in_flight == [14, 12, 8, 0], f"lot {lot}"
        assert {int(stepper.consume(ticket)) for ticket in tickets} == {0}
        stepper.run()
    stepper.assert_at_rest()


class Clock:
    """A poller's words and a clock that a test moves; it notes how long the poller sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reads: int = 32) -> None:
        cursor = np.zeros(records.CURSOR_WORDS, dtype=np.int64)
        cursor[records.READS] = reads
        cursor[records.READ_BYTES] = reads * 4096
        self.poller: Any = SimpleNamespace(cursor=cursor, reader=None)
        self.now = 1_000
        self.slept: list[int] = []
        monkeypatch.setattr(serving, "clock_ns", lambda: self.now)
        monkeypatch.setattr(serving, "await_read", self._sleep)
        monkeypatch.setattr(serving, "relax", lambda _spins: None)

    def _sleep(self, _reader: Any, timeout_ns: int) -> None:
        self.slept.append(timeout_ns)

    def silence(self, lasted: int) -> None:
        """Let the poller find nothing to do for so many nanoseconds."""
        for idle in range(1, serving._YIELD_AFTER + 2):
            serving.rest(self.poller, idle)
        self.now += lasted
        serving.note_silence(self.poller)


def test_the_poller_sleeps_through_part_of_a_silence_that_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    for _ in range(50):
        clock.silence(200 * US)
    assert clock.slept[0] >= 60 * US
    assert 110 * US < clock.slept[-1] <= 125 * US
    # The poller watched some of them to their end before it trusted them.
    assert len(clock.slept) < 45


def test_one_short_silence_ends_the_sleep_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for _ in range(50):
        clock.silence(200 * US)
    clock.silence(20 * US)
    before = len(clock.slept)
    clock.silence(200 * US)
    assert len(clock.slept) == before


@pytest.mark.parametrize("lasted", [5_000 * US, 3_600_000_000 * US])
def test_a_silence_of_seconds_is_not_slept_through(
    monkeypatch: pytest.MonkeyPatch, lasted: int
) -> None:
    """A stopped process sees one. A time-out is less than a second, and a post waits for it."""
    clock = Clock(monkeypatch)
    for _ in range(50):
        clock.silence(lasted)
    assert 900 * US < max(clock.slept) <= 1000 * US


def test_a_poller_does_not_sleep_while_a_copy_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a copy wakes nobody."""
    clock = Clock(monkeypatch)
    clock.poller.cursor[records.COPIES] = 1
    for _ in range(50):
        clock.silence(200 * US)
    clock.poller.cursor[records.READ_BYTES] <<= 8
    clock.silence(200 * US)
    assert clock.slept == []


def test_a_poller_with_no_read_in_flight_learns_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, reads=0)
    for _ in range(50):
        clock.silence(200 * US)
    assert clock.slept == []
    assert clock.poller.cursor[records.SILENCE_NS] == 0


def test_the_first_pass_over_a_lot_of_large_reads_takes_what_its_bytes_allow() -> None:
    data = np.arange(1 << 20, dtype=np.int64).view(np.uint8)[: 1 << 20]
    made = Stepper(
        data,
        capacity=16,
        buffers=16,
        buffer_bytes=64 << 10,
        straight_bytes=64 << 10,
        alignment=1,
        room=1 << 20,
    )
    made.reader.words[readers.GATE] = 1
    for i in range(15):
        made.post((64 << 10) * i, (64 << 10) * (i + 1), (64 << 10) * i)
    made.run()
    made.reader.words[readers.GATE] = 0
    made.step()
    left = int(made.poller.cursor[records.READS])
    assert 15 - left == (256 << 10) // (64 << 10)
    made.run()
    made.assert_at_rest()
    np.testing.assert_array_equal(made.bytes[: 15 << 16], data[: 15 << 16])
    made.close()


@pytest.mark.parametrize(
    ("wake_up", "sleep"), [(3 * US, 200 * US), (9 * US, 540 * US), (90 * US, 2000 * US)]
)
def test_an_idle_poller_sleeps_as_long_as_its_wake_ups_cost_a_sixtieth_of_a_core(
    monkeypatch: pytest.MonkeyPatch, wake_up: int, sleep: int
) -> None:
    clock = Clock(monkeypatch, reads=0)
    slept: list[int] = []
    monkeypatch.setattr(serving, "sleep_ns", slept.append)
    monkeypatch.setattr(serving, "thread_cpu_ns", lambda: wake_up * len(slept))
    for idle in range(1, 10_000):
        serving.rest(clock.poller, idle)
    assert max(slept[: serving._SLEEP_LONG_AFTER - serving._SLEEP_AFTER]) == 100 * US
    assert slept[-1] == sleep


def test_a_poller_measures_its_own_wake_ups() -> None:
    """Compiled as it is served: the clock is the thread's own."""
    before = read_thread_cpu()
    spin_ns(20_000_000)
    used = read_thread_cpu() - before
    assert used >= 20_000_000

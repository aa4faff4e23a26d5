"""The compiled CUDA copier, pass by pass, over a driver that is as late as CUDA may be."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from recording import CudaStepper

from gpuq.compiling import implements
from gpuq.host import records, tables
from gpuq.host import staging as leases
from gpuq.host.copier import (
    COPY_DONE,
    COPY_UNDER_WAY,
    HOST_MEMORY,
    CudaCopier,
    describe_failure,
    look_at_copy,
    start_copy,
)
from gpuq.host.driver import (
    EVENT_QUERY,
    EVENT_RECORD,
    INVALID_VALUE,
    MEMCPY_HTOD_ASYNC,
    OUT_OF_MEMORY,
    SUCCESS,
    call_driver,
)
from gpuq.layout import STATE, State, Status
from gpuq.testing import readers
from gpuq.testing.recording_driver import (
    ILLEGAL_ADDRESS,
    LAUNCH_FAILED,
    RecordingDriver,
)

SIZE = 64 << 10
BUFFER = 4096


@pytest.fixture(scope="module")
def data() -> Any:
    return np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


def run(stepper: CudaStepper, idle_passes: int = 1) -> None:
    """Step until so many passes in a row had nothing to do."""
    idle = 0
    for _ in range(10_000):
        idle = idle + 1 if stepper.step() == 0 else 0
        if idle == idle_passes:
            return
    raise AssertionError("the poller is not done")


# --- order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True], ids=["compiled", "plain"])
def test_a_request_is_not_complete_before_its_copy_was_seen_complete(data, driver, plain):
    stepper = CudaStepper(data, driver, plain=plain)
    driver.hold()
    ticket = stepper.post(1001, 4001, 7)
    run(stepper)
    assert driver.calls_of(MEMCPY_HTOD_ASYNC) == driver.calls_of(EVENT_RECORD) == 1
    assert stepper.status(ticket) == Status.PENDING
    assert not stepper.holds(1001, 4001, 7)

    driver.allow()
    run(stepper)
    assert stepper.status(ticket) == Status.OK
    stepper.assert_only(7, data[1001:4001])
    stepper.assert_at_rest()
    assert driver.faults() == []


def test_all_pieces_of_a_request_are_seen_complete_before_it_is(data, driver):
    stepper = CudaStepper(data, driver, buffers=8)
    driver.hold()
    start, end = 100, 100 + 5 * BUFFER
    ticket = stepper.post(start, end)
    run(stepper)
    pieces = driver.calls_of(MEMCPY_HTOD_ASYNC)
    assert pieces == 6, "an unaligned begin makes one piece more"
    for allowed in range(1, pieces + 1):
        assert stepper.status(ticket) == Status.PENDING
        driver.allow(allowed)
        run(stepper)
    assert stepper.status(ticket) == Status.OK
    stepper.assert_only(0, data[start:end])
    assert driver.faults() == []


def test_no_more_copies_than_buffers_are_under_way_and_each_end_starts_one(data, driver):
    stepper = CudaStepper(data, driver, buffers=4, capacity=32)
    driver.hold()
    slices = [(i * 1500 + 1, i * 1500 + 1400) for i in range(20)]
    tickets = [stepper.post(start, end, start) for start, end in slices]
    run(stepper)
    for done in range(len(slices)):
        under_way = min(4, len(slices) - done)
        assert driver.calls_of(MEMCPY_HTOD_ASYNC) == done + under_way
        assert len(stepper.leases_in(leases.COPYING)) == under_way
        completed = [stepper.status(ticket) == Status.OK for ticket in tickets]
        assert sum(completed) == done
        driver.allow(done + 1)
        run(stepper)
    assert all(stepper.status(ticket) == Status.OK for ticket in tickets)
    assert all(stepper.holds(start, end, start) for start, end in slices)
    stepper.assert_at_rest()
    assert driver.faults() == []


def test_a_buffer_goes_to_its_next_read_only_when_its_own_copy_was_seen_complete(data, driver):
    """Copies end newest first; the reads that follow go to exactly the buffers that came free."""
    stepper = CudaStepper(data, driver, buffers=4, capacity=16)
    driver.unordered()
    tickets = [stepper.post(i * 4096, i * 4096 + 4000, i * 4096) for i in range(8)]
    run(stepper)
    read_into = [int(lease) for lease in stepper.log()[:, readers.LEASE]]
    assert sorted(read_into) == [0, 1, 2, 3]
    for copy in (3, 1, 2, 0):
        before = len(stepper.log())
        driver.allow_copy(copy)
        run(stepper)
        assert stepper.status(tickets[copy]) == Status.OK
        assert stepper.holds(copy * 4096, copy * 4096 + 4000, copy * 4096)
        new = [int(lease) for lease in stepper.log()[before:, readers.LEASE]]
        assert new == [read_into[copy]], "another buffer than the one whose copy ended"
    for copy in range(4, 8):
        driver.allow_copy(copy)
    run(stepper)
    assert [stepper.status(ticket) for ticket in tickets] == [Status.OK] * 8
    assert driver.faults() == []


def test_two_queues_on_two_streams_end_in_any_order(data, driver):
    steppers = [CudaStepper(data, driver) for _ in range(2)]
    driver.unordered()
    tickets = []
    for i in range(3):
        for stepper in steppers:
            tickets.append((stepper, stepper.post(i * 5000, i * 5000 + 3000, i * 5000), i * 5000))
            run(stepper)
    assert {call.stream for call in driver.log()} == {0, 1}
    pending = set(range(6))
    for copy in (5, 0, 3, 4, 1, 2):
        driver.allow_copy(copy)
        for stepper in steppers:
            run(stepper)
        pending.remove(copy)
        for number, (stepper, ticket, start) in enumerate(tickets):
            expected = Status.PENDING if number in pending else Status.OK
            assert stepper.status(ticket) == expected
            assert stepper.holds(start, start + 3000, start) == (number not in pending)
    assert driver.faults() == []


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_ends_brings_every_byte(data, driver, seed):
    choice = random.Random(seed)
    stepper = CudaStepper(data, driver, buffers=3, capacity=16)
    driver.unordered()
    offset = 0
    posted = []
    while len(posted) < 16 and offset < SIZE - 9000:
        start = choice.randrange(SIZE - 9000)
        nbytes = choice.choice([1, 7, 511, 512, 513, 4095, 4096, 4097, 9000])
        posted.append((stepper.post(start, start + nbytes, offset), start, start + nbytes, offset))
        offset += nbytes + choice.randrange(64)
    ended: set[int] = set()
    run(stepper)
    while waiting := set(range(driver.calls_of(MEMCPY_HTOD_ASYNC))) - ended:
        copy = choice.choice(sorted(waiting))
        driver.allow_copy(copy)
        ended.add(copy)
        run(stepper)
    for ticket, start, end, to in posted:
        assert stepper.status(ticket) == Status.OK
        assert stepper.holds(start, end, to)
    stepper.assert_at_rest()
    assert driver.faults() == []


def test_bytes_are_counted_when_they_arrived_and_not_before(data, driver):
    stepper = CudaStepper(data, driver)
    driver.hold()
    stepper.post(0, 3000)
    run(stepper)
    assert stepper.poller.statistics[records.STATISTICS_BYTES] == 0
    driver.allow()
    run(stepper)
    assert stepper.poller.statistics[records.STATISTICS_BYTES] == 3000


def test_mapped_host_memory_is_filled_by_the_poller_itself(data, driver):
    stepper = CudaStepper(data, driver)
    mapped = stepper.destinations.publish(
        stepper.destinations.reserve(),
        {
            tables.ADDRESS: stepper.room_address,
            tables.NBYTES: len(stepper.bytes),
            tables.KIND: HOST_MEMORY,
        },
    )
    ticket = stepper.post(11, 3011, 5, destination=mapped)
    run(stepper)
    assert stepper.status(ticket) == Status.OK
    stepper.assert_only(5, data[11:3011])
    assert driver.calls == 0


# --- failing calls ---------------------------------------------------------------------------

REFUSALS = [INVALID_VALUE, OUT_OF_MEMORY]


@pytest.mark.parametrize("result", REFUSALS)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_refused_copy_fails_its_request_alone(data, driver, result, call):
    stepper = CudaStepper(data, driver)
    driver.fail(MEMCPY_HTOD_ASYNC, call, result)
    tickets = [stepper.post(i * 4000, i * 4000 + 3000, i * 4000) for i in range(4)]
    run(stepper)
    copies = [c for c in driver.log() if c.kind == MEMCPY_HTOD_ASYNC]
    refused = next(i for i, c in enumerate(copies) if c.result != SUCCESS)
    assert refused == call - 1
    for number, ticket in enumerate(tickets):
        expected = Status.COPY_FAILED if number == refused else Status.OK
        assert stepper.status(ticket) == expected
        assert stepper.holds(number * 4000, number * 4000 + 3000, number * 4000) == (
            number != refused
        )
    assert stepper.failure == 0
    assert int(stepper.poller.copier.words[0]) == result
    assert describe_failure(stepper.poller.copier, 5) == "the reader failed: Input/output error"
    stepper.assert_at_rest()
    assert driver.faults() == []


def test_a_request_with_one_refused_piece_waits_for_its_other_copies(data, driver):
    """The completion is the last thing that happens: pieces under way end before it."""
    stepper = CudaStepper(data, driver, buffers=4)
    driver.hold()
    driver.fail(MEMCPY_HTOD_ASYNC, 3, INVALID_VALUE)
    ticket = stepper.post(0, 4 * BUFFER)
    run(stepper)
    assert stepper.status(ticket) == Status.PENDING, "copies of it are still under way"
    assert len(stepper.leases_in(leases.COPYING)) == 2
    driver.allow()
    run(stepper)
    assert stepper.status(ticket) == Status.COPY_FAILED
    stepper.assert_at_rest()
    assert driver.faults() == []


UNCERTAIN = [
    pytest.param(kind, result, sticky, id=f"{name}-{result}{'-sticky' if sticky else ''}")
    for kind, name in (
        (MEMCPY_HTOD_ASYNC, "memcpy"),
        (EVENT_RECORD, "record"),
        (EVENT_QUERY, "query"),
    )
    for result, sticky in (
        (INVALID_VALUE, False),
        (OUT_OF_MEMORY, False),
        (ILLEGAL_ADDRESS, True),
        (LAUNCH_FAILED, True),
        (ILLEGAL_ADDRESS, False),
    )
    if not (kind == MEMCPY_HTOD_ASYNC and result in REFUSALS)
]


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize(("kind", "result", "sticky"), UNCERTAIN)
def test_where_nobody_can_know_the_buffer_is_quarantined_and_the_queue_ends(
    data, driver, kind, result, sticky, call
):
    stepper = CudaStepper(data, driver, buffers=4, capacity=8)
    driver.fail(kind, call, result, sticky=sticky)
    tickets = [stepper.post(i * 4000, i * 4000 + 3000, i * 4000) for i in range(8)]
    while stepper.failure == 0:
        assert stepper.step() > 0, "the driver's error was not noticed"
    assert int(stepper.queue.control[STATE]) == State.ABORTED
    assert describe_failure(stepper.poller.copier, 5).endswith(f"CUresult {result}")
    quarantined = stepper.leases_in(leases.QUARANTINED)
    assert quarantined

    # Whatever the driver says later, nothing comes from these buffers or into them any more.
    calls, reads = driver.calls, len(stepper.log())
    for _ in range(20):
        stepper.step()
    assert {c.kind for c in driver.log()[calls:]} <= {EVENT_QUERY}, "a copy after the end"
    assert len(stepper.log()) == reads, "a read after the end"
    assert quarantined <= stepper.leases_in(leases.QUARANTINED)
    free = {int(lease) for lease in stepper.staging.free[: stepper.free_leases]}
    assert not free & stepper.leases_in(leases.QUARANTINED)
    assert stepper.poller.statistics[records.STATISTICS_QUARANTINED] == len(
        stepper.leases_in(leases.QUARANTINED)
    )
    # Nobody is told OK whose bytes are not there; those of unknown fate are told nothing, and
    # learn from STATE that no answer comes.
    for number, ticket in enumerate(tickets):
        status = stepper.status(ticket)
        assert status in (Status.OK, Status.PENDING, Status.ABORTED)
        if status == Status.OK:
            assert stepper.holds(number * 4000, number * 4000 + 3000, number * 4000)
    assert driver.faults(is_over=False) == []


def test_a_failed_query_is_not_taken_for_the_end_of_a_copy(data, driver):
    stepper = CudaStepper(data, driver)
    driver.hold()
    driver.fail(EVENT_QUERY, 2, ILLEGAL_ADDRESS, sticky=True)
    ticket = stepper.post(0, 3000)
    run(stepper)
    driver.allow()
    for _ in range(10):
        stepper.step()
    assert stepper.status(ticket) == Status.PENDING
    assert not stepper.holds(0, 3000)


# --- the checker can fail --------------------------------------------------------------------


class Mutant(NamedTuple):
    """A copier with a fault of its own over the real one."""

    real: CudaCopier


class RecyclesEarly(Mutant):
    """Says that a copy is over as soon as it was started."""


class SharesAnEvent(Mutant):
    """Uses one event for all buffers."""


class RecordsBefore(Mutant):
    """Records the event in front of the copy."""


class RecordsNothing(Mutant):
    """Asks an event that was never recorded."""


class TakesNotReadyForReady(Mutant):
    """Looks at whether the query returned, not at what."""


def _copy(copier: Any, destination: Any, source: Any, nbytes: Any) -> None:
    real = copier.real
    address = real.addresses[MEMCPY_HTOD_ASYNC]
    assert call_driver(address, destination, source, nbytes, real.stream) == SUCCESS


def _record(copier: Any, lease: Any) -> None:
    real = copier.real
    event = real.events[lease]
    assert call_driver(real.addresses[EVENT_RECORD], event, real.stream, 0, 0) == SUCCESS


def _ask(copier: Any, lease: Any) -> int:
    real = copier.real
    return int(call_driver(real.addresses[EVENT_QUERY], real.events[lease], 0, 0, 0))


@implements(start_copy, RecyclesEarly)
def _(copier, lease, kind, destination, source, nbytes):
    _copy(copier, destination, source, nbytes)
    _record(copier, lease)
    return COPY_UNDER_WAY


@implements(look_at_copy, RecyclesEarly)
def _(copier, lease):
    return COPY_DONE


@implements(start_copy, SharesAnEvent)
def _(copier, lease, kind, destination, source, nbytes):
    _copy(copier, destination, source, nbytes)
    _record(copier, 0)
    return COPY_UNDER_WAY


@implements(look_at_copy, SharesAnEvent)
def _(copier, lease):
    return COPY_DONE if _ask(copier, 0) == SUCCESS else COPY_UNDER_WAY


@implements(start_copy, RecordsBefore)
def _(copier, lease, kind, destination, source, nbytes):
    _record(copier, lease)
    _copy(copier, destination, source, nbytes)
    return COPY_UNDER_WAY


@implements(look_at_copy, RecordsBefore)
def _(copier, lease):
    return COPY_DONE if _ask(copier, lease) == SUCCESS else COPY_UNDER_WAY


@implements(start_copy, RecordsNothing)
def _(copier, lease, kind, destination, source, nbytes):
    _copy(copier, destination, source, nbytes)
    return COPY_UNDER_WAY


@implements(look_at_copy, RecordsNothing)
def _(copier, lease):
    return COPY_DONE if _ask(copier, lease) == SUCCESS else COPY_UNDER_WAY


@implements(start_copy, TakesNotReadyForReady)
def _(copier, lease, kind, destination, source, nbytes):
    _copy(copier, destination, source, nbytes)
    _record(copier, lease)
    return COPY_UNDER_WAY


@implements(look_at_copy, TakesNotReadyForReady)
def _(copier, lease):
    _ask(copier, lease)
    return COPY_DONE


def _pull_with(data: Any, driver: RecordingDriver, mutant: type | None) -> tuple[Any, bool]:
    """Pull eight slices over two buffers, plainly; return (faults, whether all bytes are right)."""
    real = driver.copier(2)
    copier = real if mutant is None else mutant(real)
    stepper = CudaStepper(data, driver, plain=True, buffers=2, capacity=16, copier=copier)
    driver.delay(6)
    slices = [(i * 4096, i * 4096 + 4000) for i in range(8)]
    tickets = [stepper.post(start, end, start) for start, end in slices]
    run(stepper, 8)
    assert all(stepper.status(ticket) == Status.OK for ticket in tickets)
    driver.finish()
    right = all(stepper.holds(start, end, start) for start, end in slices)
    return driver.faults(), right


def test_the_checker_finds_no_fault_with_the_real_copier(data, driver):
    assert _pull_with(data, driver, None) == ([], True)


@pytest.mark.parametrize(
    ("mutant", "what", "shows_in_bytes"),
    [
        (RecyclesEarly, "which was not seen complete", True),
        (SharesAnEvent, "recorded again", False),
        (RecordsBefore, "recorded behind no new copy", True),
        (RecordsNothing, "no copy waits for it", True),
        (TakesNotReadyForReady, "which was not seen complete", True),
    ],
)
def test_the_checker_finds_a_copier_that(data, driver, mutant, what, shows_in_bytes):
    faults, right = _pull_with(data, driver, mutant)
    assert any(what in fault for fault in faults), faults
    if shows_in_bytes:
        assert not right
        assert any("changed under it" in fault for fault in faults), faults

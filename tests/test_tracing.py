"""The trace's ring: what a record says, and what becomes of records that nobody takes."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from stepping import BUFFER, DATA, Stepper

from gpuq.host import records
from gpuq.host.tracing import (
    BY_BUFFERED_READ,
    BY_DIRECT_READ,
    BY_NEIGHBOURS_READ,
    FELL_BACK,
    READ_ON,
    TRACE_DTYPE,
    WENT_STRAIGHT,
    take_records,
)
from gpuq.layout import Status
from gpuq.testing import readers

READ_ALL = (readers.READ, -1)


@pytest.fixture
def traced(stepper: Any) -> Any:
    """Make steppers with a ring of eight records."""
    return lambda *given, **named: stepper(*given, **{"trace": 8} | named)


def taken(s: Stepper) -> Any:
    return np.sort(take_records(s.poller), order="ticket")


def lost(s: Stepper) -> int:
    return int(s.poller.statistics[records.STATISTICS_TRACE_LOST])


def test_a_record_has_a_word_for_each_field() -> None:
    assert TRACE_DTYPE.itemsize == records.TRACE_WORDS * 8


def test_a_record_says_what_was_asked_and_in_which_order_it_went(traced: Any) -> None:
    s = traced(DATA)
    s.post(100, 100 + 2 * BUFFER)
    s.run()
    (record,) = taken(s)
    assert (record["ticket"], record["tag"]) == (0, 0)
    assert (record["source"], record["destination"]) == (s.source, s.destination)
    assert (record["start"], record["end"]) == (100, 100 + 2 * BUFFER)
    assert record["bytes"] == 2 * BUFFER
    assert record["reads"] == 3
    assert (record["status"], record["errno"]) == (Status.OK, 0)
    assert record["path"] == BY_DIRECT_READ
    times = ["admitted_ns", "first_read_ns", "last_read_ns", "copy_ns", "completed_ns"]
    steps = [int(record[name]) for name in times]
    assert steps[0] > 0
    assert steps == sorted(steps)


def test_a_refused_request_has_what_it_asked_for_and_no_reads(traced: Any) -> None:
    s = traced(DATA)
    s.post(7, 9)
    s.post(1, 3, source=99)
    s.post(5, 4)
    s.run()
    good, bad_source, bad_range = taken(s)
    assert good["status"] == Status.OK
    assert (bad_source["status"], bad_source["source"]) == (Status.BAD_SOURCE, 99)
    assert (bad_range["status"], bad_range["start"], bad_range["end"]) == (Status.BAD_RANGE, 5, 4)
    for record in (bad_source, bad_range):
        assert record["reads"] == record["first_read_ns"] == record["copy_ns"] == 0
        assert record["bytes"] == record["path"] == 0


def test_the_path_tells_a_fallback_a_retry_and_a_neighbour(traced: Any) -> None:
    s = traced(DATA, [(readers.FAIL, errno.EINVAL), (readers.READ, 512), READ_ALL])
    s.post(0, 600)
    s.run()
    (record,) = taken(s)
    assert record["path"] == BY_DIRECT_READ | BY_BUFFERED_READ | FELL_BACK | READ_ON
    assert record["reads"] == 3
    s = traced(DATA, merge_bytes=BUFFER)
    s.post(0, 100)
    s.post(100, 200, 100)
    s.run()
    lender, borrower = taken(s)
    assert (lender["path"], lender["reads"]) == (BY_DIRECT_READ, 1)
    assert (borrower["path"], borrower["reads"]) == (BY_NEIGHBOURS_READ, 0)
    assert borrower["first_read_ns"] <= borrower["last_read_ns"] <= borrower["copy_ns"]


def test_the_path_tells_what_went_straight(traced: Any) -> None:
    s = traced(DATA, direct=False, straight_bytes=512)
    s.post(0, 1000)
    s.run()
    (record,) = taken(s)
    assert record["path"] == BY_BUFFERED_READ | WENT_STRAIGHT
    assert record["copy_ns"] == 0
    assert record["bytes"] == 1000


def test_a_failure_has_its_errno(traced: Any) -> None:
    s = traced(DATA, [(readers.FAIL, errno.EIO)])
    s.post(0, 600)
    s.run()
    (record,) = taken(s)
    assert (record["status"], record["errno"]) == (Status.READ_FAILED, errno.EIO)
    assert record["bytes"] == 0


def test_what_finds_no_room_is_counted_and_what_was_not_taken_stays(traced: Any) -> None:
    s = traced(DATA, trace=3)
    for round_ in range(5):
        ticket = s.post(round_, round_ + 1)
        s.run()
        s.consume(ticket)
    assert lost(s) == 2
    assert taken(s)["ticket"].tolist() == [0, 1, 2]
    for round_ in range(2):
        s.post(round_, round_ + 1)
        s.run()
    assert taken(s)["ticket"].tolist() == [5, 6]
    assert len(taken(s)) == 0
    assert lost(s) == 2


def test_without_a_ring_nothing_is_kept(stepper: Any) -> None:
    s = stepper(DATA)
    s.post(0, 100)
    s.run()
    assert len(taken(s)) == 0
    assert s.poller.statistics[records.STATISTICS_TRACED] == 0

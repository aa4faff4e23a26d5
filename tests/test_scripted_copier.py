"""The poller step by step: copies that end late, fail, or cannot be seen to end."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepping import BUFFER, DATA, Stepper

import gpuq
from gpuq.host import poller as serving
from gpuq.host import records
from gpuq.layout import STATE, State, Status
from gpuq.testing import copiers, readers


def test_a_request_is_answered_when_its_last_copy_was_seen_complete(stepper: Any) -> None:
    s = stepper(DATA, copies=[copiers.LATE])
    ticket = s.post(0, 3 * BUFFER)
    s.run()
    leases = list(s.log()[:, readers.LEASE])
    assert len(set(leases)) == 3
    for lease in reversed(leases):
        assert s.status(ticket) == Status.PENDING
        s.copier.ends[lease] = 1
        s.run()
    assert s.status(ticket) == Status.OK
    s.assert_only(0, DATA[: 3 * BUFFER])
    s.assert_at_rest()


def test_a_buffer_is_not_read_into_while_its_own_copy_is_under_way(stepper: Any) -> None:
    # DALI 6623: the end of one copy must not free the buffer of another.
    s = stepper(DATA, copies=[copiers.LATE, copiers.LATE, copiers.AT_ONCE], buffers=2)
    slow = s.post(0, 100)
    fast = s.post(1000, 1100, 100)
    third = s.post(2000, 2100, 200)
    s.run()
    slow_lease, fast_lease = s.log()[:, readers.LEASE]
    assert len(s.log()) == 2, "both leases are held by copies"
    s.copier.ends[fast_lease] = 1
    s.run()
    assert s.log()[2, readers.LEASE] == fast_lease
    assert [s.status(t) for t in (slow, fast, third)] == [Status.PENDING, Status.OK, Status.OK]
    s.copier.ends[slow_lease] = 1
    s.run()
    assert s.status(slow) == Status.OK
    s.assert_only(0, np.concatenate([DATA[0:100], DATA[1000:1100], DATA[2000:2100]]))
    s.assert_at_rest()


@given(
    sizes=st.lists(st.integers(1, 3 * BUFFER), min_size=1, max_size=6),
    choices=st.lists(st.integers(0, 3), min_size=40, max_size=40),
)
def test_late_copies_in_any_order_bring_the_right_bytes(
    sizes: list[int], choices: list[int]
) -> None:
    s = Stepper(DATA, copies=[copiers.LATE], buffers=3)
    try:
        offsets = np.cumsum([0, *sizes]).tolist()
        starts = [(37 * i) % 5000 for i in range(len(sizes))]
        tickets = [s.post(a, a + n, o) for a, n, o in zip(starts, sizes, offsets, strict=False)]
        picks = iter(choices * 10)
        for _ in range(400):
            s.run()
            copying = s.poller.copying[: s.poller.cursor[records.COPIES]]
            if len(copying) == 0:
                break
            s.copier.ends[copying[next(picks) % len(copying)]] = 1
        assert [s.status(t) for t in tickets] == [Status.OK] * len(sizes)
        s.assert_only(
            0, np.concatenate([DATA[a : a + n] for a, n in zip(starts, sizes, strict=True)])
        )
        s.assert_at_rest()
    finally:
        s.close()


@pytest.mark.parametrize("how", [copiers.REFUSED, copiers.LATE_FAILURE])
def test_a_failed_copy_fails_its_request_only(stepper: Any, how: int) -> None:
    s = stepper(DATA, copies=[how, copiers.AT_ONCE])
    bad = s.post(0, 100)
    s.run()
    s.copier.ends[:] = 1
    s.run()
    s.copier.ends[:] = 0
    good = s.post(0, 100)
    s.run()
    assert (s.status(bad), s.status(good)) == (Status.COPY_FAILED, Status.OK)
    s.assert_at_rest()


@pytest.mark.parametrize("how", [copiers.UNCERTAIN, copiers.LATE_UNCERTAIN])
def test_a_copy_that_cannot_be_seen_to_end_costs_its_buffer_and_the_queue(
    stepper: Any, how: int
) -> None:
    s = stepper(DATA, copies=[how])
    ticket = s.post(0, 100)
    s.step()
    s.step()
    lease = s.log()[0, readers.LEASE]
    s.copier.ends[:] = 1
    s.step()
    assert s.queue.control[STATE] == State.ABORTED
    # It is never answered by the poller, for its bytes may still be moving.
    assert s.status(ticket) == Status.PENDING
    assert gpuq.wait(s.queue, ticket) == Status.ABORTED
    assert serving.serve(s.poller) == errno.EIO
    assert lease not in s.staging.free[: s.free_leases]
    assert s.poller.statistics[records.STATISTICS_QUARANTINED] == 1
    assert s.destinations.in_flight(s.destination) == 1

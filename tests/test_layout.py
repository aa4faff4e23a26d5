"""The wire format: what `layout` promises in words, checked in numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepping import answer, bare_queue, read_flag

import gpuq
from gpuq import layout
from gpuq.layout import Status


def test_a_submission_is_one_cache_line_of_eight_words() -> None:
    words = [
        layout.SEQUENCE,
        layout.SOURCE,
        layout.DESTINATION,
        layout.START,
        layout.END,
        layout.OFFSET,
        layout.TAG,
        layout.OPTIONS,
    ]
    assert words == list(range(8))
    assert layout.SUBMISSION_WORDS * layout.WORD_BYTES == 64


def test_words_with_different_writers_stand_on_different_lines() -> None:
    assert layout.FLAG_WORDS == layout.LINE_WORDS
    assert layout.TAIL_WORDS == layout.LINE_WORDS
    assert layout.STATE // layout.LINE_WORDS != layout.HEARTBEAT // layout.LINE_WORDS


def test_status_codes_are_what_kernels_and_old_traces_know() -> None:
    # Numbers on the wire: to change one is to break whoever compiled against it.
    assert {status.name: int(status) for status in Status} == {
        "OK": 0,
        "PENDING": 1,
        "END_OF_FILE": 2,
        "READ_FAILED": 3,
        "COPY_FAILED": 4,
        "BAD_SOURCE": 5,
        "BAD_DESTINATION": 6,
        "BAD_RANGE": 7,
        "OUT_OF_BOUNDS": 8,
        "BAD_OPTIONS": 9,
        "STALE": 10,
        "TIMED_OUT": 11,
        "NO_SLOT": 12,
        "ABORTED": 13,
    }


@given(
    ticket=st.integers(0, layout.MAX_TICKET - 1),
    status=st.sampled_from(list(Status)),
    errno=st.integers(0, 255),
)
def test_a_flag_carries_ticket_errno_and_status(ticket: int, status: Status, errno: int) -> None:
    queue = bare_queue(8)
    answer(queue, ticket, status, errno)
    if status == Status.PENDING:
        return
    assert read_flag(queue, ticket) == (status, errno)
    assert read_flag(queue, ticket + 8) == (Status.PENDING, 0)
    queue.tail[0] = ticket + 1
    assert gpuq.poll(queue, ticket) == status
    assert gpuq.errno_of(queue, ticket) == errno


def test_all_errnos_of_linux_fit_a_flag() -> None:
    import errno

    assert max(errno.errorcode) <= layout.FLAG_ERRNO_MASK


def test_the_largest_ticket_has_a_flag_that_is_no_negative_number() -> None:
    queue = bare_queue(8)
    ticket = layout.MAX_TICKET
    for errno in (0, 255):
        answer(queue, ticket, Status.READ_FAILED, errno)
        assert int(queue.flags.view(np.int64)[ticket % 8 * layout.FLAG_WORDS]) > 0
        queue.tail[0] = ticket + 1
        assert gpuq.poll(queue, ticket) == Status.READ_FAILED


def test_the_largest_handle_is_no_negative_number() -> None:
    handle = layout.MAX_GENERATION << layout.HANDLE_INDEX_BITS | layout.HANDLE_INDEX_MASK
    assert 0 < handle < 1 << 63


@pytest.mark.parametrize("name", ["Loader", "post", "wait", "Status", "pull", "try_post", "poll"])
def test_import_gpuq_is_all_a_user_needs(name: str) -> None:
    assert name in gpuq.__all__
    assert hasattr(gpuq, name)

"""The poller, the readers' workers and a waiting kernel make progress without the interpreter lock.

The interpreter's switch interval is made so long that the main thread, once it has the lock and
runs pure Python, is never asked to give it away. Whatever moves then holds no lock. Nothing is
timed: what is asked is whether it moves at all.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS, Mode, until
from kernels import Compiled, pull_until_refused

import gpuq
from gpuq.layout import FLAG_SEQUENCE_SHIFT, FLAG_STATUS_MASK, FLAG_WORDS, HEARTBEAT, Status


@pytest.fixture
def keep_the_lock() -> Iterator[Callable[[], None]]:
    """Keep the interpreter lock from the call on, as long as this thread runs pure Python."""
    before = sys.getswitchinterval()
    yield lambda: sys.setswitchinterval(1000)
    sys.setswitchinterval(before)


def busy_until(condition: Callable[[], Any]) -> None:
    """Run pure Python until a condition holds; nothing in here gives the lock away."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "no progress while the main thread holds the lock"


def test_requests_are_served_while_the_lock_is_held(
    mode: Mode, make_loader: Any, opened: Any, payload_path: Path, payload: Any, keep_the_lock: Any
) -> None:
    loader = make_loader(reader=mode.reader, direct=mode.direct)
    source = opened(loader, payload_path)
    array = np.zeros(90_000, dtype=np.uint8)
    destination = loader.register(array)
    q = loader.queue
    # Once before, so that everything is compiled.
    assert Compiled.pull(q, source.handle, destination.handle, 0, 10, 0) == Status.OK
    flags = q.flags
    keep_the_lock()
    for turn in range(20):
        ticket = Compiled.post(q, source.handle, destination.handle, turn, 90_000 + turn, 0)
        word = ticket % q.capacity * FLAG_WORDS
        busy_until(lambda w=word, t=ticket: int(flags[w]) >> FLAG_SEQUENCE_SHIFT == t + 1)
        assert int(flags[word]) & FLAG_STATUS_MASK == Status.OK
        np.testing.assert_array_equal(array, payload[turn : 90_000 + turn])
        assert Compiled.wait(q, ticket) == Status.OK


def test_a_kernel_in_another_thread_pulls_while_the_lock_is_held(
    reader: str, make_loader: Any, payload_path: Path, keep_the_lock: Any
) -> None:
    loader = make_loader(reader=reader)
    source = loader.open(payload_path)
    destination = loader.register(np.zeros(5000, dtype=np.uint8))
    words = np.zeros(1, dtype=np.uint64)
    thread = threading.Thread(
        target=pull_until_refused,
        args=(loader.queue, source.handle, destination.handle, 5000, np.zeros(2, np.int64), words),
    )
    thread.start()
    until(lambda: words[0] > 0, "the kernel runs")
    keep_the_lock()
    seen = int(words[0])
    busy_until(lambda: int(words[0]) > seen + 200)
    loader.abort()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_the_idle_poller_turns_while_the_lock_is_held(
    make_loader: Callable[..., gpuq.Loader], keep_the_lock: Any
) -> None:
    loader = make_loader()
    control = loader.queue.control
    keep_the_lock()
    seen = int(control[HEARTBEAT])
    busy_until(lambda: int(control[HEARTBEAT]) > seen + 100)

"""`Loader.launch`: one body on every target, every index once, and how launches end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WAIT_SECONDS, until
from numba import njit
from targets import TARGET, everywhere, open_loader, run_in_the_simulator

import gpuq
from gpuq import launching
from gpuq.layout import State, Status
from gpuq.ordering import as_word, clock_ns, fetch_add, load_acquire, relax
from gpuq.testing import readers

WAIT_NS = int(WAIT_SECONDS * 1e9)


def note(index, size, out):
    """Note (blocks, index, threads of the block) in a row, once for each thread."""
    rank = gpuq.block_rank()
    out[index, rank, 0] += size
    out[index, rank, 1] += index
    out[index, rank, 2] += gpuq.block_size()


@everywhere
@pytest.mark.parametrize("size", [1, 2, 7, 40])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_body_is_run_once_for_every_index(size: int, threads: int) -> None:
    out = np.zeros((size + 1, threads, 3), np.int64)
    with open_loader() as loader:
        loader.launch(note, size, out, threads=threads, threads_per_block=threads)
        loader.synchronize()
    in_a_block = threads if TARGET == "simulator" else 1
    expected = np.zeros_like(out)
    expected[:size, :in_a_block, 0] = size
    expected[:size, :in_a_block, 1] = np.arange(size)[:, None]
    expected[:size, :in_a_block, 2] = in_a_block
    np.testing.assert_array_equal(out, expected)


@everywhere
def test_no_blocks_are_no_launch() -> None:
    out = np.zeros((1, 1, 3), np.int64)
    with open_loader() as loader:
        loader.launch(note, 0, out)
        loader.synchronize()
        assert not out.any()
        for given in ({"size": -1}, {"size": 1, "threads": 0}, {"size": 1, "threads_per_block": 0}):
            size = given.pop("size")
            with pytest.raises(gpuq.ConfigError, match="a launch has"):
                loader.launch(note, size, out, **given)
        with pytest.raises(TypeError, match="integer"):
            loader.launch(note, 1.5, out)  # type: ignore[arg-type]
    assert not out.any()


def pull_both(index, size, q, stream, counter, source, destination, statuses):
    """Pull eight bytes in each of three ways that take something of the loader's."""
    statuses[0] = gpuq.pull(q, source, destination, 8, 16, 0)
    gpuq.post_counted_at(q, counter, source, destination, 8, 0, 8, 0)
    statuses[1] = gpuq.wait_counter(q, counter, 1)
    gpuq.stream_open(q, stream, 0, 0, stream.rows)
    statuses[2], statuses[3], _tile = gpuq.stream_next(q, stream, 0)
    gpuq.stream_close(q, stream, 0)


@everywhere
def test_what_the_loader_made_is_handed_over_as_its_handle(
    payload: Any, payload_path: Path
) -> None:
    with open_loader() as loader:
        source, out = loader.open(payload_path), np.zeros(16, np.uint8)
        made = (loader.stream(source, 8), loader.counter(), source, loader.register(out))
        for given in (made, tuple(thing.handle for thing in made)):
            out[:] = 0
            statuses = np.full(4, -1, np.int64)
            loader.launch(pull_both, 1, loader.queue, *given, statuses)
            loader.synchronize()
            assert list(statuses) == [Status.OK, Status.OK, Status.OK, 0]
            np.testing.assert_array_equal(out, np.concatenate((payload[8:16], payload[:8])))


def meet(index, size, words, statuses):
    """Wait, for a bounded time, until all have come here."""
    fetch_add(words, 0, as_word(1))
    begun = clock_ns()
    spins = 0
    while load_acquire(words, 0) < as_word(size):
        if clock_ns() - begun > WAIT_NS:
            return
        relax(spins)
        spins += 1
    statuses[index] = 1


def test_bodies_run_at_once_on_as_many_threads_as_are_asked_for() -> None:
    with open_loader() as loader:
        statuses = np.zeros(5, np.int64)
        loader.launch(meet, 5, np.zeros(1, np.uint64), statuses, threads=5)
        loader.synchronize()
    assert statuses.all()


@pytest.mark.parametrize(("size", "threads", "expected"), [(2, 9, 2), (9, 2, 2), (1, None, 1)])
def test_there_are_no_more_threads_than_bodies_or_than_asked_for(
    size: int, threads: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = launching.Launch.__init__

    def look(self: Any, run: Any, size: int, threads: int, arguments: Any) -> None:
        seen.append(threads)
        real(self, run, size, threads, arguments)

    monkeypatch.setattr(launching.Launch, "__init__", look)
    with open_loader() as loader:
        loader.launch(note, size, np.zeros((size, 1, 3), np.int64), threads=threads)
        loader.synchronize()
    assert seen == [expected]


def double(index, size, values):
    for i in range(gpuq.block_rank(), values.shape[1], gpuq.block_size()):
        values[index, i] *= 2


@everywhere
def test_what_a_body_writes_comes_back() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    with open_loader() as loader:
        array = loader.array(values.T)  # not C-contiguous
        loader.launch(double, 3, array, threads_per_block=2)
        loader.synchronize()
        found = loader.to_numpy(array)
    np.testing.assert_array_equal(found, 2 * values.T)
    np.testing.assert_array_equal(values, np.arange(12).reshape(4, 3))
    assert type(found) is np.ndarray
    assert found.dtype == np.float32


def pull_two(index, size, q, source, destination, statuses):
    statuses[index] = gpuq.pull(q, source, destination, 0, 2, 0)


@everywhere
def test_values_become_an_array_that_can_be_a_destination(payload: Any, payload_path: Path) -> None:
    with open_loader() as loader:
        array = loader.array([1, 2, 3], np.uint8)
        statuses = loader.array(np.full(1, -1))
        source, destination = loader.open(payload_path), loader.register(array)
        loader.launch(pull_two, 1, loader.queue, source, destination, statuses)
        loader.synchronize()
        assert loader.to_numpy(statuses).tolist() == [Status.OK]
        assert loader.to_numpy(array).tolist() == [*payload[:2], 3]


# --- compiling -----------------------------------------------------------------------------------


def test_a_compiled_function_is_a_body_too() -> None:
    out = np.zeros((3, 1, 3), np.int64)
    with open_loader() as loader:
        loader.launch(njit(nogil=True)(note), 3, out)
        loader.synchronize()
    assert list(out[:, 0, 1]) == [0, 1, 2]


def test_a_body_that_was_prepared_is_not_compiled_again() -> None:
    out = np.zeros((3, 1, 3), np.int64)
    with open_loader() as loader:
        assert loader.prepare(note, out) is note
        run = launching.compile_for_cpu(note, (out,))
        before = len(run.signatures)
        loader.launch(note, 3, out)
        loader.synchronize()
        assert launching.compile_for_cpu(note, (out,)) is run
    assert len(run.signatures) == before


pull_bound = None  # given a function by the test below, as a notebook's cell does


def pull_what_is_bound(index, size, q, statuses):
    statuses[index] = pull_bound(q, 0, 8)


@everywhere
def test_a_body_follows_a_name_that_is_bound_again(
    payload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles of two loaders are alike: a body that kept the old one would read another file."""
    for content in (payload[:8], payload[8:16]):
        (tmp_path / "other").write_bytes(bytes(8))
        (tmp_path / "wanted").write_bytes(content.tobytes())
        with open_loader() as loader:
            if content[0] == payload[0]:
                loader.open(tmp_path / "other")
            source, out = loader.open(tmp_path / "wanted"), np.zeros(8, np.uint8)
            bound = loader.bind(source=source, destination=loader.register(out))
            monkeypatch.setitem(globals(), "pull_bound", bound)
            statuses = np.full(1, -1, np.int64)
            loader.launch(pull_what_is_bound, 1, loader.queue, statuses)
            loader.synchronize()
        assert list(statuses) == [Status.OK]
        np.testing.assert_array_equal(out, content)


# --- how launches end ----------------------------------------------------------------------------


def fail_at(index, size, at, done):
    if index == at:
        raise ValueError("the body says so")
    done[index] = 1


def test_what_a_body_raises_is_raised_by_synchronize_once() -> None:
    with open_loader() as loader:
        done = np.zeros(6, np.int64)
        loader.launch(fail_at, 6, 2, done, threads=2)
        loader.launch(fail_at, 6, -1, np.zeros(6, np.int64))
        with pytest.raises(ValueError, match="the body says so"):
            loader.synchronize()
        # Thread 0 had indices 0, 2 and 4; the other goes on.
        assert list(done) == [1, 1, 0, 1, 0, 1]
        loader.synchronize()
        loader.launch(fail_at, 6, -1, done)
        loader.synchronize()
        assert done.all()


def test_a_closed_loader_launches_nothing() -> None:
    loader = open_loader()
    loader.close()
    out = np.zeros((1, 1, 3), np.int64)
    with pytest.raises(gpuq.ClosedError):
        loader.launch(note, 1, out)
    loader.synchronize()
    assert not out.any()


def wait_or_raise(index, size, q, source, destination, statuses, raises):
    """Pull, and note the status; raise it instead if told to."""
    statuses[index] = gpuq.pull_at(q, source, destination, 8 * index, 0, 8, 0)
    if raises and statuses[index] != gpuq.Status.OK:
        raise ValueError("no bytes")


@pytest.mark.parametrize("raises", [False, True])
def test_ctrl_c_in_synchronize_aborts_the_queue_and_returns(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path,
    monkeypatch: pytest.MonkeyPatch, raises: bool,
) -> None:  # fmt: skip
    """The signal comes while all bodies wait for reads that are never answered."""
    loader, reader = make_scripted(payload, gate=1)
    source, destination = loader.open(payload_path), loader.register(np.zeros(16, np.uint8))
    statuses = np.full(2, -1, np.int64)
    real = launching.Launch.join
    threads = []

    def interrupted(self: Any, timeout: float | None = None) -> None:
        threads.extend(self._threads)
        if timeout is None:
            until(lambda: reader.words[readers.SUBMITTED] == 2, "reads")
            signal.raise_signal(signal.SIGINT)
        real(self, timeout)

    monkeypatch.setattr(launching.Launch, "join", interrupted)
    for number in range(2):
        loader.launch(
            wait_or_raise, 1, loader.queue, source, destination, statuses[number:], raises
        )
    with pytest.raises(KeyboardInterrupt):
        loader.synchronize()
    assert loader.state == State.ABORTED
    assert list(statuses) == [Status.ABORTED] * 2
    assert not any(thread.is_alive() for thread in threads)
    assert len(set(threads)) == 2
    loader.synchronize()


def test_a_poller_that_died_is_what_synchronize_raises(
    make_scripted: Callable[..., Any], payload: Any, payload_path: Path
) -> None:
    loader, _ = make_scripted(payload, [(readers.RAISE, 0)])
    source, destination = loader.open(payload_path), loader.register(np.zeros(16, np.uint8))
    statuses = np.full(2, -1, np.int64)
    loader.launch(wait_or_raise, 1, loader.queue, source, destination, statuses, False)
    with pytest.raises(gpuq.PollerDiedError):
        loader.synchronize()
    assert statuses[0] == Status.ABORTED


def test_two_threads_may_wait_for_one_launch() -> None:
    """Both see the launch before either forgets it."""
    both = threading.Barrier(2)
    errors = []
    real = launching.Launch.join

    def join_together(self: Any, timeout: float | None = None) -> None:
        real(self, timeout)
        both.wait(WAIT_SECONDS)

    with open_loader() as loader, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(launching.Launch, "join", join_together)
        loader.launch(note, 1, np.zeros((1, 1, 3), np.int64))

        def synchronize() -> None:
            try:
                loader.synchronize()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=synchronize) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
    assert errors == []


def test_marked_tests_hold_in_the_simulator() -> None:
    run_in_the_simulator(__file__, __name__)

"""Pulling whole arrays: what is asked for, what the check finds, and how it ends."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import random_bytes, write_safetensors
from conftest import Mode, note_path
from hypothesis import given
from hypothesis import strategies as st

import gpuq
from gpuq import pull_files
from gpuq.formats import open_arrays
from gpuq.kernels import queue, ready
from gpuq.layout import Status

MakeLoader = Callable[..., gpuq.Loader]


@pytest.fixture
def entries(tmp_path: Path) -> list[Any]:
    """Arrays of many sizes at odd offsets, one of them empty."""
    sizes = {"a": 1, "b": 0, "c": 4096, "d": 100_001, "e": 511, "f": 8193}
    tensors = {
        name: ("U8", [size], random_bytes(size, seed))
        for seed, (name, size) in enumerate(sizes.items())
    }
    return list(open_arrays(write_safetensors(tmp_path / "m.safetensors", tensors)).values())


def test_every_mode_pulls_every_byte(mode: Mode, make_loader: MakeLoader, entries: Any) -> None:
    loader = make_loader(
        reader=mode.reader, direct=mode.direct, staging_buffers=2, staging_bytes=8192
    )
    with loader.open(entries[0].path) as source:
        note_path(loader, source)
    pull = pull_files.pull_arrays(loader, entries)
    assert pull.ok
    assert [array.entry for array in pull.arrays] == entries
    content = Path(entries[0].path).read_bytes()
    for array in pull.arrays:
        assert array.crc32 == zlib.crc32(content[array.entry.start : array.entry.end])
    assert pull.nbytes == sum(entry.nbytes for entry in entries)
    assert [source.direct for source in pull.sources] == [mode.direct == "require"]


@pytest.mark.parametrize("slice_bytes", [512, 513, 4096, 1 << 30])
def test_any_slice_size_pulls_every_byte(
    make_loader: MakeLoader, entries: Any, slice_bytes: int
) -> None:
    pull = pull_files.pull_arrays(make_loader(), entries, slice_bytes=slice_bytes)
    assert pull.ok
    assert pull.requests >= len(entries)


@given(
    start=st.integers(0, 1 << 20),
    nbytes=st.integers(0, 1 << 16),
    slice_bytes=st.integers(512, 9999),
)
def test_slices_cover_a_part_without_gap_and_are_cut_at_multiples(
    start: int, nbytes: int, slice_bytes: int
) -> None:
    class Handle:
        handle = 7

    part = pull_files._Part(0, start, start + nbytes)
    slices = pull_files._cut(part, Handle, Handle, slice_bytes)  # type: ignore[arg-type]
    starts, ends = slices[:, ready.SLICE_START], slices[:, ready.SLICE_END]
    assert starts[0] == start
    assert ends[-1] == start + nbytes
    np.testing.assert_array_equal(starts[1:], ends[:-1])
    assert (starts[1:] % slice_bytes == 0).all()
    assert (ends - starts <= slice_bytes).all()
    assert (ends > starts).all() or nbytes == 0
    np.testing.assert_array_equal(slices[:, ready.SLICE_OFFSET], starts - start)


def test_what_exceeds_a_batch_is_pulled_in_parts(
    monkeypatch: pytest.MonkeyPatch, make_loader: MakeLoader, entries: Any
) -> None:
    most_held = 0
    held: list[int] = []
    plain_poisoned = pull_files._poisoned

    def poisoned(loader: gpuq.Loader, nbytes: int) -> Any:
        held.append(nbytes)
        return plain_poisoned(loader, nbytes)

    def progress(stage: str, done: int) -> None:
        nonlocal most_held
        most_held = max(most_held, sum(held))
        if stage == "check":
            held.clear()

    monkeypatch.setattr(pull_files, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(pull_files, "_BATCH_PARTS", 3)
    monkeypatch.setattr(pull_files, "_poisoned", poisoned)
    pull = pull_files.pull_arrays(make_loader(), entries, on_progress=progress)
    assert pull.ok
    assert most_held <= 10_000
    content = Path(entries[0].path).read_bytes()
    assert [array.crc32 for array in pull.arrays] == [
        zlib.crc32(content[entry.start : entry.end]) for entry in entries
    ]


def test_a_loader_is_left_as_it_was(make_loader: MakeLoader, entries: Any) -> None:
    loader = make_loader(sources=1, destinations=len(entries))
    for _ in range(3):
        assert pull_files.pull_arrays(loader, entries).ok
    assert loader.state == gpuq.State.RUNNING


# --- the check ---


def test_one_wrong_byte_is_found(
    monkeypatch: pytest.MonkeyPatch, make_loader: MakeLoader, entries: Any
) -> None:
    plain = pull_files.read_plainly

    def read_otherwise(path: str, start: int, end: int) -> Any:
        for chunk in plain(path, start, end):
            if end - start == 100_001:
                chunk[77_777] ^= 0x10
            yield chunk

    monkeypatch.setattr(pull_files, "read_plainly", read_otherwise)
    pull = pull_files.pull_arrays(make_loader(), entries)
    assert not pull.ok
    assert {a.entry.name: a.verdict for a in pull.arrays if not a.ok} == {"d": "MISMATCH at 77777"}


def test_a_wrong_byte_in_a_later_part_is_found_at_its_place_in_the_array(
    monkeypatch: pytest.MonkeyPatch, make_loader: MakeLoader, entries: Any
) -> None:
    at = entries[3].start + 77_777
    plain = pull_files.read_plainly

    def read_otherwise(path: str, start: int, end: int) -> Any:
        for chunk in plain(path, start, end):
            if start <= at < end:
                chunk[at - start] ^= 1
            yield chunk

    monkeypatch.setattr(pull_files, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(pull_files, "read_plainly", read_otherwise)
    pull = pull_files.pull_arrays(make_loader(), entries)
    assert [a.mismatch for a in pull.arrays if not a.ok] == [77_777]


def test_bytes_from_another_place_are_found(
    monkeypatch: pytest.MonkeyPatch, make_loader: MakeLoader, entries: Any
) -> None:
    plain = pull_files._cut

    def shifted(*arguments: Any) -> Any:
        slices = plain(*arguments)
        if len(slices) > 3:
            slices[2, [ready.SLICE_START, ready.SLICE_END]] -= 1
        return slices

    monkeypatch.setattr(pull_files, "_cut", shifted)
    pull = pull_files.pull_arrays(make_loader(), entries, slice_bytes=4096)
    wrong = [array for array in pull.arrays if not array.ok]
    assert [array.entry.name for array in wrong] == ["d"]
    assert wrong[0].status == Status.OK
    assert 4096 < wrong[0].mismatch < 3 * 4096  # type: ignore[operator]


def test_zeros_that_nobody_brought_are_found(
    monkeypatch: pytest.MonkeyPatch, make_loader: MakeLoader, tmp_path: Path
) -> None:
    def do_nothing(
        _q: Any, _worker: Any, _workers: Any, _s: Any, _t: Any, answers: Any, _w: Any
    ) -> None:
        answers[:] = Status.OK

    monkeypatch.setattr(ready, "pull_slices_on_cpu", do_nothing)
    path = tmp_path / "zeros.bin"
    path.write_bytes(bytes(5000))
    pull = pull_files.pull_arrays(make_loader(), list(open_arrays(path).values()))
    assert pull.arrays[0].verdict == "MISMATCH at 0"


@pytest.mark.parametrize(
    ("pulled", "expected", "at"),
    [
        (b"", [], None),
        (b"abc", [b"abc"], None),
        (b"abc", [b"a", b"bc"], None),
        (b"abc", [b"a", b"bX"], 2),
        (b"abc", [b"Xbc"], 0),
        (b"abc", [b"ab"], 2),
        (b"abc", [], 0),
    ],
)
def test_first_difference(pulled: bytes, expected: list[bytes], at: int | None) -> None:
    chunks = [np.frombuffer(chunk, np.uint8) for chunk in expected]
    assert pull_files.first_difference(np.frombuffer(pulled, np.uint8), chunks) == at


def test_a_plain_read_comes_in_chunks_and_ends_with_the_file(
    monkeypatch: pytest.MonkeyPatch, payload: Any, payload_path: Path
) -> None:
    monkeypatch.setattr(pull_files, "_CHECK_BYTES", 999)
    for start, end in ((0, 0), (0, len(payload)), (5, 2005), (100_000, 100_009)):
        chunks = [chunk.copy() for chunk in pull_files.read_plainly(str(payload_path), start, end)]
        assert all(len(chunk) <= 999 for chunk in chunks)
        np.testing.assert_array_equal(np.concatenate([*chunks, payload[:0]]), payload[start:end])


# --- what goes wrong ---


def test_a_file_shortened_meanwhile_is_its_status(make_loader: MakeLoader, entries: Any) -> None:
    path = entries[0].path

    def shorten(stage: str, done: int) -> None:
        os.truncate(path, entries[3].start + 50_000)

    pull = pull_files.pull_arrays(make_loader(), entries, on_progress=shorten)
    assert {array.entry.name: array.verdict for array in pull.arrays} == {
        "a": "OK",
        "b": "OK",
        "c": "OK",
        "d": "END_OF_FILE",
        "e": "END_OF_FILE",
        "f": "END_OF_FILE",
    }
    assert pull.gb_per_s is None


def test_a_failed_read_shows_its_errno(
    monkeypatch: pytest.MonkeyPatch, make_loader: MakeLoader, entries: Any
) -> None:
    plain = ready.pull_slices_on_cpu

    def fail_one(q: Any, *arguments: Any) -> None:
        plain(q, *arguments)
        arguments[4][0] = Status.READ_FAILED, errno.EIO

    monkeypatch.setattr(ready, "pull_slices_on_cpu", fail_one)
    pull = pull_files.pull_arrays(make_loader(), entries)
    assert [array.verdict for array in pull.arrays][:2] == ["READ_FAILED (EIO)", "OK"]


@pytest.mark.parametrize("slice_bytes", [0, -1, 511, (1 << 30) + 1])
def test_a_slice_size_out_of_range_is_refused(
    make_loader: MakeLoader, entries: Any, slice_bytes: int
) -> None:
    with pytest.raises(gpuq.ConfigError, match=f"slice_bytes must be .* not {slice_bytes}"):
        pull_files.pull_arrays(make_loader(), entries, slice_bytes=slice_bytes)


def test_an_error_in_the_kernels_thread_is_raised_here(
    monkeypatch: pytest.MonkeyPatch, make_loader: MakeLoader, entries: Any
) -> None:
    def fail(*_arguments: Any) -> None:
        raise MemoryError("of the launch")

    monkeypatch.setattr(ready, "pull_slices_on_cpu", fail)
    loader = make_loader(sources=1)
    with pytest.raises(MemoryError, match="of the launch"):
        pull_files.pull_arrays(loader, entries)
    loader.open(entries[0].path)


def test_an_interruption_aborts_and_leaves_when_the_kernel_has_returned(
    monkeypatch: pytest.MonkeyPatch, make_loader: MakeLoader, entries: Any
) -> None:
    waiting = threading.Event()
    statuses = []

    def wait_for_nothing(q: Any, *_arguments: Any) -> None:
        ticket = queue.claim(q)  # never published, so never answered
        waiting.set()
        statuses.append(gpuq.wait(q, ticket))

    def interrupt(stage: str, done: int) -> None:
        if waiting.is_set():
            raise KeyboardInterrupt

    monkeypatch.setattr(ready, "pull_slices_on_cpu", wait_for_nothing)
    loader = make_loader()
    with pytest.raises(KeyboardInterrupt):
        pull_files.pull_arrays(loader, entries, on_progress=interrupt)
    assert statuses == [Status.ABORTED]
    assert loader.state == gpuq.State.ABORTED
    assert not any(thread.name == "gpuq-kernel" for thread in threading.enumerate())


def test_a_dead_poller_is_raised_and_not_taken_for_statuses(
    monkeypatch: pytest.MonkeyPatch, make_loader: MakeLoader, entries: Any
) -> None:
    loader = make_loader()
    plain = ready.pull_slices_on_cpu

    def with_a_poller_that_died(q: Any, *arguments: Any) -> None:
        loader._service._outcome.error = OSError(errno.EIO, "the reader failed")
        loader.abort()
        plain(q, *arguments)

    monkeypatch.setattr(ready, "pull_slices_on_cpu", with_a_poller_that_died)
    with pytest.raises(gpuq.PollerDiedError, match="the reader failed"):
        pull_files.pull_arrays(loader, entries)

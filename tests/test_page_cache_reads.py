"""Large reads through the page cache are begun in the kernel's workers (io_uring)."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gpuq.errors import ReaderUnavailableError
from gpuq.host import uring
from gpuq.host.uring_abi import CQE_WORDS, SQE_ASYNC, SQE_WORDS

LARGE = 1 << 20


@pytest.fixture
def reader() -> Iterator[uring.UringReader]:
    try:
        made, ring = uring.make_uring_reader(64, 0)
    except ReaderUnavailableError as error:
        pytest.skip(f"no io_uring: {error}")
    yield made
    ring.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(3 * LARGE))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def begun(reader: uring.UringReader, descriptor: int, nbytes: int, offset: int = 0) -> int:
    """Submit a read; return the flags of its entry."""
    uring._submit(reader, 1, descriptor, offset, 0, nbytes)
    base = (int(reader.words[uring._TAIL]) - 1 & reader.sq_mask) * SQE_WORDS
    return int(reader.sqes[base]) >> 8 & 0xFF


def test_only_large_buffered_reads_are_begun_elsewhere(
    reader: uring.UringReader, file: int
) -> None:
    uring.note_descriptor(reader, file, may_wait=False, is_buffered=True)
    assert begun(reader, file, LARGE) == begun(reader, file, LARGE, offset=77) == SQE_ASYNC
    assert begun(reader, file, LARGE - 1) == 0


def test_how_a_read_is_begun_is_said_of_its_descriptor(
    reader: uring.UringReader, file: int
) -> None:
    uring.note_descriptor(reader, file, may_wait=False, is_buffered=False)
    assert begun(reader, file, LARGE) == 0
    for is_buffered in (False, True):
        uring.note_descriptor(reader, file, may_wait=True, is_buffered=is_buffered)
        assert begun(reader, file, 1) == begun(reader, file, LARGE) == SQE_ASYNC
    assert begun(reader, len(reader.flags), 1) == SQE_ASYNC


def test_a_read_for_which_there_is_no_worker_is_made_without_one(
    reader: uring.UringReader, file: int
) -> None:
    # Where no thread can be made (RLIMIT_NPROC), the kernel cancelled it, and the request failed.
    uring.note_descriptor(reader, file, may_wait=False, is_buffered=True)
    assert begun(reader, file, LARGE) == SQE_ASYNC

    def complete(data: int, result: int) -> tuple[int, int]:
        tail = int(reader.cq_tail[0])
        base = (tail & reader.cq_mask) * CQE_WORDS
        reader.cqes[base] = data
        reader.cqes[base + 1] = result & 0xFFFFFFFF
        reader.cq_tail[0] = tail + 1
        lease, got = uring._reap(reader)
        return int(lease), int(got)

    base = (int(reader.words[uring._TAIL]) - 1 & reader.sq_mask) * SQE_WORDS
    data = int(reader.sqes[base + 4])
    assert complete(1, -errno.ECANCELED) == (1, -errno.ECANCELED)  # handed to no worker
    assert begun(reader, file, LARGE) == SQE_ASYNC
    assert complete(data, LARGE) == (1, LARGE)
    assert complete(data, -errno.ECANCELED) == (1, -errno.EAGAIN)
    assert begun(reader, file, LARGE) == 0
    assert complete(data, -errno.ECANCELED) == (1, -errno.EAGAIN)  # another that was under way


_FEW_THREADS = """
import os, resource, sys
import numpy as np
import gpuq

os.chdir(sys.argv[1])
nobody = 65534
expected = np.load("a.npy")
settings = dict(target="cpu", reader="io_uring", direct="off")
with gpuq.Loader(**settings) as loader:  # compiles what nobody could not
    loader.load("a.npy")
os.setgid(nobody)
os.setuid(nobody)
with gpuq.Loader(**settings) as loader:
    with loader.open("a.npy") as source:
        loader.read(source, 0, 100)  # its thread is there
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    for _ in range(3):
        (array,) = loader.load("a.npy").values()
        assert (array == expected).all()
    print("right,", loader.statistics().retries, "reads made again")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user with few threads")
def test_a_buffered_file_is_loaded_by_a_user_who_may_have_no_more_threads(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.random.default_rng(3).integers(0, 256, 9 << 20, dtype=np.uint8))
    tmp_path.chmod(0o755)
    command = [sys.executable, "-c", _FEW_THREADS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ReaderUnavailableError" in ended.stderr:
        pytest.skip("no io_uring")
    assert ended.stdout.startswith("right"), ended.stderr
    print(ended.stdout)

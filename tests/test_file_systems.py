"""Right bytes or the right status on real file systems, made and mounted for these tests."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import system
from asking import Asker
from conftest import READERS, Mode, note_path, skip_where_refused
from fuse_faults import content

import gpuq
from gpuq.layout import Status

SIZE = 300_007
BUFFER = 16_384
DIRECT = ("auto", "off")
SMALL = (1, 511, 513, 2047, 4096, 4097)
DATA = content(0, SIZE)
FILES = (
    {"large.bin": DATA}
    | {f"{size}.bin": DATA[:size] for size in SMALL}
    | {f"shrinking-{reader}-{direct}.bin": DATA for reader in READERS for direct in DIRECT}
)


def write(place: Path) -> None:
    """Write the files and have them leave the page cache."""
    for name, data in FILES.items():
        with (place / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- the file systems ---

Making = contextlib.AbstractContextManager[Path]


@contextlib.contextmanager
def written(made: Making) -> Iterator[Path]:
    with made as place:
        write(place)
        yield place


@contextlib.contextmanager
def over(lower: Making, upper: Making) -> Iterator[Path]:
    """Mount an overlay whose changes go to another file system."""
    with lower as below, upper as above, system.overlay(above, below) as place:
        yield place


@contextlib.contextmanager
def over_a_folder_of(made: Making) -> Iterator[Path]:
    """Mount an overlay over one folder of a file system, its changes going to another."""
    with made as place:
        (place / "lower").mkdir()
        write(place / "lower")
        with system.overlay(place, place / "lower") as seen:
            yield seen


KINDS: Mapping[str, Callable[[Path], Making]] = {
    "ext4-512": lambda folder: written(system.ext4(folder, 512)),
    "ext4-4096": lambda folder: written(system.ext4(folder, 4096)),
    "xfs": lambda folder: written(system.xfs(folder)),
    "btrfs": lambda folder: written(system.btrfs(folder)),
    "btrfs-zlib": lambda folder: written(system.btrfs(folder, "compress-force=zlib")),
    "tmpfs": lambda folder: written(system.mounted(folder / "tmpfs", "tmpfs", "none")),
    "overlay on ext4": lambda folder: over_a_folder_of(system.ext4(folder)),
    "squashfs": lambda folder: system.squashfs(folder, FILES),
    "squashfs-gzip": lambda folder: system.compressed_squashfs(folder, FILES),
    "overlay on squashfs": lambda folder: over(
        system.squashfs(folder, FILES), system.mounted(folder / "tmpfs", "tmpfs", "none")
    ),
}
READ_ONLY = ("squashfs", "squashfs-gzip")


@dataclass(frozen=True)
class Mounted:
    kind: str
    place: Path


@pytest.fixture(params=KINDS, scope="module")
def file_system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mounted]:
    """Each file system that this machine can mount, with `FILES` on it."""
    kind = request.param
    with contextlib.ExitStack() as stack:
        with system.noted_try(request.config, kind):
            place = stack.enter_context(KINDS[kind](tmp_path_factory.mktemp("file-system")))
        yield Mounted(kind, place)


@dataclass(frozen=True)
class Opening:
    """An `Asker` and how its files are opened."""

    asker: Asker
    mode: Mode
    place: Path

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[gpuq.Source]:
        with self.asker.loader.open(self.place / name) as source:
            yield source
            note_path(self.asker.loader, source)


@pytest.fixture(params=[(reader, direct) for reader in READERS for direct in DIRECT], ids="-".join)
def opening(
    request: pytest.FixtureRequest, file_system: Mounted, make_loader: Callable[..., gpuq.Loader]
) -> Opening:
    """Each file system with each reader, direct where it can be and buffered."""
    mode = Mode(*request.param)
    skip_where_refused(Mode(mode.reader, "off"))
    loader = make_loader(reader=mode.reader, direct=mode.direct, staging_bytes=BUFFER)
    return Opening(Asker(loader, 2 * SIZE), mode, file_system.place)


# --- what must hold on each ---


def unaligned_rows() -> list[tuple[int, int, int]]:
    """Make rows (start, end, offset) about every kind of edge, and some anywhere."""
    randomly = random.Random(6623)
    ranges = []
    for edge in (512, 4096, BUFFER, 1 << 17, 1 << 18, SIZE):
        for before, after in ((0, 1), (1, 0), (1, 1), (513, 4095), (BUFFER + 1, BUFFER - 1)):
            ranges.append((max(edge - before, 0), min(edge + after, SIZE)))
    for _ in range(100):
        start = randomly.randrange(SIZE)
        ranges.append((start, min(start + randomly.choice([1, 7, 700, 5000]), SIZE)))
    rows, offset = [], 0
    for start, end in ranges:
        rows.append((start, end, offset))
        offset += end - start + randomly.choice([0, 1, 511])
    assert offset < 2 * SIZE
    return rows


ROWS = unaligned_rows()


def test_every_range_arrives(opening: Opening) -> None:
    with opening.open("large.bin") as source:
        assert source.size == SIZE
        assert opening.asker.pull(source, ROWS) == [Status.OK] * len(ROWS)
        opening.asker.assert_holds(ROWS, DATA)
        whole = [(0, SIZE, 0), (1, SIZE - 1, SIZE + 1)]
        assert opening.asker.pull(source, whole) == [Status.OK] * 2
        opening.asker.assert_holds(whole, DATA)


def test_a_file_ends_where_it_ends(opening: Opening) -> None:
    for size in (*SMALL, SIZE):
        with opening.open("large.bin" if size == SIZE else f"{size}.bin") as source:
            inside = [(0, size, 0), (size - 1, size, size), (size, size, 0)]
            assert opening.asker.pull(source, inside) == [Status.OK] * 3
            opening.asker.assert_holds(inside, DATA)
            beyond = [(0, size + 1, 0), (size - 1, size + 1, 0), (size, size + 9000, 0)]
            far = [(1 << 40, (1 << 40) + 1, 0), (0, size + BUFFER, 0)]
            assert opening.asker.pull(source, beyond + far) == [Status.END_OF_FILE] * 5
            assert opening.asker.taken() == {}


def test_a_file_that_was_shortened_while_open(opening: Opening, file_system: Mounted) -> None:
    if file_system.kind in READ_ONLY:
        pytest.skip(f"{file_system.kind} is read-only")
    name = f"shrinking-{opening.mode.reader}-{opening.mode.direct}.bin"
    with opening.open(name) as source:
        assert opening.asker.pull(source, [(0, SIZE, 0)]) == [Status.OK]
        opening.asker.assert_holds([(0, SIZE, 0)], DATA)
        for left in (200_001, 4096, 1, 0):
            os.truncate(opening.place / name, left)
            gone = [(left, left + 1, 0), (max(left - 1, 0), left + 1, 0), (0, SIZE, 0)]
            assert opening.asker.pull(source, gone) == [Status.END_OF_FILE] * 3
            assert opening.asker.taken() == {}
            rows = [(0, left, 0), (max(left - 5, 0), left, SIZE)]
            assert opening.asker.pull(source, rows) == [Status.OK] * 2
            opening.asker.assert_holds(rows, DATA)


def test_reads_are_direct_where_the_file_system_can(opening: Opening) -> None:
    path = opening.place / "large.bin"
    with opening.open("large.bin") as source:
        assert opening.asker.pull(source, [(5, 100, 0)]) == [Status.OK]
        is_direct = opening.asker.loader.explain(source).direct
    assert is_direct == (opening.mode.direct == "auto" and takes_direct_reads(path))


def takes_direct_reads(path: Path) -> bool:
    """Try it, without gpuq."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        with open(descriptor, "rb", buffering=0) as file, mmap.mmap(-1, 4096) as memory:
            return os.preadv(file.fileno(), [memory], 4096) == 4096
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False

"""Pull whole arrays with a kernel, and check every byte: the work behind ``gpuq pull``.

Memory stays at the loader's staging plus one batch of destinations, whatever the files' size.
Nothing here prints.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuq.errors import ConfigError, FormatError
from gpuq.formats import ArrayEntry, ArrayFile, open_arrays
from gpuq.handles import Destination, Explanation, Source
from gpuq.kernels import ready
from gpuq.layout import Status
from gpuq.loader import Loader

MIN_SLICE_BYTES = 512
"""A slice costs 56 bytes of tables; smaller ones would need as much memory as their data."""
MAX_SLICE_BYTES = 1 << 30
BATCH_BYTES = 256 << 20
"""Destinations that are held at once, in bytes; an array beyond it is pulled in parts."""

_BATCH_PARTS = 1024
_WORKERS = {"cpu": 1, "simulator": 4, "cuda": 32}
_CHECK_BYTES = 4 << 20
_LOOK_SECONDS = 0.05
# What destinations hold before: bytes that no read brought are seen, zeros in the file included.
_POISON = 0xA5

Progress = Callable[[str, int], None]
"""Called in the caller's thread with ``"pull"`` or ``"check"`` and the bytes done so far."""


@dataclass(frozen=True)
class PulledArray:
    """One array after it was pulled and checked.

    Attributes
    ----------
    entry : ArrayEntry
    status : Status
        ``OK``, or the first other one that the kernel got.
    errno : int
        Where the status is ``READ_FAILED``, else 0.
    mismatch : int or None
        Offset in the array, in bytes, of the first byte that a plain read of the file has
        otherwise; None where all are equal, or where the status is not ``OK``.
    crc32 : int
        Of the bytes pulled. Means nothing where the status is not ``OK``.
    """

    entry: ArrayEntry
    status: Status
    errno: int
    mismatch: int | None
    crc32: int

    @property
    def ok(self) -> bool:
        """Whether every byte arrived and is right."""
        return self.status == Status.OK and self.mismatch is None

    @property
    def verdict(self) -> str:
        """``OK``, ``MISMATCH at 17``, or the status with its errno: ``READ_FAILED (EIO)``."""
        if self.status == Status.OK:
            return "OK" if self.mismatch is None else f"MISMATCH at {self.mismatch}"
        if self.errno:
            return f"{self.status.name} ({errno.errorcode.get(self.errno, self.errno)})"
        return self.status.name


@dataclass(frozen=True)
class Pull:
    """What `pull_arrays` did.

    Attributes
    ----------
    arrays : tuple of PulledArray
        In the order in which they were given.
    sources : tuple of Explanation
        How each file was read, and why; one for each path among the entries.
    nbytes : int
        Bytes asked for.
    seconds : float
        Of the kernels alone, from launch to return; neither compiling nor checking.
    requests : int
        Posted by the kernels.
    window : int
        Requests that the kernels kept in flight, at most.
    reads : int
        Handed to the operating system.
    """

    arrays: tuple[PulledArray, ...]
    sources: tuple[Explanation, ...]
    nbytes: int
    seconds: float
    requests: int
    window: int
    reads: int

    @property
    def ok(self) -> bool:
        """Whether every byte of every array is right."""
        return all(array.ok for array in self.arrays)

    @property
    def gb_per_s(self) -> float | None:
        """Bytes / 1e9 / seconds; None where there are no bytes, or not all arrived."""
        arrived = all(array.status == Status.OK for array in self.arrays)
        return self.nbytes / 1e9 / self.seconds if arrived and self.nbytes else None


def find_arrays(path: str) -> ArrayFile:
    """Find the arrays of a file like `open_arrays`; refuse one that has no bytes at all.

    Raises
    ------
    FormatError
        The file is empty, or its content is not what its format demands.
    OSError
        It is missing, a directory, or not readable.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size == 0:
        raise FormatError(f"{path}: the file is empty")
    return open_arrays(path)


def prepare(loader: Loader) -> None:
    """Compile the kernel for the loader's target, so that no pull is timed with it."""
    _launch(loader, np.empty((0, ready.SLICE_WORDS), np.int64))


def pull_arrays(
    loader: Loader,
    entries: Sequence[ArrayEntry],
    *,
    slice_bytes: int | None = None,
    on_progress: Progress | None = None,
) -> Pull:
    """Pull arrays with requests made inside a running kernel; check each byte.

    The kernel runs in a thread of its own, so that this one stays free to draw and to be
    interrupted. An exception here, KeyboardInterrupt included, aborts the loader and leaves
    when the kernel has returned.

    Parameters
    ----------
    loader : Loader
    entries : sequence of ArrayEntry
        From `gpuq.formats.open_arrays`; of one file or of several.
    slice_bytes : int, optional
        Bytes of one request, `MIN_SLICE_BYTES` to `MAX_SLICE_BYTES`; by default one staging
        buffer. Slices are cut at multiples of it in the file, so all but the first and the
        last of an array are aligned where it is.
    on_progress : callable, optional
        See `Progress`.

    Raises
    ------
    OSError, SourceError, DirectUnavailableError
        A file cannot be opened, or not be read again for the check.
    ConfigError
        `slice_bytes` is out of its range.
    MemoryError
        There is no memory for a batch of destinations.
    ClosedError, PollerDiedError, ForkedError
        The loader cannot be used any more.

    Notes
    -----
    What a kernel is told is no exception: see `PulledArray.status`.
    """
    size = loader.config.staging_bytes if slice_bytes is None else slice_bytes
    check_slice_bytes(size)
    tell = on_progress or _ignore
    before = loader.statistics()
    tally = _Tally(len(entries))
    sources: dict[str, Source] = {}
    try:
        for path in dict.fromkeys(entry.path for entry in entries):
            sources[path] = loader.open(path)
        for parts in _batches(entries):
            _pull_batch(loader, entries, parts, sources, size, tally, tell)
        explanations = tuple(loader.explain(source) for source in sources.values())
    finally:
        for source in sources.values():
            source.close()
    return Pull(
        arrays=tuple(
            PulledArray(entry, tally.status[i], tally.errno[i], tally.mismatch[i], tally.crc32[i])
            for i, entry in enumerate(entries)
        ),
        sources=explanations,
        nbytes=sum(entry.nbytes for entry in entries),
        seconds=tally.seconds,
        requests=tally.requests,
        window=_window(loader)[0] * _window(loader)[1],
        reads=loader.statistics().reads - before.reads,
    )


def check_slice_bytes(slice_bytes: int) -> None:
    """Raise `ConfigError` where `slice_bytes` is out of its range."""
    if not MIN_SLICE_BYTES <= slice_bytes <= MAX_SLICE_BYTES:
        raise ConfigError(
            f"slice_bytes must be between {MIN_SLICE_BYTES} and {MAX_SLICE_BYTES}, "
            f"not {slice_bytes}"
        )


def read_plainly(path: str, start: int, end: int) -> Iterator[NDArray[np.uint8]]:
    """Yield bytes ``[start, end)`` of a file chunk by chunk, by ordinary reads, not through gpuq.

    Each chunk is overwritten by the next; they end where the file does.
    """
    buffer = np.empty(min(_CHECK_BYTES, end - start), np.uint8)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < end:
            got = file.readinto(buffer.data[: end - start])
            if not got:
                return
            yield buffer[:got]
            start += got


def first_difference(
    pulled: NDArray[np.uint8], expected: Iterable[NDArray[np.uint8]]
) -> int | None:
    """Return the offset of the first byte of `pulled` that differs from the chunks of `expected`.

    Bytes that only one of them has differ. None where all are equal.
    """
    offset = 0
    for chunk in expected:
        same = pulled[offset : offset + len(chunk)] == chunk
        if not same.all():
            return offset + int(np.argmin(same))
        offset += len(chunk)
    return None if offset == len(pulled) else offset


@dataclass(frozen=True)
class _Part:
    """Bytes ``[start, end)`` of the file of entry number `index`, pulled in one go."""

    index: int
    start: int
    end: int


@dataclass
class _Tally:
    """What is known of each array so far."""

    count: int
    seconds: float = 0.0
    requests: int = 0
    pulled: int = 0
    checked: int = 0
    status: list[Status] = field(init=False)
    errno: list[int] = field(init=False)
    mismatch: list[int | None] = field(init=False)
    crc32: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.status = [Status.OK] * self.count
        self.errno = [0] * self.count
        self.mismatch = [None] * self.count
        self.crc32 = [0] * self.count


def _batches(entries: Sequence[ArrayEntry]) -> Iterator[list[_Part]]:
    """Divide all bytes into parts, and the parts into batches of at most `BATCH_BYTES`."""
    batch: list[_Part] = []
    held = 0
    for index, entry in enumerate(entries):
        # An array without bytes is one part without bytes.
        for start in range(entry.start, max(entry.end, entry.start + 1), BATCH_BYTES):
            end = min(start + BATCH_BYTES, entry.end)
            if batch and (held + end - start > BATCH_BYTES or len(batch) == _BATCH_PARTS):
                yield batch
                batch, held = [], 0
            batch.append(_Part(index, start, end))
            held += end - start
    if batch:
        yield batch


def _pull_batch(
    loader: Loader,
    entries: Sequence[ArrayEntry],
    parts: Sequence[_Part],
    sources: dict[str, Source],
    slice_bytes: int,
    tally: _Tally,
    tell: Progress,
) -> None:
    arrays = [_poisoned(loader, part.end - part.start) for part in parts]
    destinations: list[Destination] = []
    try:
        destinations.extend(loader.register(array) for array in arrays)
        tables = [
            _cut(part, sources[entries[part.index].path], destination, slice_bytes)
            for part, destination in zip(parts, destinations, strict=True)
        ]
        answers, seconds = _launch_and_look(loader, np.concatenate(tables), tally, tell)
        loader.check()
    finally:
        for destination in destinations:
            destination.unregister()
    tally.seconds += seconds
    tally.requests += len(answers)
    tally.pulled += sum(part.end - part.start for part in parts)
    tell("pull", tally.pulled)
    row = 0
    for part, array, table in zip(parts, arrays, tables, strict=True):
        mine = answers[row : row + len(table)]
        row += len(table)
        _judge(entries[part.index], part, mine, array, tally)
        tally.checked += part.end - part.start
        tell("check", tally.checked)


def _open_without_waiting(path: str, flags: int) -> int:
    # Opening a pipe would wait for its writer; a regular file ignores the flag.
    return os.open(path, flags | os.O_NONBLOCK)


def _poisoned(loader: Loader, nbytes: int) -> Any:
    array = loader.empty(nbytes, np.uint8)
    if nbytes:
        array[:] = _POISON
    return array


def _cut(
    part: _Part, source: Source, destination: Destination, slice_bytes: int
) -> NDArray[np.int64]:
    """Return the slices of a part; one without bytes has one slice without bytes."""
    inner = np.arange(part.start - part.start % slice_bytes + slice_bytes, part.end, slice_bytes)
    slices = np.empty((len(inner) + 1, ready.SLICE_WORDS), np.int64)
    slices[:, ready.SLICE_SOURCE] = source.handle
    slices[:, ready.SLICE_DESTINATION] = destination.handle
    slices[0, ready.SLICE_START] = part.start
    slices[1:, ready.SLICE_START] = inner
    slices[:-1, ready.SLICE_END] = inner
    slices[-1, ready.SLICE_END] = part.end
    slices[:, ready.SLICE_OFFSET] = slices[:, ready.SLICE_START] - part.start
    return slices


def _judge(
    entry: ArrayEntry,
    part: _Part,
    answers: NDArray[np.int64],
    array: Any,
    tally: _Tally,
) -> None:
    """Note what came of a part; the first fault of an array is the one that is kept."""
    index = part.index
    if tally.status[index] != Status.OK or tally.mismatch[index] is not None:
        return
    failed = np.flatnonzero(answers[:, ready.ANSWER_STATUS] != int(Status.OK))
    if len(failed):
        first = answers[failed[0]]
        tally.status[index] = Status(int(first[ready.ANSWER_STATUS]))
        tally.errno[index] = int(first[ready.ANSWER_ERRNO])
        return
    pulled = _on_host(array)
    tally.crc32[index] = zlib.crc32(pulled, tally.crc32[index])
    offset = first_difference(pulled, read_plainly(entry.path, part.start, part.end))
    if offset is not None:
        tally.mismatch[index] = part.start - entry.start + offset


def _launch_and_look(
    loader: Loader, slices: NDArray[np.int64], tally: _Tally, tell: Progress
) -> tuple[NDArray[np.int64], float]:
    """Launch in a thread; report progress from this one until the kernel has returned."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(_launch(loader, slices))
        except BaseException as error:
            outcome.append(error)

    before = loader.statistics().bytes
    tell("pull", tally.pulled)
    thread = threading.Thread(target=run, name="gpuq-kernel", daemon=True)
    try:
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            tell("pull", tally.pulled + loader.statistics().bytes - before)
    except BaseException:
        loader.abort()
        if thread.ident is not None:
            thread.join()
        raise
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    answers, seconds = result
    return answers, seconds


def _window(loader: Loader) -> tuple[int, int]:
    """Return workers, and the requests that each keeps in flight."""
    workers = min(_WORKERS[loader.target], loader.config.slots)
    return workers, loader.config.slots // workers


def _launch(loader: Loader, slices: NDArray[np.int64]) -> tuple[NDArray[np.int64], float]:
    """Run the kernel to its end; return the answers and the seconds it took."""
    workers, window = _window(loader)
    pending = np.zeros((len(slices), ready.ANSWER_WORDS), np.int64)
    pending[:, ready.ANSWER_STATUS] = int(Status.PENDING)
    device_slices = _on_device(loader, slices)
    answers = _on_device(loader, pending)
    tickets = _on_device(loader, np.zeros(workers * window, np.int64))
    begun = time.perf_counter()
    if loader.target == "cpu":
        ready.pull_slices_on_cpu(loader.queue, 0, workers, device_slices, tickets, answers, window)
    else:
        # The simulator runs blocks one after another, so there its workers share one.
        blocks, threads = (1, workers) if loader.target == "simulator" else (workers, 1)
        arguments = (loader.queue, device_slices, tickets, answers, window)
        loader.launch(ready.pull_share, blocks, *arguments, threads_per_block=threads)
        loader.synchronize()
    seconds = time.perf_counter() - begun
    return _on_host(answers), seconds


def _on_device(loader: Loader, host: NDArray[np.int64]) -> Any:
    """Return a copy that kernels reach."""
    array = loader.empty(host.shape, host.dtype)
    if hasattr(array, "set"):  # CuPy takes host arrays no other way
        array.set(host)
    elif host.size:
        array[:] = host
    return array


def _on_host(array: Any) -> Any:
    """Return a NumPy array with the content of one that `Loader.empty` made."""
    if isinstance(array, np.ndarray):
        return array
    copy = getattr(array, "copy_to_host", None) or array.get
    return np.asarray(copy())


def _ignore(_stage: str, _nbytes: int) -> None:
    """Take no notice of progress."""

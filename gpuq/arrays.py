"""Whole arrays of files: opened for kernels by name, or read into memory at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuq.errors import ConfigError, DestinationError, MemoryLimitError
from gpuq.formats import ArrayEntry, ArrayFile, open_arrays
from gpuq.handles import ArraySource, ArraySources, Source
from gpuq.host.pages import Region, bring_in, can_be_placed
from gpuq.progress import Progress, telling
from gpuq.reading import check_may_wait, reads_at_once, start_read

_LOADED_AT_ONCE = 64
_BYTES_AT_ONCE = 384 << 20
_RUN_BYTES = 128 << 20
"""Of one request. Through the page cache it is a stream that the system reads ahead of; a few at
once keep a disk busy, and many, each for a short while, do not."""
_SHORT_RUN_BYTES = 32 << 20
"""Of a file that may come from a server, which answers many at once."""
_GAP_BYTES = 4096


def open_sources(
    loader: Any,
    path: str,
    names: Sequence[str] | None,
    dtype: Any,
    shape: Any,
    direct: str | None,
) -> ArraySources:
    """Open a file's arrays for kernels; see `Loader.open_arrays`."""
    file = open_arrays(path, dtype=dtype, shape=shape)
    return _open_all(loader, file, _chosen(file, names), direct)


def load(
    loader: Any,
    path: str,
    names: Sequence[str] | None,
    device: str | int | None,
    progress: bool | Progress,
    memory_limit: int | None,
) -> dict[str, Any]:
    """Read whole arrays of a file; see `Loader.load`."""
    check_may_wait(loader)
    check_device(loader, device)
    file = open_arrays(path)
    entries = _chosen(file, names)
    total = sum(entry.nbytes for entry in entries)
    check_limit(path, total, memory_limit)
    entries = [with_dtype_of_target(loader, entry) for entry in entries]
    with (
        _open_all(loader, file, [entry for entry in entries if entry.nbytes], None) as sources,
        telling(progress, os.path.basename(path), total) as advance,
    ):
        return _read_all(loader, entries, sources, is_on_host=device == "cpu", advance=advance)


@dataclass(frozen=True)
class _Run:
    """Arrays that stand one behind the other in a file, and are read as one.

    Attributes
    ----------
    entries : list of ArrayEntry
    joins : bool
        Whether they are parts of one region of memory; else there is one entry.
    """

    entries: list[ArrayEntry]
    joins: bool

    @property
    def start(self) -> int:
        return self.entries[0].start

    @property
    def end(self) -> int:
        return self.entries[-1].end


def _runs(
    entries: list[ArrayEntry], may_join: bool, most_of: Callable[[ArrayEntry], int]
) -> Iterator[_Run]:
    """Divide entries into runs, each of at most so many bytes as its first entry may have.

    No two arrays share a byte of memory, even if they do in a file.
    """
    run: list[ArrayEntry] = []
    for entry in sorted(entries, key=lambda entry: (entry.path, entry.start, entry.end)):
        joins = may_join and can_be_placed(entry.dtype, entry.start)
        if run and not (
            joins
            and entry.path == run[0].path
            and 0 <= entry.start - run[-1].end <= _GAP_BYTES
            and entry.end - run[0].start <= most_of(run[0])
        ):
            yield _Run(run, joins=True)
            run = []
        if joins:
            run.append(entry)
        else:
            yield _Run([entry], joins=False)
    if run:
        yield _Run(run, joins=True)


def _requests(run: _Run, most: int) -> Iterator[tuple[int, int]]:
    """Divide a run, of which a large array may be more than `most` bytes, in the file's blocks."""
    start = run.start
    is_long = run.joins and run.end - start > most
    while start < run.end:
        end = min((start // most + 1) * most, run.end) if is_long else run.end
        yield start, end
        start = end


@dataclass(frozen=True)
class _Request:
    """What one request reads of a run; the last of its requests settles it."""

    run: _Run
    memory: Any
    start: int
    end: int
    future: Future[Any]

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def _read_all(
    loader: Any, entries: list[ArrayEntry], sources: ArraySources, is_on_host: bool, advance: Any
) -> dict[str, Any]:
    arrays = {entry.name: _new_array(loader, entry) for entry in entries if entry.nbytes == 0}
    outstanding: deque[_Request] = deque()
    most = reads_at_once(loader, _LOADED_AT_ONCE)

    def settle() -> int:
        request = outstanding[0]
        request.future.result()
        outstanding.popleft()
        run = request.run
        if request.end == run.end:
            for entry in run.entries:
                if run.joins:
                    part = request.memory.part(entry.start - run.start, entry.nbytes)
                    arrays[entry.name] = _as_array(part, entry)
                else:
                    arrays[entry.name] = _in_order(request.memory, entry)
        if len(run.entries) == 1:
            advance(request.nbytes)
        else:
            for entry in run.entries:
                advance(entry.nbytes)
        return request.nbytes

    def most_of(entry: ArrayEntry) -> int:
        return _SHORT_RUN_BYTES if sources[entry.name].source._may_wait else _RUN_BYTES

    nbytes = 0
    goes_straight = loader.config.straight_bytes > 0
    may_join = is_on_host or loader.target == "cpu"
    filled = [entry for entry in entries if entry.nbytes]
    try:
        for run in _runs(filled, may_join, most_of):
            first = run.entries[0]
            source = sources[first.name].source
            if run.joins:
                memory = Region(run.end - run.start, run.start)
            else:
                memory = loader.empty(_shape_in_file(first), first.dtype)
            for start, end in _requests(run, most_of(first)):
                while len(outstanding) == most or nbytes >= _BYTES_AT_ONCE:
                    nbytes -= settle()
                nbytes += end - start
                to = memory.memory[start - run.start : end - run.start] if run.joins else memory
                future = start_read(loader, source, start, end, to)
                outstanding.append(_Request(run, memory, start, end, future))
                if isinstance(to, np.ndarray) and (source._is_direct or not goes_straight):
                    # While the read is under way: else the poller waits for page after page.
                    # Whoever copies out of the page cache clears each right before it fills it,
                    # while it is in that core's cache.
                    bring_in(to)
        while outstanding:
            settle()
    finally:
        for request in outstanding:
            request.future.cancel()
    return {entry.name: arrays[entry.name] for entry in entries}


def _chosen(file: ArrayFile, names: Sequence[str] | None) -> list[ArrayEntry]:
    """Return the entries that are asked for, each once."""
    if names is None:
        return list(file.values())
    if isinstance(names, str):
        raise TypeError(f"tensors is a sequence of names, not one: {names!r}")
    names = list(names)  # what can be walked only once must not come to nothing
    if missing := [name for name in names if name not in file]:
        raise KeyError(f"{file.path} has no array {missing[0]!r}; it has {', '.join(file)}")
    return [file[name] for name in dict.fromkeys(names)]


def _open_all(
    loader: Any, file: ArrayFile, entries: list[ArrayEntry], direct: str | None
) -> ArraySources:
    """Open each file of the entries once, or none."""
    sources: dict[str, Source] = {}
    try:
        for place in dict.fromkeys(entry.path for entry in entries):
            sources[place] = loader.open(place, direct=direct)
    except BaseException:
        for source in sources.values():
            source.close()
        raise
    return ArraySources(
        file, {entry.name: ArraySource.of(entry, sources[entry.path]) for entry in entries}
    )


def check_device(loader: Any, device: str | int | None) -> None:
    """Refuse a device whose memory is not that of the loader's target.

    Raises
    ------
    ConfigError
    """
    is_number = isinstance(device, int | np.integer) and not isinstance(device, bool)
    if device is not None and not is_number and device not in ("cpu", "cuda"):
        raise ConfigError(f'device must be "cpu", "cuda" or the number of a GPU, not {device!r}')
    own = "cuda" if loader.target == "cuda" else "cpu"
    if device in (None, own) or (own == "cuda" and device == loader._service.device.ordinal):
        return
    raise ConfigError(
        f"device={device!r}: this loader's arrays are on {_place_of(loader)}, because its target "
        f"is {loader.target} ({loader.target_reason}); make a Loader for the other one"
    )


def _place_of(loader: Any) -> str:
    if loader.target == "cuda":
        return f"GPU {loader._service.device.ordinal}"
    return "the CPU"


def check_limit(what: str, nbytes: int, limit: int | None) -> None:
    """Refuse what takes more memory than is allowed.

    Raises
    ------
    MemoryLimitError
        `nbytes` is more than `limit`.
    ConfigError
        `limit` is no number of bytes.
    """
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int | np.integer) or limit < 0:
        raise ConfigError(f"memory_limit must be a number of bytes, not {limit!r}")
    if nbytes > limit:
        raise MemoryLimitError(what, nbytes, limit)


def with_dtype_of_target(loader: Any, entry: ArrayEntry) -> ArrayEntry:
    """Return an entry whose arrays the loader's target can have.

    CuPy lacks the floats of a byte that ``ml_dtypes`` has. They come as unsigned integers of the
    same size, as they do where ``ml_dtypes`` is not installed.

    Raises
    ------
    DestinationError
        CuPy has no arrays of this type: other byte orders, text, times.
    """
    if loader.target != "cuda":
        return entry
    try:
        loader.empty(0, entry.dtype)
    except ValueError as error:
        if entry.dtype.type.__module__ == "ml_dtypes":
            return replace(entry, dtype=np.dtype(f"u{entry.dtype.itemsize}"))
        raise DestinationError(
            f"{entry.path}: array {entry.name!r} is of dtype {entry.dtype}, and CuPy: {error}; "
            "load it on the CPU target, or read its bytes"
        ) from None
    return entry


def _shape_in_file(entry: ArrayEntry) -> Any:
    """Return the shape of an array whose elements stand in C order as they do in the file."""
    if entry.packed:
        return entry.nbytes
    return entry.shape[::-1] if entry.order == "F" else entry.shape


def _as_array(memory: Any, entry: ArrayEntry) -> Any:
    """Return the bytes of an array as its file describes it."""
    return _in_order(memory.view(entry.dtype).reshape(_shape_in_file(entry)), entry)


def _in_order(array: Any, entry: ArrayEntry) -> Any:
    return array.T if entry.order == "F" and not entry.packed else array


def _new_array(loader: Any, entry: ArrayEntry) -> Any:
    return _in_order(loader.empty(_shape_in_file(entry), entry.dtype), entry)

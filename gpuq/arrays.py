"""Whole arrays of files: opened for kernels by name, or read into memory at once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gpuq.errors import ConfigError, DestinationError, MemoryLimitError
from gpuq.formats import ArrayEntry, ArrayFile, open_arrays
from gpuq.handles import ArraySource, ArraySources, Source
from gpuq.host.pages import bring_in, placed_empty
from gpuq.progress import Progress, telling
from gpuq.reading import check_may_wait, reads_at_once, start_read

_LOADED_AT_ONCE = 64


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


def _read_all(
    loader: Any, entries: list[ArrayEntry], sources: ArraySources, is_on_host: bool, advance: Any
) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    outstanding: deque[tuple[ArrayEntry, Future[Any]]] = deque()
    most = reads_at_once(loader, _LOADED_AT_ONCE)
    is_placed = is_on_host or loader.target == "cpu"

    def settle() -> None:
        entry, future = outstanding[0]
        future.result()
        outstanding.popleft()
        advance(entry.nbytes)

    try:
        for entry in entries:
            empty = partial(placed_empty, file_offset=entry.start) if is_placed else loader.empty
            arrays[entry.name], memory = _array_for(empty, entry)
            if entry.nbytes == 0:
                continue
            if len(outstanding) == most:
                settle()
            source = sources[entry.name].source
            outstanding.append((entry, start_read(loader, source, entry.start, entry.end, memory)))
            if isinstance(memory, np.ndarray):
                # While the read is under way: else the poller's copy waits for page after page.
                bring_in(memory)
        while outstanding:
            settle()
    finally:
        for _, future in outstanding:
            future.cancel()
    return arrays


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


def _array_for(empty: Any, entry: ArrayEntry) -> tuple[Any, Any]:
    """Return an array as its file describes it, and its bytes in the order of the file."""
    if entry.packed:
        memory = empty(entry.nbytes, entry.dtype)
    elif entry.order == "F":
        memory = empty(entry.shape[::-1], entry.dtype)
        return memory.T, memory
    else:
        memory = empty(entry.shape, entry.dtype)
    return memory, memory

"""What a `Loader` gives out: sources, destinations, streams and counters, each with its handle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpuq.formats import ArrayEntry, ArrayFile
from gpuq.host.choice import keep_forever
from gpuq.host.direct_file import OpenFile
from gpuq.host.service import Service
from gpuq.host.tables import IS_DIRECT
from gpuq.kernels.stream import Stream


@dataclass(frozen=True)
class Explanation:
    """How a source is read, and why.

    Attributes
    ----------
    path : str
    direct : bool
        Whether reads bypass the page cache now.
    alignment : int
        Bytes; of offset and length of the reads.
    reason : str
        Why they do or do not.
    reader, reader_reason : str
    target, target_reason : str
    """

    path: str
    direct: bool
    alignment: int
    reason: str
    reader: str
    reader_reason: str
    target: str
    target_reason: str

    def __str__(self) -> str:
        mode = "direct" if self.direct else "buffered"
        return (
            f"{self.path}: {mode} ({self.reason}); reader {self.reader} ({self.reader_reason}); "
            f"target {self.target} ({self.target_reason})"
        )


class Source:
    """A file that kernels may read, by `handle`. Made by `Loader.open`.

    Attributes
    ----------
    handle : int
        What kernels name it by.
    path : str
    size : int
        Bytes of the file when it was opened.
    start, end : int
        The range that kernels may ask for, in bytes; `end` is one past the last.
    name : str or None
        For `Loader.bind`.
    """

    def __init__(
        self,
        service: Service,
        file: OpenFile,
        handle: int,
        start: int,
        end: int,
        name: str | None,
    ) -> None:
        self.handle = handle
        self.path = file.path
        self.size = file.size
        self.start = start
        self.end = end
        self.name = name
        self._service = service
        self._file: OpenFile | None = file
        self._is_leaving = False

    @property
    def is_open(self) -> bool:
        """Whether kernels may still read it."""
        return self._file is not None and not self._is_leaving

    @property
    def is_let_go(self) -> bool:
        """Whether the file is closed: no request that was admitted uses it any more."""
        return self._file is None

    @property
    def _is_direct(self) -> bool:
        """Whether it is read with O_DIRECT now."""
        return bool(self._service.sources.word(self.handle, IS_DIRECT))

    @property
    def _may_wait(self) -> bool:
        """Whether a server or a program may be behind it: it has no answer "would wait"."""
        return self._file is not None and self._file.may_wait

    def close(self) -> None:
        """Refuse new requests, wait for those admitted, and close the file. Twice is harmless."""
        with self._service.lock:
            file = self._file
            if file is None or self._is_leaving:
                return
            self._is_leaving = True
        try:
            self._service.close_entry(self._service.sources, self.handle)
        except BaseException:
            self._is_leaving = False
            raise
        self._file = None
        # A read that begins later would be one of whatever gets the descriptor's number next.
        if not self._service.may_begin_reads:
            file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self.is_open else ", closed"
        return f"<gpuq.Source {self.path!r}, {self.size} bytes, handle {self.handle:#x}{state}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySource(ArrayEntry):
    """Where one array lies, and the opened file it lies in. Made by `Loader.open_arrays`.

    Attributes
    ----------
    source : Source
        Of the whole file; arrays of one file share it. The rest is that of `ArrayEntry`: the
        array is bytes ``[start, end)`` of it.
    """

    source: Source

    @classmethod
    def of(cls, entry: ArrayEntry, source: Source) -> ArraySource:
        """Return the entry with its source."""
        known = {field.name: getattr(entry, field.name) for field in fields(entry)}
        return cls(**known, source=source)

    @property
    def handle(self) -> int:
        """What kernels name the source by."""
        return self.source.handle

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self.source.size


class ArraySources(Mapping[str, ArraySource]):
    """The arrays of a file by name, the file open for kernels. Made by `Loader.open_arrays`.

    As a context manager it closes its sources in the end; the loader does so too.

    Attributes
    ----------
    path : str
        The file that was named.
    format : {"raw", "npy", "safetensors", "safetensors-index"}
    metadata : Mapping
        See `gpuq.formats.ArrayFile`.
    sources : tuple of Source
        Each file once, however many arrays it has.
    """

    def __init__(self, file: ArrayFile, arrays: Mapping[str, ArraySource]) -> None:
        self.path = file.path
        self.format = file.format
        self.metadata = file.metadata
        self.sources = tuple(dict.fromkeys(array.source for array in arrays.values()))
        self._arrays = dict(arrays)

    def __getitem__(self, name: str) -> ArraySource:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def close(self) -> None:
        """Close every source, see `Source.close`. Twice is harmless."""
        for source in self.sources:
            source.close()

    def __enter__(self) -> ArraySources:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<gpuq.ArraySources {self.path!r}: {self.format}, {len(self)} arrays "
            f"in {len(self.sources)} files>"
        )


class Destination:
    """An array that kernels may have bytes put into, by `handle`. Made by `Loader.register`.

    Attributes
    ----------
    handle : int
        What kernels name it by.
    nbytes : int
    array : array
        Kept alive until `unregister`.
    name : str or None
        For `Loader.bind`.
    is_for_kernels : bool
        False where `Loader.read` uses it, and `Loader.bind` overlooks it.
    """

    def __init__(
        self,
        service: Service,
        array: Any,
        owner: Any,
        handle: int,
        nbytes: int,
        name: str | None,
    ) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.array = array
        self.name = name
        self.is_for_kernels = True
        self._owner = owner
        self._is_leaving = False
        self._service = service

    @property
    def is_registered(self) -> bool:
        """Whether kernels may still have bytes put there."""
        return self._owner is not None and not self._is_leaving

    @property
    def is_let_go(self) -> bool:
        """Whether nothing is put there any more."""
        return self._owner is None

    def unregister(self) -> None:
        """Refuse new requests, wait for those admitted, and let the array go. Twice is harmless."""
        unregister_all([self])

    def __repr__(self) -> str:
        state = "" if self.is_registered else ", unregistered"
        return f"<gpuq.Destination of {self.nbytes} bytes, handle {self.handle:#x}{state}>"


def unregister_all(destinations: Iterable[Destination]) -> None:
    """Unregister destinations of one loader, with one wait for all of them."""
    given = list(destinations)
    if not given:
        return
    service = given[0]._service
    with service.lock:
        leaving = [destination for destination in given if destination.is_registered]
        for destination in leaving:
            destination._is_leaving = True
    if not leaving:
        return
    try:
        service.close_entry(service.destinations, *(each.handle for each in leaving))
    except BaseException:
        for destination in leaving:
            destination._is_leaving = False
        raise
    if service.is_dirty:
        # Nobody waits any more for the reads and copies that a poller left behind when it died.
        keep_forever([destination._owner for destination in leaving])
    for destination in leaving:
        destination._owner = None


@dataclass(frozen=True)
class TileStream:
    """Rows of a source for the blocks of a kernel, tile by tile. Made by `Loader.stream`.

    Attributes
    ----------
    handle : Stream
        What kernels are handed: for `gpuq.stream_open` and `gpuq.stream_next`.
    destination : Destination
        The tiles.
    """

    handle: Stream
    destination: Destination

    @property
    def rows(self) -> int:
        """How many rows the stream's range has."""
        return self.handle.rows

    def close(self) -> None:
        """Let the tiles go; no kernel walks any more."""
        self.destination.unregister()


@dataclass(frozen=True)
class Counter:
    """Counts the answers to `gpuq.post_counted`. Made by `Loader.counter`.

    Attributes
    ----------
    handle : int
        What kernels name it by.
    """

    handle: int

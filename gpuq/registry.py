"""What a `Loader` has given out: its sources, destinations and counters."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from gpuq.config import DIRECT_MODES, LoaderConfig
from gpuq.errors import ConfigError, DestinationError, SourceError
from gpuq.handles import (
    ArraySource,
    Counter,
    Destination,
    Explanation,
    Source,
    TileStream,
)
from gpuq.host.direct_file import open_file
from gpuq.host.records import STATISTICS_TRACE_LOST
from gpuq.host.service import Service
from gpuq.host.tables import (
    ADDRESS,
    ALIGNMENT,
    BUFFERED_DESCRIPTOR,
    DIRECT_DESCRIPTOR,
    FALLBACK_ERRNO,
    IS_DIRECT,
    IS_PROVEN,
    KIND,
    LIMIT_END,
    LIMIT_START,
    MAX_OFFSET,
    MUST_BE_DIRECT,
    NBYTES,
    ONLY_STAGED,
)
from gpuq.host.taken import Trace
from gpuq.host.tracing import take_records
from gpuq.ordering import load_acquire

_CLOSED_PATHS = 1 << 16
"""Paths of closed sources that are kept for the trace, the newest ones."""


class Registry:
    """The part of a `Loader` that opens files, registers arrays and gives out counters."""

    config: LoaderConfig
    target: str
    target_reason: str
    _service: Service

    def __init__(self) -> None:
        self._sources: dict[int, Source] = {}
        self._destinations: dict[int, Destination] = {}
        self._counters = 0
        self._paths: dict[int, str] = {}
        self._lost = 0

    # --- sources ---

    def open(
        self,
        path: str | os.PathLike[str],
        *,
        direct: str | None = None,
        start: int = 0,
        end: int | None = None,
        name: str | None = None,
    ) -> Source:
        """Open a file for kernels to read.

        Parameters
        ----------
        path : path-like
            A regular file or a block device.
        direct : {"auto", "require", "off"}, optional
            Whether it is read with O_DIRECT; by default as the loader's settings say.
        start, end : int
            Range that kernels may ask for, in bytes; beyond it they get
            ``Status.OUT_OF_BOUNDS``. By default the whole file, whose end is wherever it is when
            a read comes there (``Status.END_OF_FILE``).
        name : str, optional
            For `bind`.

        Raises
        ------
        OSError
            The system refuses to open it; `filename` names it.
        SourceError
            It is no file to read from, the range is wrong, or too many sources are open.
        DirectUnavailableError
            ``direct="require"``, and direct reads do not work for this file.
        ClosedError, PollerDiedError, ForkedError
            The loader cannot be used any more.
        """
        self._service.check()
        path = os.fsdecode(path)
        mode = self.config.direct if direct is None else direct
        if mode not in DIRECT_MODES:
            raise ConfigError(f"direct must be one of {', '.join(DIRECT_MODES)}, not {direct!r}")
        limit = MAX_OFFSET if end is None else end
        if not 0 <= start <= limit <= MAX_OFFSET:
            raise SourceError(
                f"{path}: the range {start} to {end} is none; 0 <= start <= end <= 2**62 is needed"
            )
        file = open_file(path, mode, self.config.staging_bytes)
        with self._service.lock:
            index = self._service.sources.reserve()
            if index < 0:
                file.close()
                raise SourceError(
                    f"{file.path}: {self.config.sources} sources are open already (setting sources)"
                )
            self._service.choice.note(file)
            handle = self._service.sources.publish(
                index,
                {
                    DIRECT_DESCRIPTOR: file.direct,
                    BUFFERED_DESCRIPTOR: file.buffered,
                    ALIGNMENT: file.alignment,
                    LIMIT_START: start,
                    LIMIT_END: limit,
                    IS_DIRECT: int(file.direct >= 0),
                    MUST_BE_DIRECT: int(mode == "require"),
                    IS_PROVEN: int(file.proven),
                    ONLY_STAGED: int(not file.pins),
                },
            )
            source = Source(self._service, file, handle, start, limit, name)
            self._prune()
            self._sources[handle] = source
            if self.config.trace:
                self._keep_path(source)
        return source

    def explain(self, source: Source) -> Explanation:
        """Say how a source is read and why."""
        table = self._service.sources
        if not source.is_open or self._sources.get(source.handle) is not source:
            raise SourceError(f"{source!r} is not open in this loader")
        file = source._file
        assert file is not None
        direct = source._is_direct
        number = table.word(source.handle, FALLBACK_ERRNO)
        reason = file.reason
        if number:
            what = "all reads" if not direct else "some reads"
            reason += f", but {what} fell back: {os.strerror(number)}"
        return Explanation(
            path=source.path,
            direct=direct,
            alignment=file.alignment if direct else 1,
            reason=reason,
            reader=self._service.choice.name,
            reader_reason=self._service.choice.reason,
            target=self.target,
            target_reason=self.target_reason,
        )

    # --- the trace ---

    def _keep_path(self, source: Source) -> None:
        self._paths[source.handle] = source.path
        if len(self._paths) > self.config.sources + _CLOSED_PATHS:
            self._paths.pop(next(h for h in self._paths if h not in self._sources))

    def _take_trace(self) -> Trace:
        """Take what is in the ring; the service's lock is held."""
        poller = self._service.poller
        # Before the records, so that what is lost meanwhile is told with the next ones.
        lost = int(load_acquire(poller.statistics, STATISTICS_TRACE_LOST))
        records = take_records(poller)
        lost, self._lost = lost - self._lost, lost
        handles = np.unique(records["source"]).tolist()
        return Trace(
            records=records,
            sources={handle: self._paths[handle] for handle in handles if handle in self._paths},
            lost=lost,
            target=self.target,
            reader=self._service.choice.name,
        )

    # --- counters ---

    def counter(self) -> Counter:
        """Return a counter for `gpuq.post_counted`; it lives as long as the loader.

        Raises
        ------
        ConfigError
            All are given out (setting counters).
        ClosedError, PollerDiedError, ForkedError
            The loader cannot be used any more.
        """
        self._service.check()
        return Counter(self._take_counters(1))

    def _take_counters(self, count: int) -> int:
        """Give out `count` counters in a row; return the first one's number."""
        with self._service.lock:
            first = self._counters
            if first + count > self.config.counters:
                raise ConfigError(
                    f"{first} of {self.config.counters} counters are given out, {count} more were "
                    "asked for (setting counters)"
                )
            self._counters += count
        return first

    # --- destinations ---

    def register(self, array: Any, *, name: str | None = None) -> Destination:
        """Let kernels have bytes put into an array.

        Parameters
        ----------
        array : array
            Writable and C-contiguous. It is kept alive until it is unregistered or the loader
            is closed.
        name : str, optional
            For `bind`.

        Raises
        ------
        DestinationError
            It is read-only, strided, holds Python objects, or is out of the target's reach; or
            too many are registered.
        ClosedError, PollerDiedError, ForkedError
            The loader cannot be used any more.
        """
        self._service.check()
        region = self._service.device.destination(array)
        with self._service.lock:
            index = self._service.destinations.reserve()
            if index < 0:
                raise DestinationError(
                    f"{self.config.destinations} destinations are registered already "
                    "(setting destinations)"
                )
            handle = self._service.destinations.publish(
                index,
                {ADDRESS: region.address, NBYTES: region.nbytes, KIND: region.kind},
            )
            destination = Destination(
                self._service, array, region.owner, handle, region.nbytes, name
            )
            self._prune()
            self._destinations[handle] = destination
        return destination

    def empty(self, shape: Any, dtype: Any = "uint8") -> Any:
        """Return an uninitialized array that kernels of this target can read and be given."""
        self._service.check()
        return self._service.device.empty(shape, dtype)

    def array(self, values: Any, dtype: Any = None) -> Any:
        """Return a copy of values that kernels of this target can read, write and be given.

        On CUDA it is device memory: make it before kernels poll.

        Parameters
        ----------
        values : array-like
            As for `numpy.array`.
        dtype : dtype-like, optional
        """
        self._service.check()
        return self._service.device.array(np.array(values, dtype, order="C"))

    def to_numpy(self, array: Any) -> Any:
        """Return what is in an array of this target as a NumPy array, a copy.

        Kernels that write to it have returned: `synchronize` first.
        """
        return self._service.device.to_numpy(array)

    def unregister(self, destination: Destination) -> None:
        """Same as ``destination.unregister()``."""
        destination.unregister()

    def _find(
        self,
        known: dict[int, Any],
        wanted: Any,
        error: type[Exception],
        what: str,
    ) -> Any:
        """Return the entry that `wanted` means: itself, the one of this name, or the first."""
        self._prune()
        known = {handle: entry for handle, entry in known.items() if not entry._is_leaving}
        if wanted is None:
            if not known:
                raise error(f"no {what} is open in this loader")
            return next(iter(known.values()))
        if isinstance(wanted, str):
            matches = [entry for entry in known.values() if entry.name == wanted]
            if len(matches) == 1:
                return matches[0]
            if matches:
                raise error(f"{len(matches)} {what}s are named {wanted!r}")
            names = ", ".join(sorted(repr(e.name) for e in known.values() if e.name)) or "none"
            raise error(f"no {what} is named {wanted!r}; named are: {names}")
        return wanted

    def _check_owner(self, given: Any) -> None:
        """Refuse what another loader gave out: its handle names something else here."""
        if isinstance(given, ArraySource):
            given = given.source
        elif isinstance(given, TileStream):
            given = given.destination
        if isinstance(given, Source | Destination) and given._service is not self._service:
            error = SourceError if isinstance(given, Source) else DestinationError
            raise error(f"{given!r} is another loader's")

    def _prune(self) -> None:
        """Forget entries that were let go.

        Not one that is still being closed: where that is interrupted, requests may use it.
        """
        for known in (self._sources, self._destinations):
            for handle in [handle for handle, entry in known.items() if entry.is_let_go]:
                del known[handle]

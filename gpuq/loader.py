"""The `Loader`: what users hold. It composes a queue for kernels with the service behind it."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import FunctionType, TracebackType
from typing import Any

import numpy as np

from gpuq import reading
from gpuq.compiling import SIMULATED
from gpuq.config import DIRECT_MODES, LoaderConfig
from gpuq.errors import (
    ConfigError,
    DestinationError,
    SourceError,
    TargetUnavailableError,
)
from gpuq.handles import Counter, Destination, Explanation, Source, TileStream
from gpuq.host.choice import keep_forever
from gpuq.host.device import CpuDevice, Device, SimulatorDevice
from gpuq.host.direct_file import open_file
from gpuq.host.interrupting import acting_at_interrupt
from gpuq.host.service import Service
from gpuq.host.statistics import Statistics
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
)
from gpuq.kernels.binding import bind
from gpuq.kernels.gathering import Table
from gpuq.kernels.queue import pull
from gpuq.kernels.stream import MOST_TILE_ROWS, MOST_TILES, STREAM_WORDS, Stream
from gpuq.launching import Launch, compile_for_cpu, cuda_kernel, launch_on_cpu, launch_on_cuda
from gpuq.layout import NO_TICKET, Queue, State

_ABORTED_SECONDS = 10.0
_WITH_HANDLE = (Source, Destination, TileStream, Counter)


class Loader:
    """A queue that kernels post to, and the poller that serves it.

    Parameters
    ----------
    config : LoaderConfig, optional
        All settings at once.
    **settings
        Single settings instead; see `LoaderConfig`. What is not given comes from the environment
        (GPUQ_TARGET, GPUQ_READER, GPUQ_DIRECT) and then from the defaults.

    Attributes
    ----------
    queue : Queue
        What kernels are handed.
    config : LoaderConfig
    target, target_reason : str
        Where kernels run, and why there.

    Raises
    ------
    ConfigError, TargetUnavailableError, ReaderUnavailableError
        Nothing was started.

    Examples
    --------
    >>> with gpuq.Loader() as loader:                       # doctest: +SKIP
    ...     source = loader.open("weights.bin")
    ...     tile = loader.register(np.empty(4096, np.uint8))
    ...     kernel(loader.queue, source.handle, tile.handle)
    """

    def __init__(self, config: LoaderConfig | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError("give either a LoaderConfig or single settings, not both")
        self.config = config or LoaderConfig.from_environment(**settings)
        device, self.target_reason = choose_device(self.config.target)
        self.target = device.name
        self._service = Service(self.config, device)
        self._service.start()
        self.queue: Queue = self._service.queue
        self._sources: dict[int, Source] = {}
        self._destinations: dict[int, Destination] = {}
        self._counters = 0
        self._launches: list[Launch] = []
        self._reads: reading.HostReads | None = None
        # Runs at interpreter exit too, while the poller's daemon thread is still served.
        self._finalizer = weakref.finalize(
            self, _finish, self._service, self._sources, self._destinations
        )

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
        mode = self.config.direct if direct is None else direct
        if mode not in DIRECT_MODES:
            raise ConfigError(f"direct must be one of {', '.join(DIRECT_MODES)}, not {direct!r}")
        limit = MAX_OFFSET if end is None else end
        if not 0 <= start <= limit <= MAX_OFFSET:
            raise SourceError(
                f"{os.fspath(path)}: the range {start} to {end} is none; "
                f"0 <= start <= end <= 2**62 is needed"
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
                },
            )
            source = Source(self._service, file, handle, start, limit, name)
            self._prune()
            self._sources[handle] = source
        return source

    def explain(self, source: Source) -> Explanation:
        """Say how a source is read and why."""
        table = self._service.sources
        if not source.is_open or self._sources.get(source.handle) is not source:
            raise SourceError(f"{source!r} is not open in this loader")
        file = source._file
        assert file is not None
        direct = bool(table.word(source.handle, IS_DIRECT))
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

    def _prune(self) -> None:
        """Forget entries that were closed."""
        for handle in [h for h, source in self._sources.items() if not source.is_open]:
            del self._sources[handle]
        for handle in [h for h, d in self._destinations.items() if not d.is_registered]:
            del self._destinations[handle]

    # --- kernels ---

    def prepare(self, kernel: Any, *arguments: Any) -> Any:
        """Compile and load a kernel before anything polls; return it.

        On CUDA, the first launch of a kernel that is not loaded can wait for running ones, which
        may wait for the host: prepare every kernel before the first that polls is launched. On
        other targets this only compiles.

        Parameters
        ----------
        kernel : dispatcher or function
            Made by ``numba.cuda.jit``, or ``numba.njit`` on the CPU target; or a body for
            `launch`.
        *arguments
            As they will be at the launch; only their types matter.
        """
        self._service.check()
        if self.target == "cuda" and not hasattr(kernel, "typeof_pyval"):
            self._service.device.prepare(cuda_kernel(kernel), (_handed(arguments),))
            return kernel
        if self.target == "cpu" and isinstance(kernel, FunctionType):
            compile_for_cpu(kernel, _handed(arguments))
            return kernel
        return self._service.device.prepare(kernel, arguments)

    def launch(
        self,
        body: Callable[..., Any],
        size: int,
        *arguments: Any,
        threads_per_block: int = 1,
        threads: int | None = None,
        stream: Any = None,
    ) -> None:
        """Run a kernel body on this loader's target; `synchronize` waits for it.

        Parameters
        ----------
        body : function
            Called as ``body(index, size, *arguments)`` for every index below `size`, compiled
            for the target. On CUDA the index is the block's, and all its threads call it; on the
            CPU a block is one thread. A body must not wait for another: blocks may run one
            after another. What it returns is dropped. Names in it that are no arguments are
            constants of the compiled code.
        size : int
            Blocks; with none, nothing is launched.
        *arguments
            What a kernel of the target takes: the queue, arrays of the target, numbers. A
            `Source`, `Destination`, `TileStream` or `Counter` is handed over as its handle.
        threads_per_block : int
            On CUDA and in the simulator.
        threads : int, optional
            OS threads on the CPU target; by default one for each processor.
        stream : numba or CuPy stream, optional
            On CUDA.

        Raises
        ------
        ConfigError
            A number is out of its range.
        ClosedError, PollerDiedError, ForkedError
            The loader cannot be used any more. Nothing was launched.

        Notes
        -----
        What a body raises on the CPU, `synchronize` raises. Its thread runs no further bodies,
        the others go on.
        """
        self._service.check()
        if size < 0 or threads_per_block < 1 or (threads is not None and threads < 1):
            raise ConfigError("a launch has 0 blocks or more, and at least 1 thread")
        handed = _handed(arguments)
        if size == 0:
            return
        if self.target == "cpu":
            self._launches.append(launch_on_cpu(body, size, handed, threads))
        else:
            launch_on_cuda(body, size, handed, threads_per_block, stream)

    def bind(
        self,
        function: Callable[..., Any] = pull,
        *,
        source: Source | int | str | None = None,
        destination: Destination | int | str | None = None,
        tag: int = 0,
    ) -> Callable[..., Any]:
        """Fix the source, destination and tag of a queue function, see `gpuq.bind`.

        Parameters
        ----------
        function : function, optional
            `gpuq.pull` by default.
        source, destination : optional
            The object, its handle, or the name it was given. By default the first one open.
        tag : int

        Raises
        ------
        SourceError, DestinationError
            None is open, or none has this name.
        """
        return bind(
            function,
            source=self._find(self._sources, source, SourceError, "source"),
            destination=self._find(
                {h: d for h, d in self._destinations.items() if d.is_for_kernels},
                destination,
                DestinationError,
                "destination",
            ),
            tag=tag,
        )

    def stream(
        self,
        source: Source,
        tile: int | tuple[int, ...],
        dtype: Any = "uint8",
        *,
        start: int = 0,
        end: int | None = None,
        tiles_in_flight: int = 2,
        workers: int = 1,
    ) -> TileStream:
        """Make a stream of tiles for the blocks of a kernel, see `gpuq.stream_open`.

        Parameters
        ----------
        source : Source
        tile : int or tuple of int
            Shape of a tile: rows, then the shape of a row. ``(64, 1000)`` is 64 rows of a matrix
            with 1000 columns; ``4096`` is 4096 elements.
        dtype : dtype-like
            Of the elements.
        start, end : int
            Where the rows lie in the file, in bytes; by default all of it. What is left behind
            the last whole row is no row.
        tiles_in_flight : int
            Tiles of a worker that are on their way while one is worked on.
        workers : int
            Blocks that walk at once, each with tiles of its own.

        Raises
        ------
        ConfigError
            A number is out of its range, or the tiles in flight exceed the queue's slots.
        """
        self._service.check()
        shape = (tile,) if isinstance(tile, int) else tuple(tile)
        row_bytes = np.dtype(dtype).itemsize * math.prod(shape[1:])
        if not shape or not 0 < shape[0] <= MOST_TILE_ROWS or row_bytes < 1:
            raise ConfigError(f"a tile of shape {shape} has no rows, or too many")
        if tiles_in_flight < 1 or not 0 < workers <= MOST_TILES // (tiles_in_flight + 1):
            raise ConfigError("tiles_in_flight and workers must be at least 1, and not millions")
        ring = tiles_in_flight + 1
        if ring * workers > self.config.slots:
            raise ConfigError(
                f"{workers} workers with {tiles_in_flight} tiles in flight and one at work need "
                f"{ring * workers} slots; there are {self.config.slots} (setting slots)"
            )
        limit = min(source.size, source.end) if end is None else end
        if not 0 <= start <= limit:
            raise ConfigError(f"{source.path}: the range {start} to {limit} is none")
        device = self._service.device
        tiles = device.filled((workers, ring, *shape), dtype, 0)
        destination = self.register(tiles)
        handle = Stream(
            source=source.handle,
            destination=destination.handle,
            start=start,
            rows=(limit - start) // row_bytes,
            row_bytes=row_bytes,
            tiles=tiles,
            tickets=device.filled((workers, ring), "int64", NO_TICKET),
            words=device.filled((workers, STREAM_WORDS), "int64", 0),
        )
        return TileStream(handle, destination)

    def table(
        self,
        source: Source,
        destination: Destination,
        row_bytes: int,
        *,
        start: int = 0,
        end: int | None = None,
        workers: int = 1,
    ) -> Table:
        """Name a table of rows in a file, for `gpuq.gather`.

        Parameters
        ----------
        source : Source
        destination : Destination
            Where the rows that are gathered go, one behind the other.
        row_bytes : int
        start, end : int
            Where the rows lie in the file, in bytes; by default all of it.
        workers : int
            Blocks that gather at once. Each uses up a counter.

        Raises
        ------
        ConfigError
            A number is out of its range, or not so many counters are left.
        """
        self._service.check()
        limit = min(source.size, source.end) if end is None else end
        if row_bytes < 1 or workers < 1 or not 0 <= start <= limit:
            raise ConfigError(
                f"{source.path}: no table of rows of {row_bytes} bytes from {start} to {limit} "
                f"for {workers} workers"
            )
        return Table(
            source=source.handle,
            destination=destination.handle,
            start=start,
            rows=(limit - start) // row_bytes,
            row_bytes=row_bytes,
            counter=self._take_counters(workers),
            workers=workers,
        )

    def synchronize(self, stream: Any = None) -> None:
        """Wait until launched kernels have returned; interruptible.

        On Ctrl-C the queue is aborted, so that kernels that wait return, and KeyboardInterrupt
        is raised when they have, or after ten seconds. A kernel that was called directly on the
        CPU or in the simulator has returned with its call.

        Parameters
        ----------
        stream : numba or CuPy stream, optional
            By default Numba's default stream.

        Raises
        ------
        Exception
            Whatever a body on the CPU raised: the first error of the oldest launch.
        PollerDiedError
            The poller ended by an error, so kernels got ``Status.ABORTED``.
        """
        try:
            self._service.device.synchronize(stream)
            for launch in tuple(self._launches):
                launch.join()
                with contextlib.suppress(ValueError):  # another thread waits too
                    self._launches.remove(launch)
                launch.raise_error()
        except KeyboardInterrupt:
            self.abort()
            self._service.device.settle(stream)
            for launch in self._launches:
                launch.join(_ABORTED_SECONDS)
            self._launches.clear()
            raise
        self._service.raise_death()

    def interruptible(self) -> AbstractContextManager[None]:
        """Let Ctrl-C abort the queue while the main thread itself runs a compiled kernel.

        Python's own handler cannot run before such a kernel has returned. Inside this ``with``
        a thread sees the signal at once and aborts, so that a kernel that waits returns, with
        ``Status.ABORTED``; then KeyboardInterrupt is raised as ever. The kernel must be compiled
        with ``nogil=True``. Kernels that `launch` runs need none of this, see `synchronize`.
        """
        return acting_at_interrupt(self.abort)

    # --- reads without kernels ---

    def read(self, source: Source, start: int = 0, end: int | None = None, out: Any = None) -> Any:
        """Read a range of a file and return it, through the same engine as kernels.

        On CUDA the reads are made by a kernel; make the first one before kernels poll, and give
        `out` where they do, since memory is allocated otherwise.

        Parameters
        ----------
        source : Source
        start, end : int
            In bytes; by default to the end that the file had when it was opened.
        out : array, optional
            Receives the bytes: one that `register` takes, of exactly that size. By default a new
            array of bytes, from `empty`.

        Returns
        -------
        array
            `out`, or the new one.

        Raises
        ------
        ReadError
            Not all bytes are there; it names path, range, status and errno. What is in `out`
            means nothing.
        SourceError, DestinationError
            `source` is not open in this loader, the range is none; `out` is of another size or
            cannot be a destination. Nothing was read.
        ClosedError, PollerDiedError, ForkedError
            The loader cannot be used any more, or ended meanwhile.
        """
        return reading.read(self, source, start, end, out)

    def read_async(
        self, source: Source, start: int = 0, end: int | None = None, out: Any = None
    ) -> Future[Any]:
        """Begin to read like `read`; the future has the array, or the error.

        Its callbacks run in the thread that reads, and hold up all others. `cancel` works until
        the read is handed to the queue.
        """
        return reading.start_read(self, source, start, end, out)

    def read_many(
        self, source: Source, ranges: Iterable[tuple[int, int]], *, in_flight: int = 64
    ) -> Iterator[tuple[int, Any]]:
        """Read ranges, and give each as it arrives, in whatever order that is.

        Parameters
        ----------
        source : Source
        ranges : iterable of (start, end)
            Taken from as reads end, so it may be long, or endless.
        in_flight : int
            Reads under way at once, each with an array of its own; at most half of the loader's
            destinations.

        Yields
        ------
        (int, array)
            Number of the range, from 0, and its bytes.

        Raises
        ------
        ReadError and others
            As for `read`, when the read that failed would have been given.
        """
        self.check()
        if in_flight < 1:
            raise ConfigError(f"in_flight must be at least 1, not {in_flight}")
        return reading.read_many(self, source, ranges, in_flight)

    def load(
        self, path: str | os.PathLike[str], tensors: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Read whole arrays of a raw, ``.npy`` or ``.safetensors`` file, or of all its shards.

        Parameters
        ----------
        path : path-like
            See `gpuq.formats.open_arrays`.
        tensors : sequence of str, optional
            Names of arrays; by default all.

        Returns
        -------
        dict of str to array
            In the file's order, or that of `tensors`. Shapes and dtypes are the file's; elements
            smaller than a byte come as bytes.

        Raises
        ------
        KeyError
            The file has no array of a name.
        FormatError, OSError, ReadError and others
            From the headers, from opening, and from reading.
        """
        return reading.load(self, os.fspath(path), tensors)

    def _host_reads(self) -> reading.HostReads:
        with self._service.lock:
            if self._reads is None:
                self._reads = reading.HostReads(self._service, self.queue)
                weakref.finalize(self, self._reads.stop)
            return self._reads

    # --- life ---

    @property
    def state(self) -> State:
        """Where the queue is in its life."""
        return self._service.state

    def statistics(self) -> Statistics:
        """Return a snapshot of what was done; works on a closed loader too."""
        return self._service.statistics()

    def check(self) -> None:
        """Raise if the loader cannot be used any more.

        Raises
        ------
        PollerDiedError, ClosedError, ForkedError
        """
        self._service.check()

    def abort(self) -> None:
        """Release every waiting kernel at once, with ``Status.ABORTED``.

        Returns at once; safe from a signal handler and more than once. `close` gives the memory
        back. Until then a read that was under way may still bring bytes to its destination.
        """
        self._service.abort()

    def close(self) -> None:
        """Serve what was posted, stop the poller, and give everything back.

        Safe from a signal handler; a second call does nothing. After `abort` it only waits for
        reads under way.

        Raises
        ------
        PollerDiedError
            The poller had ended by an error that no call has raised yet. All was given back.
        """
        try:
            self._service.close()
        finally:
            if self._reads is not None:
                self._reads.stop(_ABORTED_SECONDS)
            _forget(self._service, self._sources, self._destinations)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
            try:
                self.close()
            except Exception as error:
                value.add_note(f"and the loader, while it was closed: {error}")  # type: ignore[union-attr]
            return
        self.close()

    def __repr__(self) -> str:
        return (
            f"<gpuq.Loader {self.state.name.lower()}, target {self.target}, "
            f"reader {self._service.choice.name}, {self.config.slots} slots, "
            f"{self.config.staging_buffers} x {self.config.staging_bytes} bytes of staging>"
        )


def _handed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments as kernels take them: handles in the place of what has one."""
    return tuple(
        argument.handle if isinstance(argument, _WITH_HANDLE) else argument
        for argument in arguments
    )


def _forget(
    service: Service, sources: dict[int, Source], destinations: dict[int, Destination]
) -> None:
    """Close files and let arrays go once no poller can use them."""
    if service.is_dirty:
        # A copy may still be under way to one of these arrays.
        keep_forever(list(destinations.values()))
    if service.is_serving:
        return
    while sources:
        sources.popitem()[1].close()
    while destinations:
        destinations.popitem()[1].unregister()


def _finish(
    service: Service, sources: dict[int, Source], destinations: dict[int, Destination]
) -> None:
    service.finish()
    _forget(service, sources, destinations)


def choose_device(target: str) -> tuple[Device, str]:
    """Return the device for a target and why it was taken.

    Raises
    ------
    TargetUnavailableError
        The target that was asked for does not work here.
    """
    if target == "cpu":
        return CpuDevice(), 'target="cpu" was asked for'
    if SIMULATED:
        if target == "cuda":
            raise TargetUnavailableError(
                'target="cuda": NUMBA_ENABLE_CUDASIM=1 replaces CUDA by the simulator'
            )
        return SimulatorDevice(), "NUMBA_ENABLE_CUDASIM=1 is set"
    if target == "simulator":
        raise TargetUnavailableError(
            'target="simulator": set NUMBA_ENABLE_CUDASIM=1 before Python starts'
        )
    from gpuq.host.cuda_device import CudaDevice

    try:
        device = CudaDevice()
    except TargetUnavailableError as error:
        if target == "cuda":
            raise TargetUnavailableError(f'target="cuda": {error}') from None
        return CpuDevice(), f"no usable GPU: {error}"
    asked = 'target="cuda" was asked for' if target == "cuda" else "a usable GPU is there"
    return device, f"{asked}: {device.facts.name}"

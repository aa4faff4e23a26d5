"""What a `Loader` does for kernels: it prepares, launches and awaits them."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import numpy as np

from gpuq.errors import ConfigError, DestinationError, SourceError
from gpuq.handles import ArraySource, Counter, Destination, Source, TileStream
from gpuq.host.interrupting import acting_at_interrupt
from gpuq.host.tables import MAX_OFFSET
from gpuq.kernels.binding import bind
from gpuq.kernels.gathering import Table
from gpuq.kernels.queue import pull
from gpuq.kernels.stream import MOST_TILE_ROWS, MOST_TILES, STREAM_WORDS, Stream
from gpuq.launching import Launch, compile_for_cpu, cuda_kernel, launch_on_cpu, launch_on_cuda
from gpuq.layout import NO_TICKET
from gpuq.registry import Registry

_ABORTED_SECONDS = 10.0
_WITH_HANDLE = (Source, ArraySource, Destination, TileStream, Counter)


class KernelSide(Registry):
    """The part of a `Loader` that has to do with kernels."""

    def __init__(self) -> None:
        super().__init__()
        self._launches: list[Launch] = []

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
            `Source`, `ArraySource`, `Destination`, `TileStream` or `Counter` is handed over as
            its handle.
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
        SourceError, DestinationError
            One of the arguments is another loader's, where its handle means something else.
        ClosedError, PollerDiedError, ForkedError
            The loader cannot be used any more. Nothing was launched.

        Notes
        -----
        What a body raises on the CPU, `synchronize` raises. Its thread runs no further bodies,
        the others go on.
        """
        self._service.check()
        size = operator.index(size)
        if size < 0 or threads_per_block < 1 or (threads is not None and threads < 1):
            raise ConfigError("a launch has 0 blocks or more, and at least 1 thread")
        for argument in arguments:
            self._check_owner(argument)
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
        source: Source | ArraySource | int | str | None = None,
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
            None is open, or none has this name; or it is another loader's.
        """
        self._check_owner(source)
        self._check_owner(destination)
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
        source: Source | ArraySource,
        tile: int | tuple[int, ...],
        dtype: Any = "uint8",
        *,
        start: int | None = None,
        end: int | None = None,
        tiles_in_flight: int = 2,
        workers: int = 1,
    ) -> TileStream:
        """Make a stream of tiles for the blocks of a kernel, see `gpuq.stream_open`.

        Parameters
        ----------
        source : Source or ArraySource
        tile : int or tuple of int
            Shape of a tile: rows, then the shape of a row. ``(64, 1000)`` is 64 rows of a matrix
            with 1000 columns; ``4096`` is 4096 elements.
        dtype : dtype-like
            Of the elements.
        start, end : int
            Where the rows lie in the file, in bytes; by default all that may be asked for, see
            `open`, or the array. What is left behind the last whole row is no row.
        tiles_in_flight : int
            Tiles of a worker that are on their way while one is worked on.
        workers : int
            Blocks that walk at once, each with tiles of its own.

        Raises
        ------
        ConfigError
            A number is out of its range, or the tiles in flight exceed the queue's slots.
        SourceError
            `source` is another loader's.
        """
        self._service.check()
        self._check_owner(source)
        shape = tuple(map(operator.index, tile if isinstance(tile, Iterable) else (tile,)))
        row_bytes = np.dtype(dtype).itemsize * math.prod(shape[1:])
        if not shape or min(shape) < 1 or shape[0] > MOST_TILE_ROWS or row_bytes < 1:
            raise ConfigError(f"a tile of shape {shape} has no rows, or too many")
        if tiles_in_flight < 1 or not 0 < workers <= MOST_TILES // (tiles_in_flight + 1):
            raise ConfigError("tiles_in_flight and workers must be at least 1, and not millions")
        ring = tiles_in_flight + 1
        if ring * workers > self.config.slots:
            raise ConfigError(
                f"{workers} workers with {tiles_in_flight} tiles in flight and one at work need "
                f"{ring * workers} slots; there are {self.config.slots} (setting slots)"
            )
        first, limit = _rows_of(source, start, end)
        if not 0 <= first <= limit <= MAX_OFFSET:
            raise ConfigError(f"{source.path}: the range {first} to {limit} is none")
        device = self._service.device
        tiles = device.filled((workers, ring, *shape), dtype, 0)
        destination = self.register(tiles)
        handle = Stream(
            source=source.handle,
            destination=destination.handle,
            start=first,
            rows=(limit - first) // row_bytes,
            row_bytes=row_bytes,
            tiles=tiles,
            tickets=device.filled((workers, ring), "int64", NO_TICKET),
            words=device.filled((workers, STREAM_WORDS), "int64", 0),
        )
        return TileStream(handle, destination)

    def table(
        self,
        source: Source | ArraySource,
        destination: Destination,
        row_bytes: int,
        *,
        start: int | None = None,
        end: int | None = None,
        workers: int = 1,
    ) -> Table:
        """Name a table of rows in a file, for `gpuq.gather`.

        Parameters
        ----------
        source : Source or ArraySource
        destination : Destination
            Where the rows that are gathered go, one behind the other.
        row_bytes : int
        start, end : int
            Where the rows lie in the file, in bytes; by default all that may be asked for.
        workers : int
            Blocks that gather at once. Each uses up a counter.

        Raises
        ------
        ConfigError
            A number is out of its range, or not so many counters are left.
        SourceError, DestinationError
            `source` or `destination` is another loader's.
        """
        self._service.check()
        self._check_owner(source)
        self._check_owner(destination)
        first, limit = _rows_of(source, start, end)
        row_bytes, workers = operator.index(row_bytes), operator.index(workers)
        if row_bytes < 1 or workers < 1 or not 0 <= first <= limit <= MAX_OFFSET:
            raise ConfigError(
                f"{source.path}: no table of rows of {row_bytes} bytes from {first} to {limit} "
                f"for {workers} workers"
            )
        return Table(
            source=source.handle,
            destination=destination.handle,
            start=first,
            rows=(limit - first) // row_bytes,
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
            self._service.abort()
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
        return acting_at_interrupt(self._service.abort)


def _handed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments as kernels take them: handles in the place of what has one."""
    return tuple(
        argument.handle if isinstance(argument, _WITH_HANDLE) else argument
        for argument in arguments
    )


def _rows_of(source: Source | ArraySource, start: int | None, end: int | None) -> tuple[int, int]:
    """Return the range that rows lie in, by default what the source has and may be asked for."""
    return (
        source.start if start is None else operator.index(start),
        min(source.size, source.end) if end is None else operator.index(end),
    )

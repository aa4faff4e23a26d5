"""What a `Loader` reads for the host, where no kernel asks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from gpuq import arrays, reading
from gpuq.errors import ConfigError
from gpuq.handles import ArraySources, Source
from gpuq.layout import Queue
from gpuq.progress import Progress
from gpuq.registry import Registry


class HostSide(Registry):
    """The part of a `Loader` that reads without kernels."""

    queue: Queue

    def __init__(self) -> None:
        super().__init__()
        self._reads: reading.HostReads | None = None

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
        self._service.check()
        if in_flight < 1:
            raise ConfigError(f"in_flight must be at least 1, not {in_flight}")
        return reading.read_many(self, source, ranges, in_flight)

    def open_arrays(
        self,
        path: str | os.PathLike[str],
        tensors: Sequence[str] | None = None,
        *,
        dtype: Any = None,
        shape: int | Sequence[int] | None = None,
        direct: str | None = None,
    ) -> ArraySources:
        """Open a file, or all shards of an index, and say where its arrays lie, for kernels.

        Parameters
        ----------
        path, dtype, shape
            See `gpuq.formats.open_arrays`.
        tensors : sequence of str, optional
            Names of arrays; by default all. Shards with none of these are not opened.
        direct : {"auto", "require", "off"}, optional
            As for `open`.

        Returns
        -------
        ArraySources
            Name to `ArraySource`, in the file's order or that of `tensors`. Each file is opened
            once, and stays open until the mapping or the loader is closed.

        Raises
        ------
        KeyError
            The file has no array of a name.
        FormatError, OSError, SourceError and others
            From the headers, and from `open`. Nothing stays open.

        Examples
        --------
        >>> weights = loader.open_arrays("model.safetensors")       # doctest: +SKIP
        >>> w = weights["w"]                                        # doctest: +SKIP
        >>> kernel(loader.queue, w.handle, w.start, w.end, tile.handle)  # doctest: +SKIP
        """
        self._service.check()
        return arrays.open_sources(self, os.fsdecode(path), tensors, dtype, shape, direct)

    def load(
        self,
        path: str | os.PathLike[str],
        tensors: Sequence[str] | None = None,
        *,
        device: str | int | None = None,
        progress: bool | Progress = False,
        memory_limit: int | None = None,
    ) -> dict[str, Any]:
        """Read whole arrays of a raw, ``.npy`` or ``.safetensors`` file, or of all its shards.

        Parameters
        ----------
        path : path-like
            See `gpuq.formats.open_arrays`.
        tensors : sequence of str, optional
            Names of arrays; by default all.
        device : {"cpu", "cuda"} or int, optional
            Where the arrays must be; an integer is the number of a GPU. By default where the
            kernels of the loader's target run: it has no other memory, so that anything else is
            refused. The simulator also gives ``"cpu"``, as plain NumPy arrays.
        progress : bool or function
            True draws a bar on standard error where that is a terminal. A function is called in
            this thread as ``progress(done, total)``, in bytes, at the begin, after each array, and
            within large ones.
        memory_limit : int, optional
            Most bytes that the arrays may take together. It covers the elements of the arrays
            that are returned, and neither the loader's staging, which was allocated with the
            loader, nor what an allocator rounds up.

        Returns
        -------
        dict of str to array
            NumPy arrays on the CPU target, CuPy arrays on CUDA. In the file's order, or that of
            `tensors`. Shapes and dtypes are the file's; elements smaller than a byte come as
            bytes, and types that CuPy lacks, 8-bit floats, as unsigned integers of their size.

        Raises
        ------
        ConfigError
            `device` is not where this loader can put arrays, or a limit is negative.
        MemoryLimitError
            The arrays take more than `memory_limit`. Nothing was opened or allocated.
        DestinationError
            CuPy has no arrays of such a type: other byte orders, text, times.
        KeyError
            The file has no array of a name.
        FormatError, OSError, ReadError and others
            From the headers, from opening, and from reading.

        Notes
        -----
        Arrays that stand one behind the other in a file are read as one, and an error may name
        the range of several. On the CPU they lie in one region of memory of up to 128 MiB, or as
        long as the array: each gives its pages back when nothing views it, and the region's
        addresses are free when all its arrays are gone.
        """
        self._service.check()
        return arrays.load(self, os.fsdecode(path), tensors, device, progress, memory_limit)

    def _host_reads(self) -> reading.HostReads:
        with self._service.lock:
            if self._reads is None:
                self._reads = reading.HostReads(self._service, self.queue)
                weakref.finalize(self, self._reads.stop)
            return self._reads

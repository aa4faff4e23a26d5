"""One timed reading through a queue: what `io`, `gil` and `memory` have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpuq.bench.kernels import ANY_NUMBER, FOREVER_NS, read_blocks
from gpuq.bench.measuring import Meter, Sample
from gpuq.layout import Status
from gpuq.loader import Loader

_WARM_UP_REQUESTS = 256


class BadStatusError(RuntimeError):
    """A request of a benchmark was not answered with OK: the figures would mean nothing."""


@dataclass(frozen=True)
class Work:
    """What is read.

    Attributes
    ----------
    block_bytes, depth : int
    in_order : bool
        Block after block instead of at random.
    """

    block_bytes: int
    depth: int
    in_order: bool

    @property
    def name(self) -> str:
        """Like ``4 KiB random``."""
        size = self.block_bytes >> 10
        unit = f"{size} KiB" if size < 1024 else f"{size >> 10} MiB"
        return f"{unit} {'sequential' if self.in_order else 'random'}"


class Reading:
    """A work bound to an open loader; `run` may be called from any thread."""

    def __init__(self, loader: Loader, path: Path, nbytes: int, work: Work, direct: str) -> None:
        self.work = work
        self.loader = loader
        self.source = loader.open(path, direct=direct)
        array = loader.empty(work.block_bytes * work.depth)
        array[:] = 0  # its pages are there
        self.destination = loader.register(array)
        self.blocks = nbytes // work.block_bytes
        self.tickets = np.zeros(work.depth, dtype=np.int64)

    def run(
        self, *, seed: int, begin_ns: int = 0, duration_ns: int = FOREVER_NS, most: int = ANY_NUMBER
    ) -> tuple[int, float]:
        """Read; return requests done and the seconds that they took.

        Raises
        ------
        BadStatusError
        """
        done, status, elapsed_ns = read_blocks(
            self.loader.queue,
            self.source.handle,
            self.destination.handle,
            self.work.block_bytes,
            self.blocks,
            self.work.depth,
            begin_ns,
            duration_ns,
            most,
            0 if self.work.in_order else seed + 1,
            self.tickets,
        )
        if status != Status.OK:
            raise BadStatusError(f"{self.source.path}: a request ended with {Status(status).name}")
        return done, elapsed_ns / 1e9

    def warm_up(self) -> None:
        """Read a little, so that everything is compiled and every page is there."""
        self.run(seed=1, most=max(_WARM_UP_REQUESTS >> (self.work.block_bytes >> 15), 1))


@contextmanager
def reading(path: Path, nbytes: int, work: Work, *, reader: str, direct: str) -> Iterator[Reading]:
    """Open a loader for one sample, so that none idles beside another contestant's sample."""
    with Loader(target="cpu", reader=reader, direct=direct) as loader:
        made = Reading(loader, path, nbytes, work, direct)
        made.warm_up()
        yield made


def sample_queue(
    path: Path, nbytes: int, work: Work, *, reader: str, direct: str, seconds: float, number: int
) -> Sample:
    """Read through a queue for some seconds."""
    with reading(path, nbytes, work, reader=reader, direct=direct) as bound, Meter() as meter:
        done, elapsed = bound.run(seed=number + 1, duration_ns=int(seconds * 1e9))
    return Sample(done, elapsed, meter.cpu_seconds, meter.others_cores)

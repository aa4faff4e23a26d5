"""``gpuq bench kernels``: one kernel's work with `pull` one by one, and with tiles in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gpuq.bench.kernels import add_up_pulled, add_up_resident, add_up_streamed
from gpuq.bench.measuring import (
    Contestant,
    Meter,
    Sample,
    Spread,
    console,
    interleave,
    ratios,
    table,
)
from gpuq.bench.reading import BadStatusError
from gpuq.layout import Status
from gpuq.loader import Loader

PULL = "pull"
RESIDENT = "no reads"
TILES_IN_FLIGHT = (1, 2, 4, 8)
TILE_BYTES = 256 << 10
ARITHMETIC = 4
ELEMENT = np.dtype("<u4")


class WrongSumError(RuntimeError):
    """Two ways of reading the same file did not lead to the same sum."""


class Walking:
    """All contestants walk over the same tiles of a file, and must find the same sum.

    Parameters
    ----------
    path, nbytes
        File, and how many of its bytes are read.
    tile_bytes : int
        A multiple of 4 that divides `nbytes`.
    arithmetic : int
        Rounds of it for each element.
    direct : str
    """

    def __init__(
        self, path: Path, nbytes: int, tile_bytes: int, arithmetic: int, direct: str
    ) -> None:
        if tile_bytes % ELEMENT.itemsize or not 0 < tile_bytes <= nbytes:
            raise ValueError(f"a tile of {tile_bytes} bytes is no part of a file of {nbytes}")
        self.path = path
        self.tile_bytes = tile_bytes
        self.tiles = nbytes // tile_bytes
        self.arithmetic = arithmetic
        self.direct = direct
        self.sum: float | None = None

    def pull(self, number: int) -> Sample:
        """Pull tile after tile."""
        with Loader(target="cpu") as loader:
            source = loader.open(self.path, direct=self.direct)
            tile = np.zeros(self.tile_bytes // ELEMENT.itemsize, ELEMENT)
            destination = loader.register(tile)

            def run(tiles: int) -> Any:
                return add_up_pulled(
                    loader.queue, source.handle, destination.handle, tile, tiles, self.arithmetic
                )

            return self._sample(run)

    def stream(self, tiles_in_flight: int) -> Contestant:
        """Return the contestant that keeps so many tiles in flight."""

        def sample(number: int) -> Sample:
            with Loader(target="cpu") as loader:
                stream = loader.stream(
                    loader.open(self.path, direct=self.direct),
                    self.tile_bytes // ELEMENT.itemsize,
                    ELEMENT,
                    end=self.tiles * self.tile_bytes,
                    tiles_in_flight=tiles_in_flight,
                )
                return self._sample(
                    lambda tiles: add_up_streamed(
                        loader.queue, stream.handle, tiles, self.arithmetic
                    )
                )

        return sample

    def resident(self, number: int) -> Sample:
        """Do the arithmetic alone, on one tile over and over."""
        tile = np.fromfile(self.path, ELEMENT, self.tile_bytes // ELEMENT.itemsize)
        add_up_resident(tile, 1, self.arithmetic)
        with Meter() as meter:
            _, elapsed_ns = add_up_resident(tile, self.tiles, self.arithmetic)
        return Sample(self.tiles, elapsed_ns / 1e9, meter.cpu_seconds, meter.others_cores)

    def _sample(self, run: Callable[[int], Any]) -> Sample:
        run(1)  # so that everything is compiled and every page is there
        with Meter() as meter:
            status, total, elapsed_ns = run(self.tiles)
        if status != Status.OK:
            raise BadStatusError(f"{self.path}: a tile ended with {Status(status).name}")
        if self.sum is None:
            self.sum = total
        if total != self.sum:
            raise WrongSumError(f"{self.path}: the sum is {total}, and was {self.sum}")
        return Sample(self.tiles, elapsed_ns / 1e9, meter.cpu_seconds, meter.others_cores)


def measure(
    path: Path,
    nbytes: int,
    *,
    tiles_in_flight: Sequence[int] = TILES_IN_FLIGHT,
    tile_bytes: int = TILE_BYTES,
    arithmetic: int = ARITHMETIC,
    direct: str = "auto",
    rounds: int = 5,
) -> dict[str, Any]:
    """Walk the file in every way; return the figures of each, and its ratio to `pull`.

    Parameters
    ----------
    path, nbytes
        File, and how many of its bytes are read.
    tiles_in_flight : sequence of int
        Of the streams.
    tile_bytes, arithmetic, direct
        See `Walking`.
    rounds : int
        Samples of each contestant.

    Raises
    ------
    BadStatusError, WrongSumError
    """
    walking = Walking(path, nbytes, tile_bytes, arithmetic, direct)
    contestants: dict[str, Contestant] = {PULL: walking.pull}
    contestants |= {_name(count): walking.stream(count) for count in tiles_in_flight}
    contestants[RESIDENT] = walking.resident
    samples = interleave(contestants, rounds)
    pulled = [sample.rate for sample in samples[PULL]]
    return {
        "tile_bytes": tile_bytes,
        "arithmetic": arithmetic,
        "tiles": walking.tiles,
        "sum": walking.sum,
        "ways": {
            name: {
                "tiles_per_second": Spread.of([sample.rate for sample in ours]),
                "mb_per_second": Spread.of([s.rate * tile_bytes / 1e6 for s in ours]),
                "ratio": ratios([sample.rate for sample in ours], pulled),
                "samples": [asdict(sample) for sample in ours],
            }
            for name, ours in samples.items()
        },
        "others_cores": Spread.of([s.others_cores for ours in samples.values() for s in ours]),
    }


def _name(tiles_in_flight: int) -> str:
    return f"stream, {tiles_in_flight} in flight"


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    rows = [
        (name, way["mb_per_second"].show(), way["ratio"].show(".2f"))
        for name, way in results["ways"].items()
    ]
    table(
        f"A kernel adds up {results['tiles']:,} tiles of {results['tile_bytes'] >> 10} KiB: "
        "medians, ratio to pull pair by pair",
        ("way", "MB/s", "ratio"),
        rows,
    )
    console.print(
        f"Other processes kept {results['others_cores'].show('.1f')} cores busy meanwhile."
    )

"""``gpuq bench memory``: resident growth while a file far larger than staging is pulled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuq.bench.measuring import Spread, resident_bytes, table
from gpuq.bench.reading import Work, reading
from gpuq.loader import Loader

_RESET_HIGHEST = "5"
_WORK = Work(1 << 20, 8, in_order=True)


def _forget_highest() -> None:
    """Let VmHWM begin anew from what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text(_RESET_HIGHEST)


def measure(
    path: Path, nbytes: int, *, reader: str = "auto", direct: str = "auto", rounds: int = 3
) -> dict[str, Any]:
    """Pull the whole file, again and again; return what the process grew by.

    The first pull, which compiles, is not measured: growth is the highest resident size during
    a pull and its loader's life, over what it was before, less the destination.
    """
    with reading(path, nbytes, _WORK, reader=reader, direct=direct) as bound:
        config = bound.loader.config
        destination_bytes = bound.destination.nbytes
    growths = []
    for _ in range(rounds):
        _forget_highest()
        before = resident_bytes()
        with reading(path, nbytes, _WORK, reader=reader, direct=direct) as bound:
            bound.run(seed=1, most=nbytes // _WORK.block_bytes)
            _check_bytes(bound.loader, nbytes)
        growths.append(float(resident_bytes("VmHWM") - before - destination_bytes))
    return {
        "file_bytes": nbytes,
        "staging_bytes": config.staging_buffers * config.staging_bytes,
        "destination_bytes": destination_bytes,
        "growth_bytes": Spread.of(growths),
    }


def _check_bytes(loader: Loader, nbytes: int) -> None:
    arrived = loader.statistics().bytes
    if arrived < nbytes:
        raise RuntimeError(f"only {arrived} of {nbytes} bytes arrived")


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    rows: Sequence[Sequence[str]] = [
        ("file", f"{result['file_bytes'] / 2**20:,.0f}"),
        ("staging", f"{result['staging_bytes'] / 2**20:,.0f}"),
        ("destination", f"{result['destination_bytes'] / 2**20:,.0f}"),
        (
            "growth, destination apart",
            Spread(*(value / 2**20 for value in vars(result["growth_bytes"]).values())).show(".1f"),
        ),
    ]
    table("Resident memory while a whole file is pulled", ("", "MiB, median (min–max)"), rows)

"""``gpuq bench fair``: what a small request waits for while a large one is served.

One kernel pulls the whole file again and again, in one request each time; beside it another pulls
random blocks of 4 KiB, one after the other, and notes how long each took. fio runs the same two
jobs: reads in order of a staging buffer's size, as many at once as there are staging buffers, and
random ones of 4 KiB at depth 1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpuq.bench.fio import find_fio, run_jobs
from gpuq.bench.kernels import pull_whole, time_pulls_until
from gpuq.bench.measuring import Spread, console, interleave, ratios, table
from gpuq.bench.reading import BadStatusError, Work
from gpuq.config import LoaderConfig
from gpuq.layout import Status
from gpuq.loader import Loader

SMALL = "small"
LARGE = "large"
GPUQ = "gpuq"
FIO = "fio"
SMALL_BYTES = 4 << 10
PERCENTILES = (50, 99, 99.9)
_MOST_PULLS = 1 << 20
_HEAD_START_NS = 20_000_000
_LEAD_IN_SECONDS = 0.5


def lead_in(seconds: float) -> float:
    """Return for how many seconds the large job runs before small requests are counted.

    fio's jobs do not begin at once: without this its small one reads alone for some 20 ms, which
    is most of its reads.
    """
    return min(_LEAD_IN_SECONDS, seconds)


@dataclass(frozen=True)
class Shared:
    """Two jobs over one file, for one sample.

    Attributes
    ----------
    pulls : int
        Small requests done.
    latency_us : dict of str to float
        Percentiles of theirs, and their most.
    large_mb_per_second : float
    """

    pulls: int
    latency_us: dict[str, float]
    large_mb_per_second: float


def _name(percentile: float) -> str:
    return f"p{percentile:g}"


FIGURES = (*(_name(percentile) for percentile in PERCENTILES), "most")


def measure(
    path: Path,
    nbytes: int,
    *,
    reader: str = "auto",
    direct: str = "auto",
    buffers: int = LoaderConfig.staging_buffers,
    seconds: float = 5.0,
    rounds: int = 5,
) -> dict[str, Any]:
    """Measure gpuq, and fio where it is installed.

    Parameters
    ----------
    path, nbytes
        File, and how many of its bytes are read: by the large requests all at once.
    buffers : int
        Staging buffers, and the depth of fio's large job.
    seconds : float
        Of one sample.
    rounds : int
        Samples of each.

    Raises
    ------
    BadStatusError, FioError
    """
    config = LoaderConfig(target="cpu", reader=reader, direct=direct, staging_buffers=buffers)
    contestants: dict[str, Callable[[int], Shared]] = {
        GPUQ: lambda number: sample_gpuq(config, path, nbytes, seconds=seconds, number=number)
    }
    program = find_fio()
    if program is not None:
        works = {
            SMALL: Work(SMALL_BYTES, 1, in_order=False),
            LARGE: Work(min(config.staging_bytes, nbytes), buffers, in_order=True),
        }
        contestants[FIO] = lambda number: _sample_fio(
            program, path, nbytes, works, direct=direct != "off", seconds=seconds, number=number
        )
    samples = interleave(contestants, rounds)
    return {
        "file_bytes": nbytes,
        "staging_buffers": buffers,
        "staging_bytes": config.staging_bytes,
        "figures": {name: _spreads(group) for name, group in samples.items()},
        "ratio": {
            figure: ratios(*([one.latency_us[figure] for one in samples[n]] for n in (GPUQ, FIO)))
            for figure in FIGURES
            if FIO in samples
        },
        "samples": {name: [asdict(one) for one in group] for name, group in samples.items()},
    }


def _spreads(group: list[Shared]) -> dict[str, Spread]:
    figures = {figure: Spread.of([one.latency_us[figure] for one in group]) for figure in FIGURES}
    figures["pulls"] = Spread.of([float(one.pulls) for one in group])
    figures["large_mb_per_second"] = Spread.of([one.large_mb_per_second for one in group])
    return figures


def sample_gpuq(
    config: LoaderConfig, path: Path, nbytes: int, *, seconds: float, number: int
) -> Shared:
    """Pull large and small for some seconds, each kernel in a thread of its own.

    Raises
    ------
    BadStatusError
        A request of either was not answered with OK.
    """
    latencies_ns = np.zeros(_MOST_PULLS, dtype=np.int64)
    large = np.ones(nbytes, dtype=np.uint8)  # not zeros: every page must be there
    with Loader(config) as loader:
        source = loader.open(path)
        whole = loader.register(large)
        block = loader.register(np.zeros(SMALL_BYTES, dtype=np.uint8))
        outcome: list[Any] = []

        def run_large(nbytes: int, begin_ns: int, duration_ns: int) -> None:
            outcome.append(
                pull_whole(loader.queue, source.handle, whole.handle, nbytes, begin_ns, duration_ns)
            )

        def run_small(begin_ns: int, duration_ns: int) -> tuple[int, int]:
            return time_pulls_until(  # type: ignore[no-any-return]
                loader.queue,
                source.handle,
                block.handle,
                SMALL_BYTES,
                nbytes // SMALL_BYTES,
                number + 1,
                begin_ns,
                duration_ns,
                latencies_ns,
            )

        # Compiles; a whole large pull would use up what a disk lends for a burst.
        run_large(SMALL_BYTES, 0, 0)
        run_small(0, 0)
        outcome.clear()
        duration_ns, lead_in_ns = int(seconds * 1e9), int(lead_in(seconds) * 1e9)
        begin_ns = time.monotonic_ns() + _HEAD_START_NS
        thread = threading.Thread(
            target=run_large, args=(nbytes, begin_ns, lead_in_ns + duration_ns)
        )
        thread.start()
        pulls, bad = run_small(begin_ns + lead_in_ns, duration_ns)
        thread.join()
    wholes, elapsed_ns, large_bad = outcome[0]
    for status in (bad, large_bad):
        if status != Status.OK:
            raise BadStatusError(f"{path}: a request ended with {Status(status).name}")
    took = latencies_ns[:pulls] / 1000
    latency_us = {_name(at): float(np.percentile(took, at)) for at in PERCENTILES}
    latency_us["most"] = float(took.max())
    return Shared(int(pulls), latency_us, wholes * nbytes / elapsed_ns * 1e3)


def _sample_fio(
    program: str,
    path: Path,
    nbytes: int,
    works: dict[str, Work],
    *,
    direct: bool,
    seconds: float,
    number: int,
) -> Shared:
    jobs = run_jobs(
        program,
        path,
        nbytes,
        works,
        direct=direct,
        seconds=seconds,
        lead_in=lead_in(seconds),
        number=number,
    )
    small, large = jobs[SMALL]["read"], jobs[LARGE]["read"]
    took = small["lat_ns"]
    latency_us = {_name(at): took["percentile"][f"{at:.6f}"] / 1000 for at in PERCENTILES}
    latency_us["most"] = took["max"] / 1000
    return Shared(int(small["total_ios"]), latency_us, large["bw_bytes"] / 1e6)


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    figures, ratio = result["figures"], result["ratio"]
    ours, theirs = figures[GPUQ], figures.get(FIO)
    labels = {figure: f"{figure} of 4 KiB, us" for figure in FIGURES}
    labels |= {"pulls": "4 KiB reads", "large_mb_per_second": "large, MB/s"}
    rows = [
        (
            label,
            ours[figure].show(),
            theirs[figure].show() if theirs else "–",
            ratio[figure].show(".2f") if ratio.get(figure) else "–",
        )
        for figure, label in labels.items()
    ]
    table(
        f"4 KiB reads while {result['file_bytes'] / 2**20:,.0f} MiB are pulled through "
        f"{result['staging_buffers']} buffers of {result['staging_bytes'] >> 10} KiB",
        ("median (min–max)", "gpuq", "fio", "gpuq / fio"),
        rows,
    )
    if theirs is None:
        console.print("fio is not installed: nothing to compare with.")

"""``gpuq bench load``: a ``.safetensors`` file into host arrays, beside other ways to load it.

Direct reads are compared with direct ones, reads through the page cache with their like, and
these once with the file cached and once cold. Every sample is a process of its own, as a model is
loaded into one. Whether a way did read directly is looked up afterwards: a cold file that is in
the page cache then was read through it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpuq.bench import load_worker
from gpuq.bench.machine import cpu_seconds_of_all
from gpuq.bench.measuring import (
    Contestant,
    Sample,
    Spread,
    console,
    interleave,
    ratios,
    table,
)
from gpuq.bench.page_cache import cached_share, make_cached, make_cold
from gpuq.bench.tensors import LEAST_BYTES, tensor_file

OURS = "gpuq"
GROUPS = (("direct", "cold"), ("buffered", "cold"), ("buffered", "cached"))
OWN = ("gpuq", "np.fromfile", "preadv loop")
"""They run under gpuq's own Python; the others under the peers'."""
NEED_A_GPU = ("fastsafetensors with GPUDirect Storage", "kvikio", "nvidia-dali")
"""Loaders that cannot run on the CPU target, where this compares: named, not measured."""
_TIMEOUT_SECONDS = 600


class WrongBytesError(RuntimeError):
    """A contestant gave arrays that are not those of the file."""


class WorkerError(RuntimeError):
    """A process that loads, or looks for what can, failed."""


def _command(contestant: str, peers_python: str) -> list[str]:
    if contestant in OWN:
        return [sys.executable, "-m", "gpuq.bench.load_worker"]
    # As a script: that Python need not have gpuq. Isolated: modules beside the script, such as
    # this package's `io`, must not hide the library's.
    return [peers_python, "-I", str(Path(load_worker.__file__))]


def _run(command: Sequence[str]) -> Any:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise WorkerError(f"no answer within {_TIMEOUT_SECONDS} s") from None
    if ended.returncode != 0:
        said = (ended.stderr.strip() or "it said nothing").splitlines()[-1]
        raise WorkerError(f"it ended with {ended.returncode}: {said}")
    try:
        # A library may have printed something of its own before.
        return json.loads(ended.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise WorkerError("it printed no figures") from None


def find_missing(peers_python: str) -> dict[str, str]:
    """Return the contestants that cannot run, and why.

    Raises
    ------
    WorkerError
        `peers_python` is no Python that runs.
    """
    try:
        answers = _run([*_command("", peers_python), "look"])
    except (OSError, WorkerError) as error:
        raise WorkerError(f"{peers_python}: {error}") from None
    return {name: why for name, why in answers.items() if why and name not in OWN}


class _Files:
    """The file, a small one of the same kind, and what the arrays of the first must be."""

    def __init__(self, path: Path, small: Path) -> None:
        self.path, self.small = path.resolve(), small.resolve()
        self.nbytes = path.stat().st_size
        described = load_worker.layout_of(str(path))
        with open(path, "rb") as file:

            def bytes_of(name: str) -> bytes:
                _, _, start, end = described[name]
                file.seek(start)
                return file.read(end - start)

            self.digest = load_worker.digest(described, bytes_of)


class _Way:
    """A contestant in one group; the arrays of its first sample are checked.

    Attributes
    ----------
    failure : str
        Why it cannot do this here; it is left out then. gpuq itself must not fail.
    """

    def __init__(self, name: str, group: tuple[str, str], files: _Files, python: str) -> None:
        self.mode, self.state = group
        self.command = [*_command(name, python), f"{name} {self.mode}"]
        self.name, self.files = name, files
        self.cached_after: list[float] = []
        self.failure = ""

    def __call__(self, number: int) -> Sample:
        if self.failure:
            return Sample(0, 0.0, 0.0)
        path = self.files.path
        (make_cold if self.state == "cold" else make_cached)(path)
        is_first = not self.cached_after
        before = cpu_seconds_of_all()
        began = time.perf_counter()
        try:
            answer = _run(
                [*self.command, str(path), str(self.files.small), self.state, str(int(is_first))]
            )
        except WorkerError as error:
            if self.name == OURS:
                raise WorkerError(f"{self.name}, {self.mode}: {error}") from None
            self.failure = str(error)
            return Sample(0, 0.0, 0.0)
        spent = cpu_seconds_of_all() - before - answer["all_cpu_seconds"]
        self.cached_after.append(cached_share(path))
        if is_first and answer["digest"] != self.files.digest:
            raise WrongBytesError(f"{self.name}, {self.mode}: its arrays are not the file's")
        others = max(spent, 0.0) / (time.perf_counter() - began)
        return Sample(self.files.nbytes, answer["seconds"], answer["cpu_seconds"], others)


def measure(
    nbytes: int,
    directory: Path,
    *,
    peers_python: str = sys.executable,
    rounds: int = 5,
    keep: bool = False,
    watch: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Load in every group by everything that is installed.

    Parameters
    ----------
    nbytes : int
        About the bytes of the file.
    directory : Path
        Where it is made.
    peers_python : str
        The Python that has the peers' packages.
    rounds : int
        Samples of each contestant in each group.
    keep : bool
        Whether the file stays.
    watch : callable
        Told what is being measured.

    Raises
    ------
    WorkerError
        gpuq failed, or `peers_python` does not run.
    WrongBytesError
    CacheStateError
        The file cannot be made cold, or cached, here.
    """
    missing = find_missing(peers_python)
    with (
        tensor_file(nbytes, directory, keep=keep) as path,
        tensor_file(LEAST_BYTES, directory) as small,
    ):
        files = _Files(path, small)
        groups = []
        for group in GROUPS:
            watch(" ".join(group))
            ways = {
                name: _Way(name, group, files, peers_python)
                for name in load_worker.NEEDS
                if name not in missing and f"{name} {group[0]}" in load_worker.WAYS
            }
            contestants: dict[str, Contestant] = dict(ways)
            groups.append(_summarize(group, ways, interleave(contestants, rounds)))
        return {
            "file_bytes": files.nbytes,
            "missing": missing,
            "need_a_gpu": NEED_A_GPU,
            "groups": groups,
        }


def _summarize(
    group: tuple[str, str], ways: dict[str, _Way], samples: dict[str, list[Sample]]
) -> dict[str, Any]:
    """Return a group's figures: rates, gpuq's ratios to each, and what was cached after."""
    mine = [sample.rate for sample in samples[OURS]]
    figures = {}
    samples = {name: theirs for name, theirs in samples.items() if not ways[name].failure}
    for name, theirs in samples.items():
        figures[name] = {
            "mb_per_second": Spread.of([sample.rate / 1e6 for sample in theirs]),
            "gpuq_ratio": ratios(mine, [sample.rate for sample in theirs]),
            "cpu_per_gib": statistics.median(
                sample.cpu_seconds / sample.operations * 2**30 for sample in theirs
            ),
            "cached_after": statistics.median(ways[name].cached_after),
            "samples": [asdict(sample) for sample in theirs],
        }
    mode, state = group
    others = [sample.others_cores for theirs in samples.values() for sample in theirs]
    return {
        "mode": mode,
        "state": state,
        "ways": figures,
        "failed": {name: way.failure for name, way in ways.items() if way.failure},
        "others_cores": Spread.of(others),
    }


def show(result: dict[str, Any]) -> None:
    """Print a table for each group, the fastest first."""
    for name, why in result["missing"].items():
        console.print(f"{name} is not installed: {why}")
    console.print(f"Not measured, for they need a GPU: {', '.join(result['need_a_gpu'])}.")
    for group in result["groups"]:
        ordered = sorted(
            group["ways"].items(), key=lambda item: -float(item[1]["mb_per_second"].median)
        )
        rows = [
            (
                name,
                figures["mb_per_second"].show(),
                "–" if name == OURS else figures["gpuq_ratio"].show(".2f"),
                f"{figures['cpu_per_gib']:.2f}",
                f"{figures['cached_after']:.0%}",
            )
            for name, figures in ordered
        ]
        table(
            f"A .safetensors file into host arrays: {group['mode']} reads, {group['state']} file",
            ("", "MB/s (min–max)", "gpuq / it", "core-s per GiB", "cached after"),
            rows,
        )
        for name, why in group["failed"].items():
            console.print(f"{name} failed: {why}")
        console.print(f"Other processes kept {group['others_cores'].show('.1f')} cores busy.")

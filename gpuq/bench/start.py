"""``gpuq bench start``: how long until something works, with a warm cache and a cold one.

Every figure comes from a new interpreter. A cold cache is an empty directory given as
NUMBA_CACHE_DIR; a warm one is the same directory once more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuq.bench.measuring import Spread, table

_IMPORT = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"
STEPS = ("loader", "first_completion", "kernel")


def _run(arguments: Sequence[str], cache: str | None) -> str:
    environment = dict(os.environ)
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = cache
    ended = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        said = (ended.stderr.strip() or "it said nothing").splitlines()[-1]
        raise RuntimeError(f"a new interpreter failed: {said}")
    return ended.stdout


def _import_seconds(module: str) -> float:
    return float(_run(("-c", _IMPORT.format(module)), None))


def _first_seconds(path: Path, cache: str | None) -> dict[str, float]:
    document = json.loads(_run(("-m", "gpuq.bench.first", str(path)), cache))
    return {step: float(document[step]) for step in STEPS}


def measure(path: Path, *, rounds: int = 3, cold: bool = True) -> dict[str, Any]:
    """Measure; the two imports in turn, then cold and warm starts in turn.

    Parameters
    ----------
    path : Path
        A file to read from.
    cold : bool
        False leaves the cold starts out and takes the cache that is there, made warm first.
    """
    imports: dict[str, list[float]] = {"numba": [], "gpuq": []}
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    if not cold:
        _first_seconds(path, None)
    for number in range(rounds):
        for module in imports if number % 2 == 0 else reversed(list(imports)):
            imports[module].append(_import_seconds(module))
        if cold:
            with tempfile.TemporaryDirectory(prefix="gpuq-bench-cache-") as cache:
                starts["cold"].append(_first_seconds(path, cache))
                starts["warm"].append(_first_seconds(path, cache))
        else:
            starts["warm"].append(_first_seconds(path, None))
    added = [ours - theirs for ours, theirs in zip(imports["gpuq"], imports["numba"], strict=True)]
    return {
        "import_seconds": {name: Spread.of(values) for name, values in imports.items()},
        "import_adds_seconds": Spread.of(added),
        "start_seconds": {
            name: {step: Spread.of([one[step] for one in group]) for step in STEPS}
            for name, group in starts.items()
            if group
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    form = ".2f"
    rows = [
        (f"import {name}", spread.show(form)) for name, spread in result["import_seconds"].items()
    ]
    rows.append(("import gpuq adds", result["import_adds_seconds"].show(form)))
    for name, steps in result["start_seconds"].items():
        rows.append((f"Loader(), {name} cache", steps["loader"].show(form)))
        rows.append(
            (f"Loader() to first completion, {name} cache", steps["first_completion"].show(form))
        )
    kernel = result["start_seconds"]["warm"]["kernel"]
    rows.append(("compiling a kernel that pulls (the user's own)", kernel.show(form)))
    table("Starting", ("", "seconds, median (min–max)"), rows)

"""Tests that hold on every target: where they run, and how they run again in the simulator.

A test that is marked `everywhere` runs kernels by ``loader.launch``: compiled for the CPU in the
usual session, and as Python under Numba's simulator in a process of its own, which
`run_in_the_simulator` waits for: it began with the session (`beside`).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
from beside import pool

import gpuq
from gpuq.compiling import SIMULATED

Test = TypeVar("Test", bound=Callable[..., Any])

TARGET = "simulator" if SIMULATED else "cpu"
SMALL = {"slots": 16, "staging_buffers": 4, "staging_bytes": 4096, "reader_threads": 3}

_marked: dict[str, list[str]] = {}


def everywhere(test: Test) -> Test:
    """Mark a test for the simulator too."""
    assert test.__name__.startswith("test_"), "pytest would not find it"
    _marked.setdefault(test.__module__, []).append(test.__name__)
    return test


def examples(most: int) -> int:
    """How many examples of a property to try: the simulator is some hundred times slower."""
    return max(most // 6, 5) if SIMULATED else most


def open_loader(**given: Any) -> gpuq.Loader:
    """Make a small loader for the target of this process."""
    return gpuq.Loader(target=TARGET, **(SMALL | given))


def begin_beside(session: pytest.Session) -> None:
    """Begin what the session's calls of `run_in_the_simulator` will wait for."""
    if not SIMULATED:
        for item in session.items:
            if item.name == "test_marked_tests_hold_in_the_simulator":
                _begin(str(item.path), item.module.__name__)  # type: ignore[attr-defined]


def run_in_the_simulator(file: str, module: str) -> None:
    """Run the tests of a file that are marked `everywhere` with NUMBA_ENABLE_CUDASIM=1."""
    if SIMULATED:
        return
    done = _begin(file, module).result()
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]


@functools.cache
def _begin(file: str, module: str) -> Future[subprocess.CompletedProcess[str]]:
    return pool().submit(_run, file, tuple(_marked[module]))


def _run(file: str, names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run tests in the simulator; runs in a process of the pool."""
    tests = [f"{file}::{name}" for name in names]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *tests],
        cwd=Path(file).parent.parent,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )

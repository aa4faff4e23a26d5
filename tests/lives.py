"""What tests of a loader's life share: calls in a second thread, gates, programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from conftest import WAIT_SECONDS

import gpuq
from gpuq.testing import readers

CLOSED_GATE = 1
DATA = np.random.default_rng(11).integers(0, 256, 50_000, dtype=np.uint8)

MakeLoader = Callable[..., gpuq.Loader]
MakeScripted = Callable[..., tuple[gpuq.Loader, readers.ScriptedReader]]


def open_gate(reader: readers.ScriptedReader) -> None:
    reader.words[readers.GATE] = 0


def handles(loader: gpuq.Loader, path: Path, nbytes: int = 10_000) -> tuple[Any, Any, Any]:
    """Return (array, source, destination) of a new source and destination."""
    array = np.zeros(nbytes, dtype=np.uint8)
    return array, loader.open(path), loader.register(array)


class InThread:
    """A call in a second thread; `result` waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome.append(call())
        except BaseException as error:
            self._outcome.append(error)

    @property
    def is_running(self) -> bool:
        return self.thread.is_alive()

    def result(self) -> Any:
        self.thread.join(WAIT_SECONDS)
        assert self._outcome, "the call has not returned"
        if isinstance(self._outcome[0], BaseException):
            raise self._outcome[0]
        return self._outcome[0]


def run_script(text: str, *arguments: object, timeout: float = WAIT_SECONDS) -> Any:
    """Run a program of its own, with the tests' helpers importable."""
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent), *sys.path])
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        env=environment, timeout=timeout, capture_output=True, text=True, check=False,
    )  # fmt: skip

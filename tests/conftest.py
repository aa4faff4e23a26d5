"""Fixtures: loaders of every reader and mode that this machine has, and which of them ran."""

from __future__ import annotations

import collections
import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import targets
from beside import begin_all
from hypothesis import HealthCheck, settings
from stepping import Stepper

import gpuq
from gpuq.host import service
from gpuq.host.choice import ReaderChoice
from gpuq.host.device import CpuDevice
from gpuq.testing import copiers, readers

settings.register_profile(
    "gpuq", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("gpuq")

WAIT_SECONDS = 60.0
"""Bound of every wait for a condition; reaching it is a failure."""


def until(condition: Callable[[], Any], what: str = "") -> None:
    """Wait until a condition holds, for at most `WAIT_SECONDS`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"it never came to pass: {what or condition}"
        time.sleep(0.0005)


_ran: collections.Counter[str] = collections.Counter()
_refused: set[str] = set()


@dataclass(frozen=True)
class Mode:
    """A reader and a way to open files; its values go to `gpuq.Loader`."""

    reader: str
    direct: str

    def __str__(self) -> str:
        return f"{self.reader}-{'direct' if self.direct == 'require' else 'buffered'}"


READERS = ("io_uring", "threads")
MODES = [Mode(reader, direct) for reader in READERS for direct in ("require", "off")]


@functools.cache
def _refusal(mode: Mode) -> str:
    """Say why this machine cannot run a mode, by trying; empty where it can."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8192))
        file.flush()
        try:
            with gpuq.Loader(target="cpu", reader=mode.reader, direct=mode.direct) as loader:
                loader.open(file.name)
        except (gpuq.ReaderUnavailableError, gpuq.DirectUnavailableError) as error:
            return str(error)
    return ""


def skip_where_refused(mode: Mode) -> None:
    """Skip the test with the machine's reason, and have the reason printed at the end."""
    reason = _refusal(mode)
    if reason:
        _refused.add(f"{mode}: {reason}")
        pytest.skip(f"{mode} does not work here: {reason}")


@pytest.fixture(params=MODES, ids=str, scope="module")
def mode(request: pytest.FixtureRequest) -> Mode:
    """Each reader with direct and with buffered reads."""
    skip_where_refused(request.param)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=READERS, scope="module")
def reader(request: pytest.FixtureRequest) -> str:
    """Each reader."""
    skip_where_refused(Mode(request.param, "off"))
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def make_loader(request: pytest.FixtureRequest) -> Iterator[Callable[..., gpuq.Loader]]:
    """Make loaders for the CPU target, closed after the test; small unless told otherwise."""
    loaders = []

    def make(**given: Any) -> gpuq.Loader:
        small = {"slots": 16, "staging_buffers": 4, "staging_bytes": 4096, "reader_threads": 3}
        loader = gpuq.Loader(target="cpu", **(small | given))
        loaders.append(loader)
        return loader

    make.before_close = []  # type: ignore[attr-defined]
    yield make
    for act in make.before_close:  # type: ignore[attr-defined]
        act()
    for loader in loaders:
        loader.abort()
        try:
            loader.close()
        except gpuq.PollerDiedError as error:
            request.node.add_report_section("teardown", "loader", str(error))


@pytest.fixture
def make_scripted(
    monkeypatch: pytest.MonkeyPatch, make_loader: Callable[..., gpuq.Loader]
) -> Callable[..., tuple[gpuq.Loader, readers.ScriptedReader]]:
    """Make a loader whose reads and copies go by a script; its gates are opened after the test."""

    def make(
        data: Any,
        script: Any = ((readers.READ, -1),),
        *,
        copies: Any = (copiers.AT_ONCE,),
        gate: int = 0,
        **given: Any,
    ) -> tuple[gpuq.Loader, readers.ScriptedReader]:
        reader = readers.make_scripted_reader(data, script)
        reader.words[readers.GATE] = gate
        choice = ReaderChoice("scripted", "a test", reader)
        monkeypatch.setattr(service, "choose_reader", lambda config: choice)
        monkeypatch.setattr(
            CpuDevice, "copier", lambda self, leases: copiers.make_scripted_copier(leases, copies)
        )
        # A script goes by the number of a read: each request has reads of its own, all staged.
        loader = make_loader(**{"merge_bytes": 0, "straight_bytes": 0} | given)
        made.append(reader)
        return loader, reader

    made: list[readers.ScriptedReader] = []
    make_loader.before_close.append(  # type: ignore[attr-defined]
        lambda: [reader.words.__setitem__(readers.GATE, 0) for reader in made]
    )
    return make


@pytest.fixture
def stepper() -> Iterator[Callable[..., Stepper]]:
    """Make pollers that are driven by hand."""
    made = []

    def make(*arguments: Any, **given: Any) -> Stepper:
        made.append(Stepper(*arguments, **given))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def opened(record_property: Callable[[str, object], None]) -> Callable[..., gpuq.Source]:
    """Open a file and note by which path it is read."""

    def open_source(loader: gpuq.Loader, path: os.PathLike[str], **given: Any) -> gpuq.Source:
        source = loader.open(path, **given)
        note_path(loader, source, record_property)
        return source

    return open_source


def note_path(
    loader: gpuq.Loader,
    source: gpuq.Source,
    record_property: Callable[[str, object], None] | None = None,
) -> None:
    """Note which reader and mode a test really runs; printed at the end of the session."""
    explanation = loader.explain(source)
    path = f"{explanation.reader}, {'direct' if explanation.direct else 'buffered'}"
    _ran[path] += 1
    if record_property is not None:
        record_property("path", path)
    print(f"path: {explanation}")


@pytest.fixture(scope="session", autouse=True)
def _beside(request: pytest.FixtureRequest) -> None:
    """Have the first test begin what runs beside all of them."""
    begin_all(request.session, targets.begin_beside)


def pytest_configure() -> None:
    """Let Ctrl-C through: a background job of a shell starts with SIGINT ignored, and so would
    every subprocess of a test."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which paths ran and which this machine refuses."""
    if _ran:
        paths = "; ".join(f"{path}: {n} sources" for path, n in sorted(_ran.items()))
        terminalreporter.write_line(f"gpuq read by {paths}")
    for reason in sorted(_refused):
        terminalreporter.write_line(f"gpuq could not run {reason}")


@pytest.fixture(scope="session")
def payload() -> np.ndarray:
    """100,003 random bytes."""
    return np.random.default_rng(20240607).integers(0, 256, 100_003, dtype=np.uint8)


@pytest.fixture(scope="session")
def payload_path(tmp_path_factory: pytest.TempPathFactory, payload: np.ndarray) -> Path:
    """A file that holds `payload`."""
    path = tmp_path_factory.mktemp("payload") / "payload.bin"
    payload.tofile(path)
    return path

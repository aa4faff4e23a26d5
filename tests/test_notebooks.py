"""The notebooks run from top to bottom, and *Interrupt* ends a cell that waits for a kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import WAIT_SECONDS, until
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 400_000


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: Any) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def pictures(notebook: Any) -> list[str]:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]


def test_there_are_four() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    kept = printed(notebook).count("right: True"), len(pictures(notebook))
    # Its kernel is this Python, whatever kernels are installed for the user.
    notebook.metadata.kernelspec.name = "python3"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "False" not in printed(notebook)
    assert (printed(notebook).count("right: True"), len(pictures(notebook))) == kept
    assert not list(tmp_path.iterdir()), "what it made is gone"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_of_a_run_is_whole_small_and_names_no_machine(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"]
    said = [output for cell in cells for output in cell.outputs]
    assert not re.search(r"/(home|root|tmp|work|opt|Users)/", json.dumps(said))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)", prose):
        assert "://" in target or (path.parent / target).exists(), target


# --- interrupt -----------------------------------------------------------------------------

BEGIN = """
import pathlib, sys, threading, time, traceback
import numpy as np
from numba import njit
import gpuq
from gpuq.host import service
from gpuq.host.choice import ReaderChoice
from gpuq.host.device import CpuDevice
from gpuq.testing import copiers, readers

# A reader whose gate is shut: what it is asked for never comes.
reader = readers.make_scripted_reader(np.zeros(100, np.uint8))
reader.words[readers.GATE] = 1
before = service.choose_reader, CpuDevice.copier
service.choose_reader = lambda config: ReaderChoice("scripted", "a test", reader)
CpuDevice.copier = lambda self, leases: copiers.make_scripted_copier(leases)
loader = gpuq.Loader(target="cpu", slots=4)
service.choose_reader, CpuDevice.copier = before

path = pathlib.Path("file")
path.write_bytes(b"0123456789")
arguments = (
    loader.queue,
    loader.open(path).handle,
    loader.register(np.zeros(100, np.uint8)).handle,
    np.zeros(1, np.int64),
)
main = threading.main_thread().ident

def wait_for_ever(index, size, q, source, destination, statuses):
    statuses[0] = gpuq.pull(q, source, destination, 0, 10, 0)

def tell_when_waiting(*functions):
    def look():
        while reader.words[readers.SUBMITTED] == 0 or not set(functions) <= main_thread_is_in():
            time.sleep(0.0005)
        pathlib.Path("waiting").touch()
    threading.Thread(target=look, daemon=True).start()

def main_thread_is_in():
    return {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}
"""

SYNCHRONIZE = """
loader.launch(wait_for_ever, 1, *arguments)
tell_when_waiting("synchronize", "join")
loader.synchronize()
"""

INTERRUPTIBLE = """
compiled = njit(nogil=True)(wait_for_ever)
tell_when_waiting()
with loader.interruptible():
    compiled(0, 1, *arguments)
"""

AFTERWARDS = """
assert arguments[-1].tolist() == [gpuq.Status.ABORTED]
assert loader.state is gpuq.State.ABORTED
reader.words[readers.GATE] = 0
loader.close()
with gpuq.Loader(target="cpu") as another:
    assert bytes(another.read(another.open(path), 2, 5)) == b"234"
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, Any]]:
    manager, client = start_new_kernel(startup_timeout=WAIT_SECONDS, cwd=str(tmp_path))
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def answer(client: Any, request: str) -> dict[str, Any]:
    """Wait until a cell was run; return how that ended."""
    while True:
        reply = client.get_shell_msg(timeout=WAIT_SECONDS)
        if reply["parent_header"].get("msg_id") == request:
            return reply["content"]  # type: ignore[no-any-return]


def run(client: Any, code: str) -> dict[str, Any]:
    return answer(client, client.execute(code))


@pytest.mark.parametrize("cell", [SYNCHRONIZE, INTERRUPTIBLE], ids=["synchronize", "interruptible"])
def test_interrupt_ends_a_cell_that_waits_and_leaves_the_notebook_usable(
    kernel: tuple[KernelManager, Any], cell: str, tmp_path: Path
) -> None:
    manager, client = kernel
    began = run(client, BEGIN)
    assert began["status"] == "ok", began
    # Else Jupyter may drop a cell that is sent at the moment in which this one ends.
    request = client.execute(cell, stop_on_error=False)
    until((tmp_path / "waiting").exists, "the cell waits")
    manager.interrupt_kernel()
    ended = answer(client, request)
    assert (ended["status"], ended["ename"]) == ("error", "KeyboardInterrupt")
    afterwards = run(client, AFTERWARDS)
    assert afterwards["status"] == "ok", afterwards

"""The examples of docs/kernels.md in the simulator and as PTX; `test_docs` runs them on the CPU."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba import typeof
from page_examples import EXAMPLES, FEW_ROWS, assert_examples_are_right, body_of
from ptx import Compiled, accesses_at_fault, compiled_body

from gpuq import kernel_side
from gpuq.compiling import SIMULATED
from gpuq.launching import Launch


def test_all_five_examples_are_found() -> None:
    assert list(EXAMPLES) == [
        "column_sums", "embed", "multiply", "histograms", "sums_of_whole_shards",
    ]  # fmt: skip


@pytest.mark.skipif(SIMULATED, reason="it starts the simulator itself")
def test_every_example_is_right_in_the_simulator(tmp_path: Path) -> None:
    assert_examples_are_right(tmp_path, "simulator")


@pytest.mark.skipif(SIMULATED, reason="test_every_example... has the simulator")
def test_a_truncated_first_shard_does_not_shorten_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stream took its rows from the first file, and half of each other shard was dropped."""
    script = EXAMPLES["sums_of_whole_shards"].replace("TRUNCATED = 5", "TRUNCATED = 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUQ_TARGET", "cpu")
    exec(compile(script, "example.py", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    assert "every sum is right: True" in said
    assert said.count("shard-00.f64 was skipped: END_OF_FILE") == said.count("skipped") == 1


# --- what stands in a body ------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_body_has_no_masks_no_tickets_and_no_magic_numbers(name: str) -> None:
    body = body_of(EXAMPLES[name])
    operators = {type(node) for node in ast.walk(body) if isinstance(node, ast.operator)}
    assert operators <= {ast.Add, ast.Mult, ast.Div}
    numbers = {node.value for node in ast.walk(body) if isinstance(node, ast.Constant)}
    assert {number for number in numbers if not isinstance(number, str)} <= {0, 1}
    assert "ticket" not in ast.unparse(body)


# --- PTX ------------------------------------------------------------------------------------------


def launched_by(script: str, folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Run a script up to its launch, and return what it would launch: body and arguments."""
    launched = []

    def note(body: Any, size: int, arguments: tuple[Any, ...], threads: Any) -> Launch:
        launched.append((body, arguments))
        return Launch(lambda *_: None, 1, 1, ())

    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(sys, "argv", ["example.py", FEW_ROWS])
        patched.setenv("GPUQ_TARGET", "cpu")
        patched.setattr(kernel_side, "launch_on_cpu", note)
        exec(compile(script, "example.py", "exec"), {"__name__": "__main__"})
    (found,) = launched
    return found


@functools.cache
def compiled(name: str, folder: Path) -> Compiled:
    """Compile an example's body for the types of the arguments that it is launched with."""
    body, arguments = launched_by(EXAMPLES[name], folder)
    names = list(inspect.signature(body).parameters)[3:]
    queue, *rest = map(typeof, arguments)
    # The queue's own arrays go by bare names, an example's `counters` must not be taken for them.
    types = {f"given_{name}": kind for name, kind in zip(names, rest, strict=True)}
    return compiled_body(body, {"q": queue, **types})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.mark.skipif(SIMULATED, reason="the simulator compiles nothing")
@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (12, 0)], ids=["7.5", "9.0", "12.0"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_body_assembles_and_reads_memory_as_it_must(
    name: str, capability: tuple[int, int], folder: Path
) -> None:
    made = compiled(name, folder)
    assert accesses_at_fault(made.ptx(capability)) == []
    assert made.cubin(capability).startswith(b"\x7fELF")

"""docs/cuda.md names lines and tests; all of them must be there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "cuda.md").read_text()
ROWS = [
    line.split(" | ")
    for line in PAGE.partition("## Every hazard")[2].splitlines()
    if line.startswith("| ") and not line.startswith("| hazard")
]


def _tests_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE))))
def test_each_test_that_the_page_names_is_there(named):
    file, test = named
    assert test in _tests_in(file)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(gpuq\.[\w.]+)`", PAGE))))
def test_each_line_that_the_page_names_is_there(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            thing = getattr(thing, attribute)
        return
    raise AssertionError(f"{name} is nowhere")


def test_each_hazard_has_a_line_and_a_test_that_needs_no_gpu():
    assert len(ROWS) >= 25
    for row in ROWS:
        hazard, _, where, tests = row
        assert "`gpuq." in where, hazard
        without_gpu = [t for t in re.findall(r"`(test_\w+)\.py::", tests) if "_gpu_" not in t]
        assert without_gpu, hazard

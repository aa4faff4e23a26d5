"""The pages that people paste from: every Python block in them runs as it stands."""

import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from beside import pool

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TUTORIAL = ROOT / "docs" / "tutorial.md"


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    if page != TUTORIAL
    for number, block in enumerate(blocks_of(page))
]


def run(block, folder):
    script = folder / "block.py"
    script.write_text(block)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_all(blocks):
    """Run blocks one after the other in a folder of their own; runs in a process of the pool."""
    with tempfile.TemporaryDirectory() as folder:
        return [run(block, Path(folder)) for block in blocks]


@functools.cache
def begin(*blocks):
    return pool().submit(run_all, blocks)


def begin_beside(session):
    for item in session.items:
        name = getattr(item, "originalname", "")
        if name == "test_block_runs_as_it_stands":
            begin(item.callspec.params["block"])
        elif name == "test_the_tutorials_blocks_run_one_after_the_other":
            begin(*blocks_of(TUTORIAL))


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs_as_it_stands(block):
    (shown,) = begin(block).result()
    assert "False" not in shown.splitlines()[0]


def test_the_tutorials_blocks_run_one_after_the_other():
    shown = begin(*blocks_of(TUTORIAL)).result()
    assert len(shown) == 5
    assert "False" not in "".join(shown)
    assert shown[1].startswith("status: OK\n")
    assert re.findall(r": ([A-Z_]+)$", shown[3], re.M) == [
        "OK", "END_OF_FILE", "OUT_OF_BOUNDS", "BAD_SOURCE",
    ]  # fmt: skip


def test_readme_has_exactly_two_set_up_commands():
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 2
    assert all(line.startswith("python3 -m venv .venv && ") for line in commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)#]+)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_file_that_contributors_are_sent_to_is_there():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:gpuq|tests|docs|\.ci)/[\w/.*]+)`", page)
    assert len(named) > 15
    assert not [name for name in named if not list(ROOT.glob(name))]

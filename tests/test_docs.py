"""The pages that people paste from: every Python block in them runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs_as_it_stands(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "False" not in done.stdout.splitlines()[0]


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

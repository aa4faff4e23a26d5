"""The examples of docs/kernels.md: scripts by the name of their kernel's body, and how to run them.

`test_docs` runs each on the target that is found; here they run on the target that is asked for.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parent.parent / "docs" / "kernels.md").read_text()
FEW_ROWS = "64"
"""Argument of the example that takes one; the simulator runs some thousand lines a second."""

_RUN_ALL = """
import runpy, sys
scripts, sys.argv = sys.argv[2:], sys.argv[:2]
for script in scripts:
    runpy.run_path(script, run_name="__main__")
"""


def body_of(script: str) -> ast.FunctionDef:
    """Return the kernel's body in a script."""
    (body,) = [
        node
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args][:1] == ["index"]
    ]
    return body


EXAMPLES = {
    body_of(script).name: script
    for script in re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    if "loader.launch(" in script
}


def assert_examples_are_right(folder: Path, target: str) -> None:
    """Run all examples in one process, which starts faster than five, and look at what they say."""
    for name, script in EXAMPLES.items():
        (folder / f"{name}.py").write_text(script)
    simulated = {"NUMBA_ENABLE_CUDASIM": "1"} if target == "simulator" else {}
    done = subprocess.run(
        [sys.executable, "-c", _RUN_ALL, FEW_ROWS, *(f"{name}.py" for name in EXAMPLES)],
        cwd=folder,
        env=os.environ | {"GPUQ_TARGET": target} | simulated,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "False" not in done.stdout, done.stdout
    assert len(re.findall(r"^every \w+ is right: True$", done.stdout, re.M)) == len(EXAMPLES) + 1

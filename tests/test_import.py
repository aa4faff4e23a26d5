"""What `import gpuq` brings in, and that kernels find the functions whichever comes first."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_leaves_what_only_cuda_needs() -> None:
    out = run(
        """
        import sys
        import gpuq
        print(sorted({"numba.cuda", "cupy", "matplotlib", "typer", "rich"} & set(sys.modules)))
        """
    )
    assert out.strip() == "[]"


IMPORTS = ("import gpuq\nfrom numba import cuda", "from numba import cuda\nimport gpuq")


@pytest.mark.parametrize("imports", IMPORTS, ids=["gpuq first", "cuda first"])
def test_a_cuda_kernel_finds_the_functions_before_there_is_a_loader(imports: str) -> None:
    out = run(
        imports
        + textwrap.dedent(
            """
            import sys
            sys.path.insert(0, TESTS)
            import ptx
            from numba import types
            def kernel(q, status):
                status[0] = gpuq.pull(q, 1, 1, 0, 10, 7)
            text = ptx.Compiled(kernel, {"q": ptx.QUEUE, "status": ptx.INTEGERS}).text((9, 0))
            print("st.release.sys" in text, "ld.acquire.sys" in text)
            """
        ).replace("TESTS", repr(str(Path(__file__).parent)))
    )
    assert out.strip() == "True True"

"""On a GPU: the examples of docs/kernels.md."""

from __future__ import annotations

from pathlib import Path

import gpu
from page_examples import assert_examples_are_right

pytestmark = gpu.needs_gpu()


def test_every_example_is_right_on_the_gpu(tmp_path: Path) -> None:
    assert_examples_are_right(tmp_path, gpu.TARGET)

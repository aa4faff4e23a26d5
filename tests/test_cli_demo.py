"""``gpuq demo``: it works, tells the truth about its file, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli_failures import line_of
from test_cli_pull import rows, run

from gpuq import pull_files
from gpuq.demo import write_demo_file
from gpuq.formats import open_arrays


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of the command."""
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("GPUQ_TARGET", "cpu")
    return tmp_path


def test_the_demo_pulls_its_file_and_removes_it(folder: Path) -> None:
    result = run("demo", "--mib", 1)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    table = rows(result.stdout)
    assert table["embeddings"][3] == "OK"
    assert table["layer.0.weight"][0] == "BF16"
    assert "What happened" in table
    assert "requests" in result.stdout
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("direct", "words"), [("auto", "The reads were"), ("off", "The reads were not direct")]
)
def test_the_story_says_how_it_was_read(
    direct: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUQ_DIRECT", direct)
    assert words in run("demo", "--mib", 1).stdout


def test_no_array_of_the_file_begins_or_ends_at_an_even_offset(folder: Path) -> None:
    path = folder / "demo.safetensors"
    write_demo_file(str(path), 2)
    arrays = open_arrays(path)
    assert abs(path.stat().st_size - (2 << 20)) < 200_000
    assert all(entry.start % 2 and entry.end % 2 for entry in arrays.values())


def test_the_file_is_what_safetensors_reads_too(folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = folder / "demo.safetensors"
    write_demo_file(str(path), 1)
    content = path.read_bytes()
    deserialized = dict(safetensors.deserialize(content))
    for name, entry in open_arrays(path).items():
        assert deserialized[name]["data"] == content[entry.start : entry.end]


def test_a_wrong_byte_ends_the_demo_without_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_otherwise(path: str, start: int, end: int) -> Any:
        yield np.zeros(end - start, np.uint8)

    monkeypatch.setattr(pull_files, "read_plainly", read_otherwise)
    result = run("demo", "--mib", 1)
    assert result.exit_code == 1
    assert "MISMATCH at 0" in result.stdout
    assert "What happened" not in result.stdout


def test_where_no_file_can_be_written_it_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, mebibytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpuq.demo.write_demo_file", full)
    line = line_of(run("demo"))
    assert line.startswith(f"{folder}/gpuq-demo-")
    assert line.endswith("demo.safetensors: No space left on device")
    assert list(folder.iterdir()) == []

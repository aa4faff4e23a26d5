"""``gpuq pull --trace`` and ``gpuq trace``: what they write and print, and where they cannot."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli_failures import INTERRUPTED, line_of
from test_cli_pull import SMALL, run

import gpuq
from gpuq import ending


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files that were pulled with a trace; it is returned."""
    folder = tmp_path_factory.mktemp("pulled")
    paths = [folder / "one.bin", folder / "two.bin"]
    for path in paths:
        path.write_bytes(os.urandom(20_000))
    result = run("pull", *paths, *SMALL, "--trace", folder / "t.npz")
    assert result.exit_code == 0
    assert f"trace of 10 requests; to see it: gpuq trace {folder}/t.npz\n" in result.stdout
    return folder / "t.npz"


def test_a_pull_leaves_a_record_of_each_request(pulled: Path) -> None:
    trace = gpuq.trace.load(pulled)
    assert (len(trace), trace.lost, trace.target) == (10, 0, "cpu")
    assert trace.records["bytes"].sum() == 40_000
    assert {Path(path).name for path in trace.sources.values()} == {"one.bin", "two.bin"}


def test_with_json_a_pull_prints_nothing_else(pulled: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    result = run("pull", pulled, *SMALL, "--json", "--trace", out)
    assert json.loads(result.stdout)["ok"]
    assert len(gpuq.trace.load(out)) > 0


def test_a_trace_that_cannot_be_written_is_told_before_the_pull(pulled: Path) -> None:
    result = run("pull", pulled, *SMALL, "--trace", "/absent/t.npz")
    assert line_of(result) == "/absent/t.npz: No such file or directory"
    assert result.stdout == ""


def test_a_trace_is_not_written_over_the_file_that_is_pulled(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"weights" * 100)
    (tmp_path / "link").symlink_to(path)
    for out in (path, tmp_path / "link"):
        result = run("pull", path, *SMALL, "--trace", out)
        assert line_of(result) == f"{out}: this file is read, and would be written over"
    assert path.read_bytes() == b"weights" * 100


@pytest.mark.parametrize("option", ["--csv", "--perfetto", "--plot"])
def test_what_is_made_of_a_trace_is_not_written_over_it(pulled: Path, option: str) -> None:
    result = run("trace", pulled, option, pulled)
    assert line_of(result) == f"{pulled}: this file is read, and would be written over"
    assert len(gpuq.trace.load(pulled)) == 10


def test_an_interrupted_pull_leaves_its_trace(pulled: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "pull", pulled, *SMALL, "--trace", out],
        capture_output=True,
        text=True,
    )
    assert done.returncode == ending.INTERRUPTED, done.stderr
    assert gpuq.trace.load(out).lost == 0


def test_the_summary_is_printed(pulled: Path) -> None:
    result = run("trace", pulled)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{gpuq.trace.summarize(gpuq.trace.load(pulled))}\n"
    assert result.stdout.startswith("10 requests, target cpu, reader ")


def test_the_summary_as_json(pulled: Path) -> None:
    document = json.loads(run("trace", pulled, "--json").stdout)
    assert (document["requests"], document["bytes"], document["lost"]) == (10, 40_000, 0)
    assert document["by_status"]["OK"]["requests"] == 10
    assert sum(phase["share"] for phase in document["phases"].values()) == pytest.approx(1)


def test_all_that_it_writes(pulled: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outputs = {"csv": "t.csv", "perfetto": "t.json", "plot": "t.png"}
    options = [word for o, name in outputs.items() for word in (f"--{o}", tmp_path / name)]
    result = run("trace", pulled, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    with open(tmp_path / "t.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 10
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "request" for event in events) == 10
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_names_in_a_trace_cannot_write_to_the_terminal(pulled: Path, tmp_path: Path) -> None:
    trace = gpuq.trace.load(pulled)
    odd = dict.fromkeys(trace.sources, "odd \x1b[31m \udcff")
    gpuq.trace.save(gpuq.Trace(trace.records, odd, 0, "cpu", "threads"), tmp_path / "t.npz")
    assert "odd \\x1b[31m \\udcff" in run("trace", tmp_path / "t.npz").stdout


@pytest.mark.parametrize("option", ["--csv", "--perfetto", "--plot"])
def test_what_cannot_be_written_is_one_line(pulled: Path, option: str) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    result = run("trace", pulled, option, "/absent/t.png")
    assert line_of(result) == "/absent/t.png: No such file or directory"


def test_what_is_no_trace_is_one_line(tmp_path: Path) -> None:
    assert line_of(run("trace", tmp_path / "x")) == f"{tmp_path}/x: No such file or directory"
    (tmp_path / "x").write_bytes(b"no trace")
    assert line_of(run("trace", tmp_path / "x")).startswith(f"{tmp_path}/x: this is no trace")
    assert line_of(run("trace", tmp_path)) == f"{tmp_path}: Is a directory"


def test_a_plot_without_matplotlib_names_the_extra(
    pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("trace", pulled, "--plot", tmp_path / "t.png")
    assert "pip install 'gpuq[notebook]'" in line_of(result)

"""Every benchmark runs at a tiny size; what is checked is what it reports, never how fast."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gpuq.bench import fio, measuring, streaming, whole
from gpuq.bench.cli import app
from gpuq.bench.files import bench_file
from gpuq.bench.measuring import Sample, Spread, interleave, ratios
from gpuq.bench.reading import BadStatusError, Reading, Work
from gpuq.bench.whole import Goal

runner = CliRunner()
SHORT = ("--rounds", "1", "--seconds", "0.05")
SMALL = ("--size", str(1 << 20))


def bench(tmp_path: Path, *arguments: str) -> dict:
    """Run a benchmark in `tmp_path`; return its report after checking what all have in common."""
    report = tmp_path / "report.json"
    command = [*arguments, "--directory", str(tmp_path), "--json", str(report)]
    ended = runner.invoke(app, command)
    assert ended.exit_code == 0, ended.output
    document = json.loads(report.read_text())
    report.unlink()
    assert not list(tmp_path.iterdir()), "the file that was made is gone"
    assert document["bench"] == arguments[0]
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["versions"]["numba"]
    return document


def is_spread(value: dict) -> bool:
    return value["least"] <= value["median"] <= value["most"]


@pytest.mark.parametrize("reader", ["auto", "threads"])
def test_io_reports_every_workload(tmp_path: Path, reader: str) -> None:
    document = bench(tmp_path, "io", *SMALL, *SHORT, "--depth", "2", "--reader", reader)
    works = [(result["workload"], result["depth"]) for result in document["results"]]
    assert works == [("4 KiB random", 2), ("128 KiB sequential", 8), ("1 MiB sequential", 8)]
    beside = {reader} | ({"fio"} if shutil.which("fio") else set())
    for result in document["results"]:
        assert set(result["samples"]) == beside
        assert result["samples"][reader][0]["operations"] > 0
        assert is_spread(result["gpuq_iops"])
        assert (result["ratio"] is None) == ("fio" not in beside)


def test_io_runs_alone_where_fio_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio.shutil, "which", lambda name: None)
    report = tmp_path / "report.json"
    command = ["io", *SMALL, *SHORT, "--depth", "1", "--directory", str(tmp_path)]
    ended = runner.invoke(app, [*command, "--json", str(report)])
    assert ended.exit_code == 0, ended.output
    assert "fio is not installed" in ended.output
    for result in json.loads(report.read_text())["results"]:
        assert result["fio_iops"] is None
        assert result["ratio"] is None


def test_all_puts_what_came_out_beside_every_aim(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    document = bench(tmp_path, "all", *SHORT, "--no-cold", "--size", str(1 << 24))
    results = document["results"]
    assert " ".join(results) == "memory queue io gil cpu idle fair start load"
    whole.show(as_spreads(results))
    printed = capsys.readouterr().out
    for name in results:
        assert f"{name}: " in printed


def test_all_refuses_a_wrong_python_before_anything_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "bench_file", None)
    command = ["all", "--peers-python", str(tmp_path / "python"), "--directory", str(tmp_path)]
    ended = runner.invoke(app, command)
    assert ended.exit_code == 1
    assert str(tmp_path / "python") in ended.stderr


def as_spreads(value: Any) -> Any:
    """Undo what JSON does to a spread."""
    if isinstance(value, dict):
        return (
            Spread(**value)
            if set(value) == {"median", "least", "most"}
            else {key: as_spreads(one) for key, one in value.items()}
        )
    return [as_spreads(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("is_least", "median", "is_met"),
    [(True, 0.97, True), (True, 0.96, False), (False, 0.97, True), (False, 0.98, False)],
)
def test_an_aim_is_met_by_the_median(is_least: bool, median: float, is_met: bool) -> None:
    goal = Goal("io", "one / other", 0.97, is_least, Spread(median, 0.1, 9.0))
    assert goal.is_met is is_met
    assert goal.row()[3] == ("met" if is_met else "missed")
    assert goal.row()[1] == ("≥ 0.97" if is_least else "≤ 0.97")


def test_an_aim_without_a_peer_is_said_to_be_not_compared() -> None:
    assert Goal("io", "one / other", 0.97, True, None).row()[2:] == ("–", "not compared")


def test_gil_reports_all_three_main_threads(tmp_path: Path) -> None:
    results = bench(tmp_path, "gil", *SMALL, *SHORT)["results"]
    assert set(results["iops"]) == {"python", "native", "asleep"}
    assert is_spread(results["python_to_native"])


def test_memory_reports_growth_beside_staging(tmp_path: Path) -> None:
    results = bench(tmp_path, "memory", *SMALL, "--rounds", "1")["results"]
    assert results["file_bytes"] == 1 << 20
    assert results["staging_bytes"] > 0
    assert is_spread(results["growth_bytes"])


def test_start_reports_imports_and_first_completions(tmp_path: Path) -> None:
    results = bench(tmp_path, "start", "--rounds", "1", "--no-cold")["results"]
    assert set(results["import_seconds"]) == {"numba", "gpuq"}
    assert set(results["start_seconds"]) == {"warm"}
    warm = results["start_seconds"]["warm"]
    assert warm["loader"]["median"] <= warm["first_completion"]["median"]


@pytest.mark.slow
def test_start_compiles_all_with_a_cold_cache(tmp_path: Path) -> None:
    results = bench(tmp_path, "start", "--rounds", "1")["results"]
    assert set(results["start_seconds"]) == {"cold", "warm"}


def test_idle_reports_share_and_latencies(tmp_path: Path) -> None:
    results = bench(tmp_path, "idle", *SMALL, *SHORT, "--rest", "0.05")["results"]
    figures = ("idle_share_percent", "busy_latency_us", "first_latency_us", "later_us")
    for figure in (*figures, "wake_up_us", "plain_later_us"):
        assert is_spread(results[figure])


def test_trace_reports_each_workload_with_and_without(tmp_path: Path) -> None:
    results = bench(tmp_path, "trace", *SMALL, *SHORT)["results"]
    names = ["4 KiB random, direct", "4 KiB random, page cache", "silent reader, one thread"]
    assert [result["workload"] for result in results] == names
    for result in results:
        for figure in ("without", "with", "ratio", "added_ns"):
            assert is_spread(result[figure])
        assert set(result["samples"]) == {"with", "without"}


def test_kernels_reports_every_way_beside_pull(tmp_path: Path) -> None:
    document = bench(tmp_path, "kernels", *SMALL, "--rounds", "1", "--tile", str(100 << 10))
    results = document["results"]
    streams = [f"stream, {count} in flight" for count in (1, 2, 4, 8)]
    assert list(results["ways"]) == ["pull", *streams, "no reads"]
    assert results["tiles"] == 10
    assert results["sum"] > 0
    for way in results["ways"].values():
        assert is_spread(way["mb_per_second"])
        assert is_spread(way["ratio"])
        assert way["samples"][0]["operations"] == 10


def test_a_way_that_finds_another_sum_ends_the_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(bytes(range(256)) * 64)
    walking = streaming.Walking(path, 1 << 14, 1 << 12, arithmetic=1, direct="off")
    walking.pull(0)
    path.write_bytes(bytes(1 << 14))
    with pytest.raises(streaming.WrongSumError):
        walking.pull(1)
    path.write_bytes(bytes(1 << 13))
    with pytest.raises(BadStatusError, match="END_OF_FILE"):
        walking.pull(2)


def test_a_file_that_is_there_is_read_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.bin"
    path.write_bytes(bytes(1 << 20))
    ended = runner.invoke(app, ["memory", "--file", str(path), "--rounds", "1"])
    assert ended.exit_code == 0, ended.output
    assert path.read_bytes() == bytes(1 << 20)


def test_a_file_is_kept_if_asked_for(tmp_path: Path) -> None:
    command = ["memory", *SMALL, "--rounds", "1", "--keep", "--directory", str(tmp_path)]
    assert runner.invoke(app, command).exit_code == 0
    (made,) = tmp_path.iterdir()
    assert made.stat().st_size == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["io", "--file", "absent.bin"], "absent.bin"),
        (["io", "--directory", "absent"], "absent"),
        (["idle", "--reader", "carrier-pigeon"], "carrier-pigeon"),
        (["io", "--size", "1"], "--size"),
        (["kernels", "--size", "2000000", "--tile", "5"], "a tile of 5 bytes"),
    ],
)
def test_what_a_user_gets_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = runner.invoke(app, arguments)
    assert ended.exit_code in (1, 2)
    assert complaint in ended.output + ended.stderr
    assert "Traceback" not in ended.output


def test_the_file_is_random_and_not_sparse(tmp_path: Path) -> None:
    with bench_file(None, (1 << 20) + 5, tmp_path, keep=False) as (path, nbytes):
        assert nbytes == path.stat().st_size == 1 << 20
        assert path.stat().st_blocks * 512 >= nbytes
        assert len(np.unique(np.fromfile(path, dtype=np.uint8))) == 256
    assert not path.exists()


def test_a_request_that_fails_ends_the_benchmark(tmp_path: Path) -> None:
    from gpuq.loader import Loader

    path = tmp_path / "short.bin"
    path.write_bytes(bytes(4096))
    with Loader(target="cpu") as loader:
        bound = Reading(loader, path, 1 << 20, Work(4096, 4, in_order=True), "auto")
        with pytest.raises(BadStatusError, match="END_OF_FILE"):
            bound.run(seed=1, most=8)


def test_rounds_are_interleaved_in_turned_order() -> None:
    ran: list[tuple[str, int]] = []

    def contestant(name: str) -> measuring.Contestant:
        def run(number: int) -> Sample:
            ran.append((name, number))
            return Sample(number + 1, 1.0, 0.5)

        return run

    samples = interleave({"a": contestant("a"), "b": contestant("b")}, 3)
    assert ran == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [sample.rate for sample in samples["b"]] == [1.0, 2.0, 3.0]
    assert samples["a"][0].cpu_per_million == 0.5e6


def test_ratios_are_taken_pair_by_pair() -> None:
    assert ratios([1.0, 8.0, 3.0], [2.0, 8.0, 1.0]) == Spread(1.0, 0.5, 3.0)
    assert ratios([1.0], [0.0]) is None


def test_figures_of_fio_are_read_behind_its_notes() -> None:
    job = {
        "error": 0,
        "usr_cpu": 10.0,
        "sys_cpu": 40.0,
        "job_runtime": 2000,
        "read": {"total_ios": 500, "runtime": 2000},
    }
    output = "note: both iodepth >= 1 and synchronous I/O engine\n" + json.dumps({"jobs": [job]})
    sample = fio.parse_fio(0, output, "", 0.25)
    assert sample == Sample(500, 2.0, 1.0, 0.25)


@pytest.mark.parametrize("code", [0, 1])
def test_a_failed_fio_says_why(code: int) -> None:
    output = json.dumps({"jobs": [{"error": 22}]})
    with pytest.raises(fio.FioError, match="engine io_uring not loadable"):
        fio.parse_fio(code, output, "fio: engine io_uring not loadable\n", 0.0)

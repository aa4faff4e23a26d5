"""The benchmarks with peers of their own, `load`, `queue`, `fair` and `cpu`, at a tiny size.

What is checked is what they report and that their peers do what is said of them, never how fast.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gpuq.bench import crossings, fair, fio, load, load_worker, page_cache, queue
from gpuq.bench.cli import app
from gpuq.bench.reading import BadStatusError
from gpuq.bench.tensors import LEAST_BYTES, TENSORS, tensor_file
from gpuq.formats import open_arrays
from gpuq.layout import Status
from gpuq.ordering import store_release

runner = CliRunner()
HAS_FIO = shutil.which("fio") is not None
SMALL = ("--size", str(1 << 20), "--rounds", "1", "--seconds", "0.05")


def bench(tmp_path: Path, *arguments: str) -> Any:
    """Run a benchmark; return its results after checking what all have in common."""
    report = tmp_path / "report.json"
    ended = runner.invoke(app, [*arguments, "--json", str(report)])
    assert ended.exit_code == 0, ended.output + ended.stderr
    document = json.loads(report.read_text())
    report.unlink()
    assert not list(tmp_path.iterdir()), "the files that were made are gone"
    assert document["bench"] == arguments[0]
    assert document["machine"]["cores"] >= 1
    return document["results"]


def is_spread(value: dict[str, float]) -> bool:
    return value["least"] <= value["median"] <= value["most"]


def cold_files_are_possible(tmp_path: Path) -> None:
    """Skip where no file can be made cold, as on tmpfs."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(1 << 20))
    try:
        page_cache.make_cold(probe)
    except page_cache.CacheStateError as error:
        pytest.skip(str(error))
    finally:
        probe.unlink()


# --- load --------------------------------------------------------------------------------------


def test_load_reports_each_group(tmp_path: Path) -> None:
    cold_files_are_possible(tmp_path)
    size = ("--size", str(LEAST_BYTES), "--directory", str(tmp_path))
    results = bench(tmp_path, "load", *size, "--rounds", "1")
    assert [(group["mode"], group["state"]) for group in results["groups"]] == list(load.GROUPS)
    assert results["need_a_gpu"] == list(load.NEED_A_GPU)
    for group in results["groups"]:
        assert {"gpuq"} < set(group["ways"])
        assert not group["failed"]
        assert not set(group["ways"]) & set(results["missing"])
        for figures in group["ways"].values():
            assert is_spread(figures["mb_per_second"])
            assert is_spread(figures["gpuq_ratio"])
        if group["state"] == "cached":
            assert all(figures["cached_after"] > 0.9 for figures in group["ways"].values())
    cold = results["groups"][0]["ways"], results["groups"][1]["ways"]
    assert cold[0]["preadv loop"]["cached_after"] < 0.1, "a direct read fills no page cache"
    assert cold[1]["np.fromfile"]["cached_after"] > 0.9


def test_what_is_not_installed_is_named_and_left_out(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: no packages
    bare.chmod(0o755)
    missing = load.find_missing(str(bare))
    assert set(missing) == set(load_worker.NEEDS) - set(load.OWN)
    assert all("ModuleNotFoundError" in why for why in missing.values())


@pytest.mark.parametrize("program", ["absent-python", "/bin/true", "/bin/false"])
def test_a_peers_python_that_is_none_is_named(tmp_path: Path, program: str) -> None:
    command = ["load", "--peers-python", program, "--directory", str(tmp_path)]
    ended = runner.invoke(app, [*command, "--size", str(LEAST_BYTES)])
    assert ended.exit_code == 1
    assert program in ended.stderr
    assert not list(tmp_path.iterdir())


def test_wrong_arrays_end_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tensor_file(LEAST_BYTES, tmp_path) as path, tensor_file(LEAST_BYTES, tmp_path) as small:
        files = load._Files(path, small)
        way = load._Way("np.fromfile", ("buffered", "cached"), files, sys.executable)
        assert way(0).operations == path.stat().st_size
        with open(path, "r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
        way = load._Way("np.fromfile", ("buffered", "cached"), files, sys.executable)
        with pytest.raises(load.WrongBytesError, match=r"np\.fromfile"):
            way(0)


def test_a_peer_that_fails_is_left_out_and_says_why(tmp_path: Path) -> None:
    with tensor_file(LEAST_BYTES, tmp_path) as path:
        files, group = load._Files(path, tmp_path / "absent"), ("direct", "cached")
        ways = {name: load._Way(name, group, files, sys.executable) for name in ("preadv loop",)}
        samples = {name: [way(0), way(1)] for name, way in ways.items()}
        with pytest.raises(load.WorkerError, match="gpuq, direct: it ended with 1: "):
            load._Way("gpuq", group, files, sys.executable)(0)
        files.small = files.path
        ways["gpuq"] = load._Way("gpuq", group, files, sys.executable)
        samples["gpuq"] = [ways["gpuq"](0), ways["gpuq"](1)]
    summary = load._summarize(group, ways, samples)
    assert set(summary["ways"]) == {"gpuq"}
    assert "it ended with 1: " in summary["failed"]["preadv loop"]


def test_the_tensor_file_is_one_of_a_model(tmp_path: Path) -> None:
    with tensor_file(LEAST_BYTES + 4096 * 70, tmp_path) as path:
        entries = open_arrays(path)
        assert len(entries) == TENSORS
        assert sum(entry.nbytes for entry in entries.values()) <= path.stat().st_size
        assert abs(path.stat().st_size - LEAST_BYTES) < LEAST_BYTES / 10
        described = load_worker.layout_of(str(path))
        for name, entry in entries.items():
            assert described[name][2:] == (entry.start, entry.end)
    with pytest.raises(ValueError, match="too small"), tensor_file(1, tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("seen", "walks"),
    [
        ([False, False, True], 3),  # some was taken, and has come back
        ([True, True, False, True], 4),
        ([True] * 9, 4),  # nothing was taken for longer than a period
        ([False] * 20, 9),  # never near: there is an end
    ],
)
def test_memory_is_brought_near_until_it_stays(
    monkeypatch: pytest.MonkeyPatch, seen: list[bool], walks: int
) -> None:
    # A load right before the host takes some of it again was four times as slow as another.
    answers = iter(seen)
    passed = iter(range(100))
    monkeypatch.setattr(load_worker, "_walk", lambda nbytes: next(answers))
    monkeypatch.setattr(load_worker.time, "perf_counter", lambda: float(next(passed)))
    load_worker.make_memory_near(1 << 30)
    assert len(seen) - len(list(answers)) == walks


def test_the_page_cache_is_told_cold_from_cached(tmp_path: Path) -> None:
    cold_files_are_possible(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    page_cache.make_cold(path)
    assert page_cache.cached_share(path) <= page_cache.COLD_SHARE
    page_cache.make_cached(path)
    assert page_cache.cached_share(path) == 1.0


# --- queue -------------------------------------------------------------------------------------


@pytest.fixture
def two_cores() -> tuple[int, int]:
    try:
        return queue.two_cores()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("two_cores")
def test_queue_reports_each_contestant_at_each_depth(tmp_path: Path) -> None:
    results = bench(tmp_path, "queue", "--rounds", "1", "--seconds", "0.01")["results"]
    names = [(one["name"].rpartition(",")[0], one["depth"]) for one in results]
    assert names == [
        (queue.PING_PONG, 1),
        *((name, d) for d in (1, 512) for name in (queue.RING, queue.EMPTY, queue.SILENT)),
    ]
    for one in results:
        assert is_spread(one["ns_per_request"])
        assert is_spread(one["ratio"])
        assert one["beside"] == (queue.PING_PONG if one["depth"] == 1 else queue.RING)


def test_a_process_of_one_core_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue.os, "sched_getaffinity", lambda process: {3})
    ended = runner.invoke(app, ["queue"])
    assert ended.exit_code == 1
    assert "two cores" in ended.stderr


def test_the_bare_queue_answers_like_any_other(two_cores: tuple[int, int]) -> None:
    with queue.bare_queue(two_cores[1]) as (q, source, destination):
        tickets = np.zeros(4, dtype=np.int64)
        done, _, bad = crossings.cross_queue(q, source, destination, 8, 4, 0, tickets)
        assert done >= 256
        assert bad == Status.OK
        *_, bad = crossings.cross_queue(q, source, destination, 65, 4, 0, tickets)
        assert bad == Status.OUT_OF_BOUNDS, "the destination has 64 bytes"


def test_the_ring_keeps_order_between_two_producers_and_two_consumers() -> None:
    ring = crossings.make_ring(4)
    words = crossings.LINE_WORDS - 1
    assert crossings.try_dequeue(ring) == -1
    assert [crossings.try_enqueue(ring, value) for value in range(5)] == [True] * 4 + [False]
    assert [crossings.try_dequeue(ring) for _ in range(5)] == [0, words, 2 * words, 3 * words, -1]

    each, taken = 60, [[], []]

    def produce(first: int) -> None:
        for value in range(first, 2 * each, 2):
            while not crossings.try_enqueue(ring, value):
                pass

    def consume(into: list[int]) -> None:
        while sum(map(len, taken)) < 2 * each:
            value = crossings.try_dequeue(ring)
            if value >= 0:
                into.append(value // words)

    threads = [threading.Thread(target=produce, args=(first,)) for first in (0, 1)]
    threads += [threading.Thread(target=consume, args=(into,)) for into in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken[0] + taken[1]) == list(range(2 * each))
    for into in taken:
        for first in (0, 1):
            mine = [value for value in into if value % 2 == first]
            assert mine == sorted(mine)


def test_a_ring_that_loses_an_entry_is_noticed(two_cores: tuple[int, int]) -> None:
    there, back = crossings.make_ring(8), crossings.make_ring(8)
    words = np.zeros(crossings.WORDS, dtype=np.uint64)
    assert crossings.try_enqueue(back, 41)  # an answer to nothing
    partner = threading.Thread(target=crossings.send_back, args=(there, back, words))
    partner.start()
    try:
        *_, in_order = crossings.cross_rings(there, back, 2, 0)
    finally:
        store_release(words, crossings.STOP, np.uint64(1))
        partner.join()
    assert not in_order


# --- fair, cpu ---------------------------------------------------------------------------------


def test_fair_reports_both_jobs(tmp_path: Path) -> None:
    results = bench(tmp_path, "fair", *SMALL, "--directory", str(tmp_path), "--buffers", "4")
    assert set(results["figures"]) == {"gpuq"} | ({"fio"} if HAS_FIO else set())
    for figures in results["figures"].values():
        assert figures["pulls"]["least"] >= 1
        assert figures["large_mb_per_second"]["least"] > 0
        # fio's percentiles come from a histogram, and may lie above the most.
        latencies = [figures[name]["median"] for name in ("p50", "p99", "p99.9")]
        assert latencies == sorted(latencies)
    assert bool(results["ratio"]) == HAS_FIO


def test_fair_runs_alone_where_fio_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio.shutil, "which", lambda name: None)
    ended = runner.invoke(app, ["fair", *SMALL, "--directory", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    assert "fio is not installed" in ended.output


def test_fair_ends_at_a_bad_status(tmp_path: Path) -> None:
    path = tmp_path / "short.bin"
    path.write_bytes(bytes(1 << 16))
    config = fair.LoaderConfig(target="cpu", staging_buffers=4)
    with pytest.raises(BadStatusError, match="END_OF_FILE"):
        fair.sample_gpuq(config, path, 1 << 17, seconds=0.01, number=0)


def test_cpu_reports_both_workloads(tmp_path: Path) -> None:
    results = bench(tmp_path, "cpu", *SMALL, "--directory", str(tmp_path))
    assert [one["unit"] for one in results] == ["GiB", "million requests"]
    for one in results:
        assert is_spread(one["host"])
        assert one["host"]["median"] <= one["host_and_kernel"]["median"]
        assert (one["ratio"] is not None) == HAS_FIO


def test_cpu_runs_alone_where_fio_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio.shutil, "which", lambda name: None)
    ended = runner.invoke(app, ["cpu", *SMALL, "--directory", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    assert "fio is not installed" in ended.output

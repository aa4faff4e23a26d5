"""The model of one GPU with several drives: closed form against simulation, where it is exact."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gpuq.bench import scaling
from gpuq.bench.cli import app
from gpuq.bench.scaling import DRIVE, GPU, INPUTS, POLLER, Bound, Case, Visit
from gpuq.config import LoaderConfig
from gpuq.kernels import lowering

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
runner = CliRunner()
V = scaling.values_of()


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.integers(1, 5_000), min_size=1, max_size=5),
    delay=st.integers(0, 20_000),
    depth=st.integers(1, 40),
)
def test_exact_times_reach_the_bound_exactly(times: list[int], delay: int, depth: int) -> None:
    """Each station once, one server, no spread: requests fall into step and the bound is exact."""
    path = [Visit(GPU, delay), *(Visit(f"station {i}", ns) for i, ns in enumerate(times))]
    bound = scaling.bound_of(path, {}, depth)
    seen = scaling.simulate(path, {}, depth, 60 * depth)
    assert seen.rate == pytest.approx(bound.rate, rel=1e-9)
    # Little's law, which holds for every such system.
    assert seen.rate * seen.mean_ns / 1e9 == pytest.approx(depth, rel=0.05)


def mean_value_analysis(times: list[float], delay: float, depth: int) -> float:
    """Return the exact rate of a closed network of exponential servers, in 1/ns.

    Reiser and Lavenberg, "Mean-value analysis of closed multichain queuing networks" (1980).
    """
    lengths = [0.0] * len(times)
    rate = 0.0
    for count in range(1, depth + 1):
        stays = [ns * (1 + length) for ns, length in zip(times, lengths, strict=True)]
        rate = count / (delay + sum(stays))
        lengths = [rate * stay for stay in stays]
    return rate


@pytest.mark.parametrize(("delay", "depth"), [(0.0, 3), (4_000.0, 8)])
def test_exponential_times_come_near_the_exact_solution(delay: float, depth: int) -> None:
    times = [500.0, 900.0, 300.0]
    path = [Visit(GPU, delay), *(Visit(f"station {i}", ns) for i, ns in enumerate(times))]
    seen = scaling.simulate(path, {}, depth, 20_000, seed=3, spread=1.0)
    exact = mean_value_analysis(times, delay, depth)
    assert seen.rate / 1e9 == pytest.approx(exact, rel=0.03)
    assert exact < scaling.bound_of(path, {}, depth).rate / 1e9


def test_servers_share_a_stations_work() -> None:
    path = [Visit(DRIVE, 1_000), Visit(POLLER, 300)]
    assert scaling.bound_of(path, {}).rate == pytest.approx(1e6)
    assert scaling.bound_of(path, {DRIVE: 2}).bottleneck == DRIVE
    assert scaling.bound_of(path, {DRIVE: 4}) == Bound(pytest.approx(1e9 / 300), POLLER, 1_300)
    seen = scaling.simulate(path, {DRIVE: 2}, 8, 800)
    assert seen.rate == pytest.approx(2e6)
    assert seen.busy[DRIVE] == pytest.approx(1.0, abs=0.02)


def test_the_same_seed_gives_the_same_run() -> None:
    path = scaling.path_of(Case(4096, 4, 2), V)
    runs = [scaling.simulate(path, {POLLER: 2}, 20, 400, seed=s, spread=1.0) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("depth", [0, 11])
def test_a_run_too_short_to_say_anything_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match="too few"):
        scaling.simulate([Visit(POLLER, 1)], {}, depth, 20)


@pytest.mark.parametrize("size", scaling.SIZES)
@pytest.mark.parametrize("design", scaling.DESIGNS)
def test_as_many_pollers_as_needed_are_no_bottleneck_and_one_less_is(
    size: int, design: str
) -> None:
    for drives in scaling.DRIVES:
        needed = scaling.pollers_needed(size, drives, design, V)
        path = scaling.path_of(Case(size, drives, needed, design), V)
        assert scaling.bound_of(path, {POLLER: needed, DRIVE: drives}).bottleneck != POLLER
        if needed > 1:
            fewer = scaling.bound_of(path, {POLLER: needed - 1, DRIVE: drives})
            assert fewer.bottleneck == POLLER


def test_a_large_request_pays_for_each_of_its_pieces() -> None:
    def poller_ns(size: int) -> float:
        visits = scaling.path_of(Case(size, 1, 1), V)
        return sum(visit.ns for visit in visits if visit.station == POLLER)

    piece = V["read_ns"] + V["copy_call_ns"] + V["copy_look_ns"]
    assert poller_ns(512 << 10) == pytest.approx(V["queue_ns"] + piece)
    assert poller_ns((512 << 10) + 1) == pytest.approx(V["queue_ns"] + 2 * piece)


def test_scale_reports_every_case_and_takes_other_inputs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ["scale", "--requests", "50", "--input", "queue_ns=145", "--json", str(report)]
    ended = runner.invoke(app, command)
    assert ended.exit_code == 0, ended.output
    document = json.loads(report.read_text())
    assert document["results"]["inputs"]["queue_ns"]["value"] == 145
    cases = {
        (row["case"]["size"], row["case"]["drives"], row["case"]["design"])
        for row in document["results"]["rows"]
    }
    assert len(cases) == len(scaling.SIZES) * len(scaling.DRIVES) * len(scaling.DESIGNS)


@pytest.mark.parametrize("wrong", ["speed=1", "queue_ns", "queue_ns=-1", "queue_ns=nan"])
def test_an_input_that_is_none_is_named(wrong: str) -> None:
    ended = runner.invoke(app, ["scale", "--input", wrong])
    assert ended.exit_code in (1, 2)
    assert wrong.partition("=")[0] in ended.stderr


def test_what_the_code_says_goes_in() -> None:
    assert V["staging_bytes"] == LoaderConfig.staging_bytes
    assert V["slots"] == LoaderConfig.slots
    assert V["poll_gap_ns"] == lowering._LONG_SLEEP_NS


def test_the_page_lists_every_input_as_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.,e+]+) ", PAGE.read_text(), re.M)
    listed = {name: float(value.replace(",", "")) for name, value in rows}
    assert listed == {name: given.value for name, given in INPUTS.items()}

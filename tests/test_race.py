"""The race of NVIDIA DALI issue 6623: the published figures, and that gpuq is free of it.

Every run forces its order; nothing sleeps and hopes. Blocks are small except where the number
of wrong words is the point.
"""

from __future__ import annotations

import csv
import json
import os
import threading
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import until
from test_cli_pull import rows, run

from gpuq import race
from gpuq.host.driver import SUCCESS
from gpuq.race import picture
from gpuq.race.board import Board, Holder, Row, write_trace
from gpuq.race.order import StuckError
from gpuq.race.product import GatedDriver
from gpuq.race.schedule import BATCH, BUFFERS, FIRST_BATCH, LAST, POOLS, VALUES, faults
from gpuq.race.stream import GatedStream

SMALL = 4096
PUBLISHED = {
    "original": {
        "wait_hook_calls": 2,
        "ready_after_a": 63,
        "scheduled_after_a": 0,
        "premature_ready_buffers": 32,
        "first_lease_still_pending": True,
        "bad_samples": 1,
        "bad_uint64_values": 262144,
        "watchdog_fired": False,
    },
    "event-recheck": {
        "wait_hook_calls": 2,
        "ready_after_a": 30,
        "scheduled_after_a": 33,
        "premature_ready_buffers": 0,
        "first_lease_still_pending": False,
        "bad_samples": 0,
        "bad_uint64_values": 0,
        "watchdog_fired": False,
    },
}


@pytest.fixture(scope="module")
def runs() -> dict[str, race.Run]:
    """Every pool at its full size."""
    return {one.pool: one for one in race.run_race()}


@pytest.fixture(scope="module", params=POOLS)
def each(request: pytest.FixtureRequest, runs: dict[str, race.Run]) -> race.Run:
    return runs[request.param]


# --- the figures -----------------------------------------------------------------------------


@pytest.mark.parametrize("pool", PUBLISHED)
def test_the_models_show_the_published_figures(runs: dict[str, race.Run], pool: str) -> None:
    assert asdict(runs[pool].figures) == PUBLISHED[pool]


def test_gpuq_gives_no_buffer_out_too_early(runs: dict[str, race.Run]) -> None:
    figures = runs["gpuq"].figures
    assert figures.premature_ready_buffers == 0
    assert not figures.first_lease_still_pending
    assert figures.bad_samples == figures.bad_uint64_values == 0
    assert not figures.watchdog_fired
    # It stood in the same place: as many free and as many under way as in the form that is right.
    assert (figures.ready_after_a, figures.scheduled_after_a) == (30, 33)


def test_block_65_should_hold_66_and_holds_999(runs: dict[str, race.Run]) -> None:
    assert runs["original"].wrong == ((65, 66, 999),)
    assert runs["event-recheck"].wrong == runs["gpuq"].wrong == ()


def test_all_of_it_is_as_it_must_be(runs: dict[str, race.Run]) -> None:
    assert faults(list(runs.values())) == []


# --- the trace -------------------------------------------------------------------------------


def events(one: race.Run, event: str) -> list[Row]:
    return [row for row in one.rows if row.event == event]


def test_the_trace_is_a_table_of_pools_steps_threads_buffers_offsets_and_samples(
    runs: dict[str, race.Run], tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    with path.open("w", newline="") as file:
        write_trace(file, runs.values())
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["pool", "step", "thread", "event", "buffer", "offset", "sample"]
    assert len(table) == sum(len(one.rows) for one in runs.values())
    for row in table:
        if row["sample"]:
            assert int(row["offset"]) == int(row["sample"]) * race.BLOCK_BYTES
        if row["buffer"]:
            assert 0 <= int(row["buffer"]) < BUFFERS


def test_the_trace_counts_steps_and_names_threads(each: race.Run) -> None:
    assert [row.step for row in each.rows] == list(range(1, len(each.rows) + 1))
    poller = {"poller"} if each.pool == "gpuq" else set()
    assert {row.thread for row in each.rows} == {"A", "B", "schedule", "stream"} | poller


def test_every_block_is_leased_submitted_and_copied_once_and_in_that_order(each: race.Run) -> None:
    for event in ("lease", "submit_copy", "end_copy"):
        assert sorted(row.sample for row in events(each, event)) == list(range(LAST + 1))
    for sample in range(LAST + 1):
        mine = [row for row in each.rows if row.sample == sample]
        order = [row.event for row in mine if row.event in ("lease", "submit_copy", "end_copy")]
        # Of gpuq's a pass is seen as a whole: a lease, then what the next pass did with it.
        assert order == ["lease", "submit_copy", "end_copy"]
        assert len({row.buffer for row in mine if row.event in ("lease", "end_copy")}) == 1


@pytest.mark.parametrize("pool", PUBLISHED)
def test_the_first_waiter_lets_itself_be_overtaken_by_a_second_batch(
    runs: dict[str, race.Run], pool: str
) -> None:
    """A sleeps, gate 1 opens, B wakes first and records the event again, then A has the lock."""
    one = runs[pool]
    [sleep] = events(one, "sleep")
    [gate] = events(one, "open_gate_1")
    b_wakes, a_wakes = events(one, "wake")
    first, second, _ = events(one, "record_event")
    assert (sleep.thread, b_wakes.thread, a_wakes.thread) == ("A", "B", "A")
    order = [first, sleep, gate, b_wakes, second, a_wakes]
    assert order == sorted(order, key=lambda row: row.step)
    batches = [
        sum(row.step < mark.step for row in events(one, "submit_copy")) for mark in (first, second)
    ]
    assert batches == [FIRST_BATCH, 2 * FIRST_BATCH]


def test_only_the_original_frees_buffers_whose_copies_are_still_to_come(
    runs: dict[str, race.Run],
) -> None:
    early = events(runs["original"], "free_too_early")
    assert {row.thread for row in early} == {"A"}
    assert [row.sample for row in early] == list(range(FIRST_BATCH, LAST))
    assert events(runs["event-recheck"], "free_too_early") == []
    assert events(runs["gpuq"], "free_too_early") == []


def test_gpuq_records_an_event_for_each_copy_and_frees_a_buffer_after_its_own_copy(
    runs: dict[str, race.Run],
) -> None:
    one = runs["gpuq"]
    submitted, recorded = events(one, "submit_copy"), events(one, "record_event")
    assert [row.buffer for row in recorded] == [row.buffer for row in submitted]
    for copy, event in zip(submitted, recorded, strict=True):
        assert event.step == copy.step + 1
    ended: set[int] = set()
    for row in one.rows:
        if row.event == "end_copy":
            ended.add(row.sample)
        elif row.event == "free":
            assert row.sample in ended
    assert len(events(one, "free")) == LAST + 1


@pytest.mark.parametrize("pool", POOLS)
def test_twenty_runs_are_one(pool: str) -> None:
    first = race.run_pool(pool, SMALL)
    for _ in range(19):
        assert race.run_pool(pool, SMALL) == first


# --- what is wrong shows ---------------------------------------------------------------------


def test_a_driver_that_calls_every_copy_complete_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GatedDriver, "_query", lambda self, event: SUCCESS)
    one = race.run_pool("gpuq", SMALL)
    assert one.figures.premature_ready_buffers > 0
    assert one.figures.first_lease_still_pending
    assert one.figures.bad_samples > 0
    assert faults([one]) == ["gpuq: a buffer was used again too early"]


def test_a_model_with_other_figures_is_found_out() -> None:
    small = race.run_pool("original", SMALL)
    assert small.figures.bad_uint64_values == SMALL // 8
    assert faults([small]) == ["original: other figures than the published ones"]


# --- gates and threads -----------------------------------------------------------------------


def test_the_schedule_holds_what_it_says() -> None:
    assert (BUFFERS, BATCH, race.BLOCK_BYTES) == (64, 32, 2 << 20)
    assert (VALUES[0], VALUES[65], VALUES[66], len(VALUES)) == (1, 66, 999, 67)


@pytest.mark.parametrize("pool", POOLS)
def test_the_watchdog_opens_a_gate_that_nobody_opens_and_the_run_fails(pool: str) -> None:
    one = race.run_pool(pool, SMALL, watchdog_seconds=0.5, leaves_gate_shut=True)
    assert one.figures.watchdog_fired
    assert faults([one]) == [f"{pool}: the watchdog fired"]
    assert {row.thread for row in events(one, "open_gate_1")} == {"watchdog"}


@pytest.mark.parametrize("pool", POOLS)
def test_the_watchdog_may_fire_at_any_time(pool: str) -> None:
    for watchdog_seconds in (0.0, 0.001, 0.01, 0.02):
        race.run_pool(pool, SMALL, watchdog_seconds=watchdog_seconds)


@pytest.mark.parametrize("pool", POOLS)
def test_a_schedule_that_is_broken_off_leaves_nothing_behind(
    pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    race.run_pool(pool, SMALL)
    descriptors = os.listdir("/proc/self/fd")
    threads = set(threading.enumerate())

    def fail(self: Board, *_arguments: Any) -> None:
        raise KeyboardInterrupt

    # Broken off where A sleeps, or is stopped in its post.
    monkeypatch.setattr(Board, "keep", fail)
    with pytest.raises(KeyboardInterrupt):
        race.run_pool(pool, SMALL)
    until(lambda: set(threading.enumerate()) <= threads, "all threads have ended")
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_poller_that_makes_no_progress_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuq.race.order._GRACE_SECONDS", 0.0)
    monkeypatch.setattr(GatedStream, "has_taken", lambda self, copies: False)
    with pytest.raises(StuckError):
        race.run_pool("gpuq", SMALL, watchdog_seconds=0.5)


def test_nothing_of_the_product_knows_of_the_race() -> None:
    package = Path(race.__file__).parent.parent
    naming = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "gpuq.race" in path.read_text(encoding="utf-8") and "race" not in path.parts
    }
    assert naming <= {"cli.py", "kernels/gate.py"}


# --- the picture -----------------------------------------------------------------------------


def test_the_picture_has_a_square_for_each_buffer_and_block(runs: dict[str, race.Run]) -> None:
    document = picture.to_svg(picture.draw(list(runs.values())))
    root = ElementTree.fromstring(document)
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3 * (4 * BUFFERS + LAST + 1)
    assert sum(Holder.FREE_TOO_EARLY.value in title for title in titles) == 32
    assert sum(Holder.FILLED_TOO_EARLY.value in title for title in titles) == 1
    assert [title for title in titles if "wrong" in title] == ["block 65: wrong"]


def test_nothing_is_written_beyond_the_edge_of_the_picture(runs: dict[str, race.Run]) -> None:
    drawing = picture.draw(list(runs.values()))
    for label in drawing.labels:
        assert 0 < label.y < drawing.height
        # Half the size is the mean width of a character in the usual sans-serif types.
        assert label.x + 0.5 * label.size * len(label.text) < drawing.width, label.text
    for box in drawing.boxes:
        assert box.x + box.width <= drawing.width
        assert box.y + box.height <= drawing.height


def test_a_picture_may_be_a_png_where_matplotlib_is_there(
    runs: dict[str, race.Run], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "race.png"
    picture.write_picture(str(path), list(runs.values()))
    assert path.read_bytes().startswith(b"\x89PNG")


# --- the command -----------------------------------------------------------------------------


def test_the_command_prints_the_table_and_writes_its_files(tmp_path: Path) -> None:
    trace, drawing = tmp_path / "trace.csv", tmp_path / "race.svg"
    result = run("race", "--trace", trace, "--picture", drawing)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    table = rows(result.stdout)
    assert table["figure"] == ["original", "event recheck", "gpuq"]
    for name in PUBLISHED["original"]:
        expected = [str(PUBLISHED[pool][name]).lower() for pool in PUBLISHED]
        assert table[name][:2] == expected
    assert "block 65 should hold 66 and holds 999" in result.stdout
    assert trace.read_text().startswith("pool,step,thread,event,buffer,offset,sample\n")
    ElementTree.parse(drawing)


def test_the_command_prints_json_and_nothing_else() -> None:
    result = run("race", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (document["ok"], document["faults"]) == (True, [])
    original, recheck, product = document["pools"]
    assert original["wrong"] == [{"sample": 65, "expected": 66, "found": 999}]
    for pool, found in (("original", original), ("event-recheck", recheck)):
        assert PUBLISHED[pool].items() <= found.items()
    assert product["pool"] == "gpuq"
    assert (product["premature_ready_buffers"], product["bad_samples"]) == (0, 0)


def test_the_command_fails_where_the_watchdog_fires() -> None:
    result = run("race", "--stuck", "--watchdog", "0.5")
    assert result.exit_code == 1
    assert rows(result.stdout)["watchdog_fired"] == ["true"] * 3
    assert "proves nothing" in result.stdout
    assert [f"gpuq: {pool}: the watchdog fired" for pool in POOLS] == result.stderr.splitlines()


@pytest.mark.parametrize(
    ("option", "name", "complaint"),
    [
        ("--picture", "race.gif", "a picture's name must end in .svg or .png"),
        ("--trace", "none/trace.csv", "No such file or directory"),
        ("--picture", "none/race.svg", "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, option: str, name: str, complaint: str
) -> None:
    path = tmp_path / name
    result = run("race", option, path)
    assert result.exit_code == 1
    assert result.stderr == f"gpuq: {path}: {complaint}\n"

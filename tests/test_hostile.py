"""A million spiteful submissions against a live poller, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUBMISSIONS = int(os.environ.get("GPUQ_HOSTILE_SUBMISSIONS", "1000000"))
REFUSALS = ("BAD_SOURCE", "BAD_DESTINATION", "BAD_RANGE", "OUT_OF_BOUNDS", "BAD_OPTIONS")


def assault(folder: Path, reader: str, submissions: int, seed: int, *more: str) -> dict[str, Any]:
    """Run `hostile` and return its counts; a crash shows as its return code."""
    command = [
        sys.executable, Path(__file__).with_name("hostile.py"), folder, "--reader", reader,
        "--submissions", str(submissions), "--seed", str(seed), *more,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def assert_harmless(counts: dict[str, Any]) -> None:
    assert counts["guards_changed"] == 0
    assert counts["forbidden_bytes"] == 0
    assert counts["honest_right"] == counts["honest_asked"] >= 200
    assert counts["fooled"] == []
    assert counts["state"] == "CLOSED"


def test_a_million_hostile_submissions_do_no_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = assault(tmp_path, "auto", SUBMISSIONS, seed=1)
    with capsys.disabled():
        print(
            f"\nhostile submissions: {counts['submissions']:,}, of which the poller judged "
            f"{counts['answered'] - counts['honest_asked']:,}; honest "
            f"{counts['honest_right']:,} of {counts['honest_asked']:,} right"
        )
    assert_harmless(counts)
    assert counts["submissions"] >= SUBMISSIONS
    # It has not just been written: the poller has looked at much of it, and refused by every rule.
    assert counts["answered"] - counts["honest_asked"] > SUBMISSIONS / 20
    assert min(counts["statuses"][name] for name in REFUSALS) > 100
    assert counts["statuses"]["OK"] > counts["honest_right"]


def test_hostile_submissions_do_no_harm_through_reader_threads(tmp_path: Path) -> None:
    assert_harmless(assault(tmp_path, "threads", SUBMISSIONS // 20, seed=2))


@pytest.mark.parametrize(("direct", "straight"), [("auto", "512"), ("off", "100")])
def test_hostile_submissions_do_no_harm_where_reads_go_straight(
    tmp_path: Path, direct: str, straight: str
) -> None:
    more = ("--direct", direct, "--straight", straight)
    counts = assault(tmp_path, "auto", SUBMISSIONS // 20, 3, *more)
    print(counts)
    assert_harmless(counts)
    assert counts["straight"] > 1_000_000 or direct == "auto"  # as the file system allows it
    assert counts["merged"] > 0

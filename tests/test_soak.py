"""The soak in short: it finds nothing in gpuq, and what is put before it to be found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuq.layout import Status
from gpuq.soak import content, run
from gpuq.soak.content import GUARD, fill, find_wrong
from gpuq.soak.files import SoakFile

SECONDS = float(os.environ.get("GPUQ_SOAK_SECONDS", "4"))


def test_a_short_soak_finds_every_byte_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soak = run.run_soak(SECONDS, 20240607, str(tmp_path))
    assert soak.fault is None
    assert soak.statuses["OK"] > 100
    assert soak.statuses["END_OF_FILE"] > 10
    assert sum(soak.loaders.values()) >= 2
    with capsys.disabled():
        print(
            f"\nsoak: {soak.requests:,} requests, {soak.bytes_checked:,} bytes checked, none wrong"
        )


def test_a_wrong_byte_of_a_file_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SoakFile._write

    def write_wrong(self: SoakFile, start: int, end: int) -> None:
        whole(self, start, end)
        if start == 0:
            os.pwrite(self._descriptor, bytes([content.byte_at(self.number, 300) ^ 1]), 300)

    monkeypatch.setattr(SoakFile, "_write", write_wrong)
    soak = run.run_soak(SECONDS, 7, str(tmp_path))
    assert soak.fault is not None
    assert re.search(r"file\d \(number \d+\): request .* for byte 300 of the file", soak.fault)
    assert "seed 7," in soak.fault


@pytest.mark.parametrize("said", [Status.OK, Status.END_OF_FILE])
def test_a_wrong_status_is_found(tmp_path: Path, said: Status) -> None:
    """Either is impossible for a request whose range runs backwards."""
    soak = run.Soak(1)
    folder = run.Folder(str(tmp_path), run.FILES, 100_000, run.random.Random(1))
    life = run._Life(soak, folder, "threads", 5)
    try:
        rounds = (life.make_round() for _ in range(100))
        requests = [next(r for made in rounds for r in made if r.certain == Status.BAD_RANGE)]
        firsts = np.array([0] + [1] * run.GROUPS)
        for kind in (0, run.COUNTED):
            with pytest.raises(run.WrongError, match="expected BAD_RANGE"):
                life._check_statuses(
                    requests, firsts, np.full(run.GROUPS, kind), np.array([0 if kind else said]),
                    np.array([said] + [0] * (run.GROUPS - 1)),
                )  # fmt: skip
    finally:
        life.end("close")
        folder.close()


def expectation(rule: int, at: int = 10, length: int = 20, stable: int = 1000) -> Any:
    return np.array([[at, length, 3, 990, stable, rule]], dtype=np.int64)


@pytest.mark.parametrize(
    ("rule", "change", "found"),
    [
        (content.EXACT, {}, -1),
        (content.EXACT, {9: 1}, 9),
        (content.EXACT, {30: 1}, 30),
        (content.EXACT, {25: 0}, 25),
        (content.EXACT_OR_ZERO, {25: 0}, -1),
        (content.EXACT_OR_ZERO, {15: 0}, 15),
        (content.EXACT_OR_ZERO, {25: GUARD}, 25),
        (content.ANY_RIGHT, {25: 0, 15: GUARD}, -1),
        (content.ANY_RIGHT, {15: 0}, 15),
        (content.ANY_RIGHT, {25: 78}, 25),
        (content.UNTOUCHED, {}, 10),
        (content.UNTOUCHED, dict.fromkeys(range(10, 30), GUARD), -1),
    ],
)
def test_each_rule_lets_pass_what_it_may(rule: int, change: dict[int, int], found: int) -> None:
    memory = np.full(50, GUARD, dtype=np.uint8)
    fill(memory[10:30], 3, 990)
    assert not {0, GUARD, 78} & set(memory[10:30].tolist()), "the test needs other bytes"
    for position, value in change.items():
        memory[position] = value
    assert find_wrong(memory, expectation(rule))[0] == found


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpuq", "soak", "--seconds", "0", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--seed", "5", "--json"], capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout)
    assert (document["ok"], document["seed"], document["fault"]) == (True, 5, None)
    assert document["requests"] > 0
    assert list(tmp_path.iterdir()) == []

"""``gpuq pull``: what it prints for files that are right, as a table and as JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import random_bytes, write_index, write_safetensors
from conftest import Mode, skip_where_refused
from typer.testing import CliRunner

import gpuq
from gpuq import cli, ending

SMALL = ["--target", "cpu", "--slots", "16", "--staging-buffers", "4", "--staging-bytes", "4096"]


@dataclass(frozen=True)
class Ended:
    """How a command ended; on stderr, the notice of compiling is left out."""

    exit_code: int
    stdout: str
    stderr: str


def without_notice(stderr: str) -> str:
    """Leave out what is said when Numba's cache is cold."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("gpuq: compiling "))


def run(*arguments: object, columns: int | None = None) -> Ended:
    """Run the command in this process; it must not end by an exception."""
    env = {"COLUMNS": None if columns is None else str(columns)}
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Ended(result.exit_code, result.stdout, without_notice(result.stderr))


def rows(output: str) -> dict[str, list[str]]:
    """Return the cells of each line by its first one."""
    cells = [re.split(r"\s{2,}", line) for line in output.splitlines()]
    return {line[0]: line[1:] for line in cells}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ordinary and unusual types, a scalar, an empty tensor, an odd offset for each."""
    return write_safetensors(
        tmp_path_factory.mktemp("checkpoint") / "model.safetensors",
        {
            "embed.weight": ("F32", [97, 33], random_bytes(97 * 33 * 4, 1)),
            "half": ("BF16", [5, 1001], random_bytes(10_010, 2)),
            "eighth": ("F8_E5M2", [777], random_bytes(777, 3)),
            "scale": ("F32", [], random_bytes(4, 4)),
            "unused": ("F16", [0, 7], b""),
            "packed": ("F4", [6, 2], random_bytes(6, 5)),
        },
    )


def content(path: Path, start: int, end: int) -> bytes:
    return path.read_bytes()[start:end]


def test_json_has_every_array_and_how_it_was_read(checkpoint: Path) -> None:
    result = run("pull", checkpoint, "--json", *SMALL)
    assert result.exit_code == 0
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert (document["gpuq"], document["ok"], document["error"]) == (gpuq.__version__, True, None)
    (file,) = document["files"]
    assert file["path"] == str(checkpoint)
    assert file["format"] == "safetensors"
    assert file["target"] == "cpu"
    assert file["reader"] in ("io_uring", "threads")
    assert isinstance(file["direct"], bool)
    assert file["seconds"] > 0
    assert file["gb_per_s"] == pytest.approx(file["bytes"] / 1e9 / file["seconds"])
    assert file["requests"] >= 6
    arrays = {array["name"]: array for array in file["arrays"]}
    assert {name: (a["dtype"], a["shape"], a["bytes"]) for name, a in arrays.items()} == {
        "embed.weight": ("F32", [97, 33], 97 * 33 * 4),
        "half": ("BF16", [5, 1001], 10_010),
        "eighth": ("F8_E5M2", [777], 777),
        "scale": ("F32", [], 4),
        "unused": ("F16", [0, 7], 0),
        "packed": ("F4", [6, 2], 6),
    }
    for array in arrays.values():
        assert (array["ok"], array["status"], array["errno"]) == (True, "OK", 0)
        expected = content(checkpoint, array["start"], array["end"])
        assert array["crc32"] == f"{zlib.crc32(expected):08x}"


def test_the_table_has_every_array_and_how_it_was_read(checkpoint: Path) -> None:
    result = run("pull", checkpoint, *SMALL, "--reader", "threads", "--direct", "off")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.startswith(f"{checkpoint}: safetensors, 6 arrays\n")
    table = rows(result.stdout)
    assert table["name"] == ["dtype", "shape", "bytes", "status", "crc32"]
    assert table["embed.weight"][:4] == ["F32", "(97, 33)", "12,804", "OK"]
    assert table["half"][:4] == ["BF16", "(5, 1001)", "10,010", "OK"]
    assert table["scale"][:4] == ["F32", "()", "4", "OK"]
    assert table["unused"] == ["F16", "(0, 7)", "0", "OK", "00000000"]
    entry = gpuq.formats.open_arrays(checkpoint)["half"]
    checksum = zlib.crc32(content(checkpoint, entry.start, entry.end))
    assert table["half"][4] == f"{checksum:08x}"
    assert table["target"] == ['cpu (target="cpu" was asked for)']
    assert table["reader"] == ['threads (reader="threads" was asked for)']
    assert table["direct"] == ['no (direct="off" was asked for)']
    assert float(table["seconds"][0]) >= 0
    assert table["check"] == ["all 23,601 bytes are as a buffered read has them"]


def test_tiny_staging_pulls_the_same(mode: Mode, checkpoint: Path) -> None:
    result = run(
        "pull", checkpoint, "--json", "--target", "cpu", "--reader", mode.reader,
        "--direct", mode.direct, "--staging-buffers", 2, "--staging-bytes", 8192,
        "--slots", 2, "--slice-bytes", 1000,
    )  # fmt: skip
    assert result.exit_code == 0
    (file,) = json.loads(result.stdout)["files"]
    assert file["ok"]
    assert file["reader"] == mode.reader
    assert file["direct"] == (mode.direct == "require")
    assert file["requests"] > 23_601 // 1000


def test_npy_and_raw_files(tmp_path: Path) -> None:
    array = np.arange(3000, dtype=">i4").reshape(50, 60)
    np.save(tmp_path / "numbers.npy", array)
    (tmp_path / "notes.txt").write_bytes(b"hello")
    result = run("pull", tmp_path / "numbers.npy", tmp_path / "notes.txt", *SMALL)
    assert result.exit_code == 0
    table = rows(result.stdout)
    assert table["numbers"] == [
        ">i4", "(50, 60)", "12,000", "OK", f"{zlib.crc32(array.tobytes()):08x}"
    ]  # fmt: skip
    assert table["notes"] == ["|u1", "(5,)", "5", "OK", f"{zlib.crc32(b'hello'):08x}"]
    assert result.stdout.endswith("\n2 of 2 files right\n")


def test_an_index_pulls_all_its_shards(tmp_path: Path) -> None:
    path = write_index(
        tmp_path / "model.safetensors.index.json",
        {
            "one.safetensors": {"a": ("U8", [3000], random_bytes(3000, 1))},
            "two.safetensors": {
                "b": ("U8", [10], random_bytes(10, 2)),
                "c": ("I16", [2], random_bytes(4, 3)),
            },
        },
    )
    result = run("pull", path, "--json", *SMALL)
    assert result.exit_code == 0
    (file,) = json.loads(result.stdout)["files"]
    assert file["format"] == "safetensors-index"
    assert [array["name"] for array in file["arrays"]] == ["a", "b", "c"]
    assert [source["path"] for source in file["sources"]] == [
        str(tmp_path / "one.safetensors"),
        str(tmp_path / "two.safetensors"),
    ]


def test_only_the_named_tensors(checkpoint: Path) -> None:
    result = run("pull", checkpoint, "--json", *SMALL, "--tensor", "scale", "--tensor", "half")
    assert result.exit_code == 0
    (file,) = json.loads(result.stdout)["files"]
    assert [array["name"] for array in file["arrays"]] == ["half", "scale"]
    assert file["bytes"] == 10_014


def test_with_several_files_a_tensor_is_taken_from_whichever_has_it(tmp_path: Path) -> None:
    paths = [
        write_safetensors(tmp_path / f"{name}.safetensors", {name: ("U8", [3], b"abc")})
        for name in ("one", "two", "three")
    ]
    result = run("pull", *paths, "--json", *SMALL, "--tensor", "two")
    assert result.exit_code == 0
    assert [file["path"] for file in json.loads(result.stdout)["files"]] == [str(paths[1])]


def test_at_80_columns_no_line_is_longer_and_names_are_whole(tmp_path: Path) -> None:
    name = "encoder.layer.11.attention.output.LayerNorm.weight.of.an.even.longer.name"
    path = write_safetensors(
        tmp_path / "model.safetensors", {name: ("F32", [100, 384], random_bytes(153_600, 1))}
    )
    wide = run("pull", path, *SMALL)
    assert name in wide.stdout
    narrow = run("pull", path, *SMALL, columns=80)
    table = narrow.stdout[narrow.stdout.index("\nname") :].splitlines()
    assert max(len(line) for line in narrow.stdout.splitlines()) <= 80
    folded = "".join(line.split("  ")[0] for line in table[2 : table.index("", 1)])
    assert folded == name


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    name = "[bold]\x1b[31mred\r\n:smile:"
    path = write_safetensors(tmp_path / "m.safetensors", {name: ("U8", [2], b"ab")})
    result = run("pull", path, *SMALL)
    assert result.exit_code == 0
    assert "[bold]\\x1b[31mred\\r\\n:smile:" in rows(result.stdout)
    document = json.loads(run("pull", path, "--json", *SMALL).stdout)
    assert document["files"][0]["arrays"][0]["name"] == name


def test_the_notice_comes_once_and_only_when_something_is_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from numba.core import event

    with ending.told_when_compiling():
        pass
    assert capsys.readouterr().err == ""
    with ending.told_when_compiling():
        for _ in range(3):
            with event.trigger_event("numba:compile"):
                pass
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpuq: compiling for this machine")
    assert err.count("\n") == 1


def test_progress_goes_to_a_terminal_on_stderr_and_not_to_stdout(checkpoint: Path) -> None:
    terminal, its_other_end = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "gpuq", "pull", str(checkpoint), "--json", *SMALL],
        stdout=subprocess.PIPE,
        stderr=its_other_end,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(its_other_end)
    drawn = b""
    while True:
        try:
            drawn += os.read(terminal, 65536)
        except OSError:  # EIO: all was read
            break
    os.close(terminal)
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"]
    assert b"pull" in drawn
    assert b"check" in drawn


def test_the_simulator_runs_the_same_kernel(checkpoint: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "gpuq", "pull", checkpoint, "--json", "--slots", "8",
            "--staging-bytes", "4096", "--staging-buffers", "4",
        ],
        capture_output=True,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(done.stdout)["files"]
    assert file["target"] == "simulator"
    by_cpu = json.loads(run("pull", checkpoint, "--json", *SMALL).stdout)["files"][0]
    assert file["arrays"] == by_cpu["arrays"]


def test_the_version_and_the_help() -> None:
    assert run("--version").stdout == f"gpuq {gpuq.__version__}\n"
    for arguments in (
        ["--help"],
        ["-h"],
        ["pull", "--help"],
        ["demo", "--help"],
        ["bench", "--help"],
    ):
        assert run(*arguments).exit_code == 0
    assert run().exit_code == 2


def test_reader_and_mode_come_from_the_environment_too(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_where_refused(Mode("threads", "off"))
    monkeypatch.setenv("GPUQ_READER", "threads")
    monkeypatch.setenv("GPUQ_DIRECT", "off")
    (file,) = json.loads(run("pull", checkpoint, "--json", *SMALL).stdout)["files"]
    assert (file["reader"], file["direct"]) == ("threads", False)


def test_progress_reaches_all_bytes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    @contextmanager
    def record(nbytes: int) -> Any:
        assert nbytes == 23_601
        yield lambda stage, done: seen.append((stage, done))

    monkeypatch.setattr(cli, "_progress_bar", record)
    assert run("pull", checkpoint, *SMALL).exit_code == 0
    for stage in ("pull", "check"):
        done = [n for name, n in seen if name == stage]
        assert done == sorted(done)
        assert done[-1] == 23_601

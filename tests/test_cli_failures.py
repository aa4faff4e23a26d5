"""``gpuq pull`` where it cannot succeed: one line that names path and cause, and the exit code."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_index, write_safetensors
from test_cli_pull import SMALL, Ended, rows, run, without_notice
from typer.testing import CliRunner

import gpuq
import gpuq.report  # before a test gives up the right to read it
from gpuq import cli, pull_files
from gpuq.host import direct_file
from gpuq.kernels import ready
from gpuq.layout import Status


def line_of(result: Ended, code: int = 1) -> str:
    """Return the one line on stderr; check the exit code."""
    assert result.exit_code == code
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("gpuq: ")
    return result.stderr[len("gpuq: ") : -1]


def failure(path: object, *options: object) -> str:
    """Pull a file that cannot be pulled; return the line, which JSON must hold too."""
    result = run("pull", path, *SMALL, *options)
    assert result.stdout == ""
    line = line_of(result)
    result = run("pull", path, "--json", *SMALL, *options)
    assert line_of(result) == line
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert line in (document["error"], *(file["error"] for file in document["files"]))
    return line


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.bin"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def test_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "missing.bin"
    assert failure(path) == f"{path}: No such file or directory"


def test_a_directory_whose_name_stands_in_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dir").mkdir()
    monkeypatch.chdir(tmp_path)
    assert failure("dir") == "dir: Is a directory"


@contextmanager
def as_nobody() -> Iterator[None]:
    """Give up root's right to read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_an_unreadable_file(tmp_path: Path, good: Path) -> None:
    good.chmod(0)
    with as_nobody():
        assert failure(good) == f"{good}: Permission denied"


@pytest.mark.parametrize("name", ["a.bin", "a.npy", "a.safetensors", "a.safetensors.index.json"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch()
    assert failure(path) == f"{path}: the file is empty"


def test_a_truncated_checkpoint(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"a": ("U8", [5000], bytes(5000))})
    size = path.stat().st_size
    os.truncate(path, size - 100)
    assert failure(path) == f"{path}: truncated: expected {size} bytes, found {size - 100}"


def test_a_damaged_npy_file(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00")
    assert failure(path).startswith(f"{path}: ")


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    path = write_index(
        tmp_path / "m.safetensors.index.json",
        {name: {name: ("U8", [1], b"a")} for name in ("one.safetensors", "two.safetensors")},
    )
    (tmp_path / "two.safetensors").unlink()
    line = failure(path)
    assert line.startswith(f"{path}: ")
    assert "two.safetensors" in line


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert failure(path).startswith(f"{path}: expected a regular file")


def test_a_name_with_a_line_break_is_still_one_line(tmp_path: Path) -> None:
    path = tmp_path / "two\nlines\x1b[31m"
    result = run("pull", path, *SMALL)
    assert line_of(result) == f"{tmp_path}/two\\nlines\\x1b[31m: No such file or directory"


def test_direct_reads_that_are_required_and_refused(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_file, "statx_alignment", lambda descriptor: (0, 0))
    line = failure(good, "--direct", "require")
    assert line.startswith(f"{good}: direct reads were required, but ")


def test_without_direct_reads_the_table_says_why(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_file, "statx_alignment", lambda descriptor: (0, 0))
    result = run("pull", good, *SMALL)
    assert result.exit_code == 0
    assert rows(result.stdout)["direct"][0].startswith("no (the file system says")


def refuse_io_uring() -> None:
    """Let io_uring_setup fail with EPERM in this process, as a container's seccomp filter does."""
    load_number, jump_if_equal, answer = 0x20, 0x15, 0x06
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (load_number, 0, 0, 0),
            (jump_if_equal, 0, 1, 425),
            (answer, 0, 0, 0x00050000 | errno.EPERM),
            (answer, 0, 0, 0x7FFF0000),
        )
    )
    code = ctypes.create_string_buffer(program)
    filter_program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    )
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert prctl(22, 2, filter_program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def test_io_uring_that_is_asked_for_and_refused(good: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuq", "pull", str(good), *SMALL, "--reader", "io_uring"],
        capture_output=True,
        text=True,
        preexec_fn=refuse_io_uring,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert "io_uring" in line
    assert "EPERM" in line
    assert "Traceback" not in done.stderr


def test_io_uring_that_is_refused_leaves_threads_and_the_reason(good: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuq", "pull", str(good), *SMALL, "--json"],
        capture_output=True,
        preexec_fn=refuse_io_uring,
    )
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(done.stdout)["files"]
    assert file["reader"] == "threads"
    assert "io_uring" in file["reader_reason"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--slots", 3], "--slots must be a power of two, not 3"),
        (["--slots", 0], "--slots must be between 1 and "),
        (["--staging-buffers", 0], "--staging-buffers must be between 1 and "),
        (["--staging-bytes", 5000], "--staging-bytes must be a multiple of 4096, not 5000"),
        (["--slice-bytes", 5], "--slice-bytes must be between 512 and "),
        (["--reader", "magic"], "--reader must be one of auto, io_uring, threads, not 'magic'"),
        (["--direct", "maybe"], "--direct must be one of auto, require, off, not 'maybe'"),
        (["--target", "fpga"], "--target must be one of auto, cuda, simulator, cpu, not 'fpga'"),
        (["--target", "simulator"], 'target="simulator": set NUMBA_ENABLE_CUDASIM=1'),
    ],
)
def test_a_bad_option(good: Path, options: list[object], line: str) -> None:
    assert failure(good, *options).startswith(line)


def test_a_bad_environment_variable_is_named(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUQ_DIRECT", "maybe")
    assert failure(good).startswith("GPUQ_DIRECT: direct must be one of ")


def test_staging_beyond_memory_says_how_much_it_would_be(good: Path) -> None:
    line = failure(good, "--staging-buffers", 1 << 15, "--staging-bytes", 1 << 30)
    assert line.startswith("the loader cannot start: ")
    assert f"{1 << 45:,} bytes" in line


def test_too_little_memory_for_the_arrays(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_arguments: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(pull_files, "_poisoned", no_memory)
    assert failure(good) == f"{good}: not enough memory for its arrays"


def test_an_unknown_tensor_names_those_that_are_close(tmp_path: Path) -> None:
    names = ["pooler.dense.weight", "pooler.dense.bias", "embeddings.word"]
    path = write_safetensors(
        tmp_path / "m.safetensors", {name: ("U8", [1], b"a") for name in names}
    )
    line = failure(path, "--tensor", "pooler.dense.wieght")
    assert line.startswith(f"no array 'pooler.dense.wieght' in {path}; close to it: ")
    assert "pooler.dense.weight" in line
    assert "embeddings.word" not in line
    assert "close to it: embeddings.word" in failure(path, "--tensor", "word")
    line = failure(path, "--tensor", "x")
    assert line.endswith(
        "there are 3, such as pooler.dense.weight, pooler.dense.bias, embeddings.word"
    )


def test_the_tensors_that_are_there_are_pulled_all_the_same(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"a": ("U8", [1], b"a")})
    result = run("pull", path, *SMALL, "--tensor", "a", "--tensor", "b", "--json")
    assert line_of(result).startswith("no array 'b'")
    (file,) = json.loads(result.stdout)["files"]
    assert file["ok"]


def test_the_other_files_are_pulled_all_the_same(tmp_path: Path, good: Path) -> None:
    missing = tmp_path / "missing.bin"
    empty = tmp_path / "empty.bin"
    empty.touch()
    result = run("pull", missing, good, empty, *SMALL)
    assert result.exit_code == 1
    assert result.stderr == (
        f"gpuq: {missing}: No such file or directory\ngpuq: {empty}: the file is empty\n"
    )
    assert rows(result.stdout)["good"][3] == "OK"
    assert result.stdout.endswith("\n1 of 3 files right\n")


def test_a_wrong_byte_is_an_exit_code_and_stands_in_the_table(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_otherwise(path: str, start: int, end: int) -> Any:
        content = np.fromfile(path, np.uint8)[start:end]
        content[4321] ^= 0x80
        yield content

    monkeypatch.setattr(pull_files, "read_plainly", read_otherwise)
    result = run("pull", good, *SMALL)
    assert result.exit_code == 1
    table = rows(result.stdout)
    assert table["good"][3] == "MISMATCH at 4321"
    assert table["check"] == ["1 of 1 failed: good"]
    (file,) = json.loads(run("pull", good, *SMALL, "--json").stdout)["files"]
    assert (file["ok"], file["arrays"][0]["mismatch"]) == (False, 4321)


def test_a_file_shortened_meanwhile_stands_in_the_table(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def shorten(nbytes: int) -> Any:
        os.truncate(good, 5000)
        yield None

    monkeypatch.setattr(cli, "_progress_bar", shorten)
    result = run("pull", good, *SMALL)
    assert result.exit_code == 1
    assert rows(result.stdout)["good"][3:] == ["END_OF_FILE", "-"]
    assert rows(result.stdout)["GB/s"] == ["-"]


def test_a_failed_read_shows_its_errno(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ready.pull_slices_on_cpu

    def fail(q: Any, *arguments: Any) -> None:
        plain(q, *arguments)
        arguments[4][:1] = Status.READ_FAILED, errno.EIO

    monkeypatch.setattr(ready, "pull_slices_on_cpu", fail)
    result = run("pull", good, *SMALL)
    assert result.exit_code == 1
    assert rows(result.stdout)["good"][3:] == ["READ_FAILED (EIO)", "-"]


INTERRUPTED = """
import os, signal
from contextlib import contextmanager
from gpuq import cli

@contextmanager
def interrupt(nbytes):
    yield lambda stage, done: os.kill(os.getpid(), signal.SIGINT)

cli._progress_bar = interrupt
cli.main()
"""


def test_ctrl_c_is_one_line_and_130(good: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "pull", str(good), *SMALL],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == "gpuq: interrupted"
    assert "Traceback" not in done.stderr


COMPILING = """
import os, signal, time
from gpuq import cli, pull_files

def compile_for_long(loader):
    os.kill(os.getpid(), signal.SIGINT)
    while True:  # the signal may reach another thread first
        time.sleep(0.01)

pull_files.prepare = compile_for_long
cli.main()
"""


def test_ctrl_c_inside_the_compiler_ends_the_process_without_unwinding_it(good: Path) -> None:
    """An exception from there crashed the process at its end, when LLVM's objects were freed."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILING, "pull", str(good), *SMALL],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 128 + signal.SIGINT
    assert without_notice(done.stderr) == "gpuq: interrupted\n"


def test_after_the_start_ctrl_c_is_an_exception_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with cli._ending_at_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reader_of_the_output_that_goes_away_is_no_traceback(good: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "gpuq", "pull", str(good), *SMALL],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert done.returncode == 1
    assert without_notice(done.stderr) == ""


def test_a_bug_keeps_its_traceback(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: Any, **_settings: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(pull_files, "pull_arrays", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        CliRunner().invoke(cli.app, ["pull", str(good), *SMALL], catch_exceptions=False)


def test_errors_of_the_loader_name_the_file(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*_arguments: Any, **_settings: Any) -> Any:
        raise gpuq.PollerDiedError("the poller ended by an error: out of luck")

    monkeypatch.setattr(pull_files, "pull_arrays", dead)
    assert failure(good) == f"{good}: the poller ended by an error: out of luck"

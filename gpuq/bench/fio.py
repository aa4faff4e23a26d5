"""The peer: fio with io_uring, over the same file, with the same size, depth and time."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuq.bench.measuring import Meter, Sample
from gpuq.bench.reading import Work


class FioError(RuntimeError):
    """fio is there and did not do its work."""


def find_fio() -> str | None:
    """Return the path of fio, None where it is not installed."""
    return shutil.which("fio")


def fio_command(
    program: str, path: Path, nbytes: int, work: Work, *, direct: bool, seconds: float, number: int
) -> list[str]:
    """Return the command line of one run."""
    shared = _shared(path, nbytes, direct=direct, seconds=seconds, number=number)
    return [program, *shared, *_job("gpuq", work)]


def _shared(path: Path, nbytes: int, *, direct: bool, seconds: float, number: int) -> list[str]:
    """Return the options that stand before the jobs and hold for all of them."""
    escaped = str(path).replace("\\", "\\\\").replace(":", "\\:")
    return [
        f"--filename={escaped}",
        f"--size={nbytes}",
        f"--direct={int(direct)}",
        "--ioengine=io_uring",
        f"--runtime={max(int(seconds * 1000), 1)}ms",
        "--time_based",
        "--norandommap",
        f"--randseed={number + 1}",
        "--readonly",
        "--output-format=json",
    ]


def _job(name: str, work: Work) -> list[str]:
    return [
        f"--name={name}",
        f"--rw={'read' if work.in_order else 'randread'}",
        f"--bs={work.block_bytes}",
        f"--iodepth={work.depth}",
    ]


def run_jobs(
    program: str,
    path: Path,
    nbytes: int,
    works: Mapping[str, Work],
    *,
    direct: bool,
    seconds: float,
    lead_in: float,
    number: int,
) -> dict[str, dict[str, Any]]:
    """Run several jobs at once over one file; return fio's own figures of each, by name.

    Their ``lat_ns`` have percentiles, from submission to completion. What they do in the first
    `lead_in` seconds comes on top and is not counted.

    Raises
    ------
    FioError
    """
    shared = _shared(path, nbytes, direct=direct, seconds=seconds, number=number)
    jobs = [option for name, work in works.items() for option in _job(name, work)]
    uncounted = f"--ramp_time={max(int(lead_in * 1000), 1)}ms"
    command = [program, *shared, uncounted, "--lat_percentiles=1", *jobs]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found = _jobs_in(ended.returncode, ended.stdout, ended.stderr)
    return {str(job["jobname"]): job for job in found}


def sample_fio(
    program: str, path: Path, nbytes: int, work: Work, *, direct: bool, seconds: float, number: int
) -> Sample:
    """Run fio once.

    Raises
    ------
    FioError
        It failed; the message is its own.
    """
    command = fio_command(
        program, path, nbytes, work, direct=direct, seconds=seconds, number=number
    )
    with Meter() as meter:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return parse_fio(ended.returncode, ended.stdout, ended.stderr, meter.others_cores)


def parse_fio(code: int, output: str, complaint: str, others_cores: float) -> Sample:
    """Read a run's figures out of fio's JSON.

    Raises
    ------
    FioError
    """
    job = _jobs_in(code, output, complaint)[0]
    read = job["read"]
    seconds = read["runtime"] / 1000
    # usr_cpu and sys_cpu are per cent of the job's run time, in milliseconds.
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Sample(int(read["total_ios"]), seconds, cpu_seconds, others_cores)


def _jobs_in(code: int, output: str, complaint: str) -> list[dict[str, Any]]:
    """Return the jobs of fio's JSON; raise `FioError` where one of them failed."""
    # Notes may stand before the document, even on standard output.
    begin = output.find("{")
    jobs: list[dict[str, Any]] = []
    if code == 0 and begin >= 0:
        jobs = json.loads(output[begin:])["jobs"]
    if code != 0 or not jobs or any(job.get("error", 1) != 0 for job in jobs):
        said = (complaint.strip() or output.strip() or "it said nothing").splitlines()[-1]
        raise FioError(f"fio ended with {code}: {said}")
    return jobs

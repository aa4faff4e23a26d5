"""What works on this machine and what does not, with reasons: the checks behind ``gpuq doctor``.

Each check does what a loader would do, with the loader's own functions, and reports what came of
it; in the end kernels pull bytes. Nothing but `gpuq.doctor.table` prints.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from gpuq.config import LoaderConfig
from gpuq.doctor.finding import Finding, checked, obstacles, say
from gpuq.doctor.gpu import find_gpu, find_target
from gpuq.doctor.paths import examine_path
from gpuq.doctor.reading import find_io_uring, find_locked_memory, find_open_files, find_reader
from gpuq.doctor.software import find_code_cache, find_versions
from gpuq.doctor.trial import try_loader
from gpuq.errors import ConfigError

__all__ = ["Finding", "diagnose", "obstacles"]


def diagnose(paths: Sequence[str] = ()) -> list[Finding]:
    """Look at the machine, then at each path.

    Parameters
    ----------
    paths : sequence of str
        Files, block devices, or directories, in which a temporary file is made and removed.
    """
    config, wrong = _settings()
    # A loader sets the variable where it is not set; that must not pass for the user's doing.
    loading = os.environ.get("CUDA_MODULE_LOADING")
    # First of all that start CUDA, as in a loader.
    target = checked("target", lambda: [find_target(config)])
    (io_uring,) = checked("io_uring", lambda: [find_io_uring(config)])
    findings = [
        *find_versions(),
        *wrong,
        *target,
        *checked("GPU", lambda: find_gpu(loading)),
        io_uring,
        *checked("reader", lambda: [find_reader(config)]),
        *checked("locked memory", lambda: [find_locked_memory(config, io_uring)]),
        *checked("open files", lambda: [find_open_files()]),
        *checked("code cache", lambda: [find_code_cache()]),
    ]
    with try_loader(config, bool(obstacles(findings))) as (loader, trial):
        findings.append(trial)
        for path in paths:
            findings += checked("file", partial(examine_path, path, config, loader), path)
    return findings


def _settings() -> tuple[LoaderConfig, list[Finding]]:
    """Return what loaders take from the environment; the defaults where that is wrong."""
    try:
        return LoaderConfig.from_environment(), []
    except ConfigError as error:
        return LoaderConfig(), [
            Finding("settings", "stops", "", say(error), "correct or unset the variable")
        ]

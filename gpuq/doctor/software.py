"""Versions, the simulator, and the cache of compiled code."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from importlib import metadata

import numba
from numba import config as numba_config

from gpuq.compiling import SIMULATED
from gpuq.doctor.finding import Finding, say
from gpuq.host import poller


def find_versions() -> list[Finding]:
    """Say what is installed, and whether Numba simulates CUDA."""
    system = os.uname()
    interpreter = f"{platform.python_implementation()} {platform.python_version()}"
    findings = [
        Finding("system", "yes", f"{system.sysname} {system.release}, {system.machine}"),
        Finding("Python", "yes", f"{interpreter}, {sys.executable}"),
        _numba(),
        Finding("numba-cuda", "yes", _version("numba-cuda")),
        _cupy(),
    ]
    if SIMULATED:
        findings.append(
            Finding(
                "simulator",
                "degraded",
                "NUMBA_ENABLE_CUDASIM=1",
                "kernels for CUDA are interpreted, slowly, and no GPU is used",
                "unset NUMBA_ENABLE_CUDASIM, except for debugging",
            )
        )
    else:
        findings.append(Finding("simulator", "yes", "off", "NUMBA_ENABLE_CUDASIM is not set"))
    return findings


def _numba() -> Finding:
    if numba_config.DISABLE_JIT:
        return Finding(
            "numba",
            "degraded",
            numba.__version__,
            "NUMBA_DISABLE_JIT=1: the host's code is interpreted and keeps the interpreter lock",
            "unset NUMBA_DISABLE_JIT, except for debugging",
        )
    return Finding("numba", "yes", numba.__version__)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed under this name"


def _cupy() -> Finding:
    try:
        import cupy
    except Exception as error:
        return Finding(
            "CuPy",
            "no",
            "",
            f"{say(error)}; it is needed for the cuda target alone",
            "for a GPU, install gpuq[cuda13], or gpuq[cuda12] where the driver is older",
        )
    return Finding("CuPy", "yes", f"{cupy.__version__}")


def find_code_cache() -> Finding:
    """Say where compiled code is kept for the next process, and whether it can be."""
    if numba_config.DISABLE_JIT:
        return Finding("code cache", "yes", "off", "NUMBA_DISABLE_JIT=1: nothing is compiled")
    if os.environ.get("GPUQ_CACHE") == "0":
        reason = "GPUQ_CACHE=0: each process compiles again, which takes some ten seconds"
        return Finding("code cache", "degraded", "off", reason, "unset GPUQ_CACHE")
    folder = getattr(poller.serve._cache, "cache_path", None)
    if folder is not None:
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            reason = f"no file can be made there: {error.strerror}"
        else:
            return Finding("code cache", "yes", folder, "a file can be made there")
    else:
        reason = "neither gpuq's own folder nor the home directory can be written"
    return Finding(
        "code cache",
        "degraded",
        folder or "none",
        f"{reason}; each process compiles again, which takes some ten seconds",
        "set NUMBA_CACHE_DIR to a folder that can be written",
    )

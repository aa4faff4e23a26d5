"""What works on this machine and what does not, with reasons: the checks behind ``gpuq doctor``.

Each check does what a loader would do, with the loader's own functions, and reports what came of
it; in the end kernels pull bytes. Nothing here prints.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import platform
import resource
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numba
import numpy as np
from numba import config as numba_config

from gpuq.compiling import SIMULATED
from gpuq.config import LoaderConfig
from gpuq.errors import (
    ConfigError,
    GpuqError,
    PollerDiedError,
    ReaderUnavailableError,
    TargetUnavailableError,
)
from gpuq.formats import ArrayEntry
from gpuq.host import poller
from gpuq.host.direct_file import OpenFile, open_file, statx_alignment
from gpuq.host.driver import SUCCESS, GpuFacts, gpu_facts, load_library, usable_gpu
from gpuq.host.service import choose_reader
from gpuq.host.uring_abi import ring_bytes
from gpuq.loader import Explanation, Loader, choose_device
from gpuq.mounts import Mount, mount_of
from gpuq.pull_files import Pull, prepare, pull_arrays

Verdict = Literal["yes", "degraded", "no", "unknown", "stops"]
"""Works; works with less than there could be; does not, and gpuq does without; not found out;
does not, and so what was asked for cannot run."""


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes
    ----------
    name : str
        What was looked at.
    ok : {"yes", "degraded", "no", "unknown", "stops"}
    value : str
        What it is; may be empty.
    reason : str
        Why the verdict is what it is.
    advice : str
        What to do about it; empty where there is nothing to do.
    path : str
        The path that it is about; empty where it is about the machine.
    """

    name: str
    ok: Verdict
    value: str = ""
    reason: str = ""
    advice: str = ""
    path: str = ""


TRIAL_BYTES = 100_003
"""What trial kernels pull, in bytes; no multiple of any block."""

_TRIAL_SLICE_BYTES = 16_384
_TRIAL_SECONDS = 60.0
_MANY_FILES = 256
"""More shards than the largest published checkpoints have."""
_DESCRIPTORS_PER_FILE = 2
_SPARE_DESCRIPTORS = 8
_LOADING_MODES = {1: "EAGER", 2: "LAZY"}
_SAID_CHARACTERS = 400
_RAISE_OPEN_FILES = "raise the limit of open files (ulimit -n)"
_THREADS_INSTEAD = "nothing must be done: worker threads read instead"


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
    (io_uring,) = _checked("io_uring", lambda: [_io_uring(config)])
    findings = [
        *_versions(),
        *wrong,
        # First of all that start CUDA, as in a loader.
        *_checked("target", lambda: [_target(config)]),
        *_checked("GPU", lambda: _gpu(loading)),
        io_uring,
        *_checked("reader", lambda: [_reader(config)]),
        *_checked("locked memory", lambda: [_locked_memory(config, io_uring)]),
        *_checked("open files", lambda: [_open_files()]),
        *_checked("code cache", lambda: [_code_cache()]),
    ]
    with _trial(config, bool(obstacles(findings))) as (loader, trial):
        findings.append(trial)
        for path in paths:
            examine = partial(examine_path, path, config, loader)
            findings += _checked("file", examine, path)
    return findings


def obstacles(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding that stops what was asked for; none where all can run."""
    return [
        ": ".join(part for part in (finding.path or finding.name, finding.reason) if part)
        for finding in findings
        if finding.ok == "stops"
    ]


def _checked(name: str, check: Callable[[], list[Finding]], path: str = "") -> list[Finding]:
    """Return what a check found; one that cannot even be made is a finding too."""
    try:
        return check()
    except Exception as error:
        return [Finding(name, "unknown", "", f"the check failed: {_say(error)}", path=path)]


# --- software ---


def _versions() -> list[Finding]:
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
            f"{_say(error)}; it is needed for the cuda target alone",
            "for a GPU, install gpuq[cuda13], or gpuq[cuda12] where the driver is older",
        )
    return Finding("CuPy", "yes", f"{cupy.__version__}")


# --- settings, target, GPU ---


def _settings() -> tuple[LoaderConfig, list[Finding]]:
    """Return what loaders take from the environment; the defaults where that is wrong."""
    try:
        return LoaderConfig.from_environment(), []
    except ConfigError as error:
        return LoaderConfig(), [
            Finding("settings", "stops", "", _say(error), "correct or unset the variable")
        ]


def _target(config: LoaderConfig) -> Finding:
    try:
        device, reason = choose_device(config.target)
    except TargetUnavailableError as error:
        return Finding(
            "target", "stops", config.target, _say(error), "unset GPUQ_TARGET, or set it to auto"
        )
    device.close()
    is_second_best = config.target == "auto" and device.name != "cuda"
    return Finding("target", "degraded" if is_second_best else "yes", device.name, reason)


def _gpu(loading: str | None) -> list[Finding]:
    try:
        library = load_library()
    except TargetUnavailableError as error:
        return [_no_driver(_say(error)), _module_loading(loading, None)]
    return examine_gpu(library, loading)


def _no_driver(reason: str) -> Finding:
    if any(_is_nvidia_gpu(device) for device in glob.glob("/sys/bus/pci/devices/*")):
        advice = (
            "an NVIDIA GPU is on the PCI bus: install NVIDIA's driver; in a container, start it "
            "with access to the GPU (docker run --gpus all)"
        )
    else:
        advice = "nothing, without an NVIDIA GPU (none is on the PCI bus): kernels run on the CPU"
    return Finding("CUDA driver", "no", "", reason, advice)


def _is_nvidia_gpu(device: str) -> bool:
    try:
        vendor = Path(device, "vendor").read_text().strip()
        kind = Path(device, "class").read_text().strip()
    except OSError:
        return False
    return vendor == "0x10de" and kind.startswith("0x03")


def examine_gpu(library: Any, loading: str | None = None) -> list[Finding]:
    """Return what a CUDA driver says of the GPU that a loader would take.

    Parameters
    ----------
    library : object
        The driver: its functions as attributes, called as by `ctypes`.
    loading : str, optional
        CUDA_MODULE_LOADING as the user set it.
    """
    try:
        facts = gpu_facts(library)
    except TargetUnavailableError as error:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        advice = (
            f"CUDA_VISIBLE_DEVICES is {hidden!r}; see that it names a GPU"
            if hidden is not None
            else "see whether nvidia-smi works, and whether /dev/nvidia* may be opened"
        )
        return [
            Finding("CUDA driver", "no", "", _say(error), advice),
            _module_loading(loading, None),
        ]
    release = _read_word("/sys/module/nvidia/version")
    version = "CUDA {}.{}".format(*facts.driver_version)
    findings = [Finding("CUDA driver", "yes", f"{release}, {version}" if release else version)]
    name = "{}, compute capability {}.{}".format(facts.name, *facts.compute_capability)
    try:
        usable_gpu(library)
        findings.append(Finding("GPU", "yes", name))
    except TargetUnavailableError as error:
        findings.append(
            Finding("GPU", "no", name, _say(error), "take another GPU (CUDA_VISIBLE_DEVICES)")
        )
    findings.append(_mapped_memory(facts))
    findings.append(_time_limit(facts.has_kernel_time_limit))
    findings.append(_module_loading(loading, library))
    return findings


def _mapped_memory(facts: GpuFacts) -> Finding:
    name = "mapped memory"
    if not facts.can_map_host_memory:
        return Finding(name, "no", "", "kernels cannot reach memory of the host")
    if not facts.has_unified_addressing:
        return Finding(name, "no", "", "no unified addressing: kernels need other addresses for it")
    return Finding(name, "yes", "with unified addressing", "kernels reach memory of the host")


def _time_limit(has_limit: bool) -> Finding:
    if not has_limit:
        return Finding("kernel time limit", "yes", "off")
    return Finding(
        "kernel time limit",
        "degraded",
        "on",
        "kernels that run for some seconds are ended by the system, as this GPU drives a display",
        "keep each launch short, or take a GPU without a display",
    )


def _module_loading(variable: str | None, library: Any) -> Finding:
    """Judge CUDA_MODULE_LOADING: by the driver's own word where there is a driver."""
    value = "not set" if variable is None else variable
    if library is None:
        reason = "without a GPU it has no effect"
        return Finding("CUDA_MODULE_LOADING", "yes", value, reason)
    mode = _effective_loading(library)
    if mode == "LAZY" or (mode is None and (variable or "").upper() == "LAZY"):
        return Finding(
            "CUDA_MODULE_LOADING",
            "degraded",
            value,
            "kernels load when first launched, and that waits for kernels that run: a kernel that "
            "polls and a first launch can wait for each other",
            "unset it, or give every kernel to Loader.prepare before the first one runs",
        )
    reason = f"loading is {mode}" if mode else "the driver is too old to say"
    if variable is None and mode == "EAGER":
        reason += ": gpuq sets it for its own process"
    return Finding("CUDA_MODULE_LOADING", "yes", value, reason)


def _effective_loading(library: Any) -> str | None:
    ask = getattr(library, "cuModuleGetLoadingMode", None)  # CUDA 11.7
    mode = ctypes.c_int(0)
    if ask is None or ask(ctypes.byref(mode)) != SUCCESS:
        return None
    return _LOADING_MODES.get(mode.value)


# --- reading ---


def _io_uring(config: LoaderConfig) -> Finding:
    try:
        choice = choose_reader(replace(config, reader="io_uring"))
    except OSError as error:  # ReaderUnavailableError is one; others say what ran out
        number = error.errno or 0
        advice = {
            errno.EPERM: "allow it: sysctl kernel.io_uring_disabled=0, or io_uring_* in the "
            "container's seccomp profile",
            errno.ENOSYS: "take Linux 5.11 or newer, and allow io_uring_* in the container's "
            "seccomp profile",
            errno.ENOMEM: "raise the limit (ulimit -l)",
            errno.EMFILE: _RAISE_OPEN_FILES,
        }.get(number, "")
        advice = f"{_THREADS_INSTEAD}; to have it, {advice}" if advice else _THREADS_INSTEAD
        return Finding("io_uring", "no", errno.errorcode.get(number, ""), _say(error), advice)
    choice.stop()
    return Finding("io_uring", "yes", "", "set up, and a trial read with it succeeded")


def _reader(config: LoaderConfig) -> Finding:
    try:
        choice = choose_reader(config)
    except OSError as error:
        is_asked = isinstance(error, ReaderUnavailableError)
        advice = "unset GPUQ_READER, or set it to auto" if is_asked else _RAISE_OPEN_FILES
        return Finding("reader", "stops", config.reader, _say(error), advice)
    choice.stop()
    is_second_best = config.reader == "auto" and choice.name != "io_uring"
    return Finding("reader", "degraded" if is_second_best else "yes", choice.name, choice.reason)


def _locked_memory(config: LoaderConfig, io_uring: Finding) -> Finding:
    """Judge the limit by whether the ring could be had.

    Some kernels charge the ring to the user (before Linux 5.12, and again from 6.14 on; 6.18 was
    seen to), others do not, and CAP_IPC_LOCK lifts the limit. Registered buffers would be charged
    too, but gpuq has none.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = "no limit" if limit == resource.RLIM_INFINITY else f"limit {_bytes(limit)}"
    staging = _bytes(config.staging_buffers * config.staging_bytes)
    ring = f"io_uring's ring needs {_bytes(ring_bytes(config.staging_buffers))}"
    if io_uring.value == errno.errorcode[errno.ENOMEM]:
        reason = f"{ring}, and all processes of the user share the limit"
        return Finding("locked memory", "degraded", value, reason, "raise it (ulimit -l)")
    reason = f"{ring}; the {staging} of staging are not registered with it and need none"
    return Finding("locked memory", "yes", value, reason)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "yes", "no limit")
    used = len(os.listdir("/proc/self/fd"))
    room = max(0, (soft - used - _SPARE_DESCRIPTORS) // _DESCRIPTORS_PER_FILE)
    reason = f"files at once: about {room:,}, as each takes {_DESCRIPTORS_PER_FILE} descriptors"
    if room >= _MANY_FILES:
        return Finding("open files", "yes", f"limit {soft:,}", reason)
    wanted = 2 * _MANY_FILES * _DESCRIPTORS_PER_FILE
    advice = f"for checkpoints of many files, raise the limit: ulimit -n {wanted}"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        advice += f", as root, for the hard limit is {hard:,}"
    return Finding("open files", "degraded", f"limit {soft:,}", reason, advice)


def _code_cache() -> Finding:
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


# --- trials ---


@contextlib.contextmanager
def _trial(config: LoaderConfig, is_stopped: bool) -> Iterator[tuple[Loader | None, Finding]]:
    """Let a kernel pull bytes; give the loader, for more of that, and what came of it.

    None stands for a loader that is of no use. The bytes are in memory, not on a disk, so no
    file system is to blame.
    """
    if is_stopped:
        yield None, Finding("trial", "unknown", "", "not tried, for something above stops it")
        return
    loader = None
    advice = ""
    try:
        # Some systems refuse direct reads of memory; paths are judged by the setting elsewhere.
        direct = "off" if config.direct == "off" else "auto"
        loader = Loader(replace(config, direct=direct))
        prepare(loader)
        descriptor = os.memfd_create("gpuq-doctor")
        try:
            os.write(descriptor, os.urandom(TRIAL_BYTES))
            pulled = _pull(loader, f"/proc/self/fd/{descriptor}", TRIAL_BYTES)
        finally:
            os.close(descriptor)
        fault = _fault(pulled)
    except Exception as error:
        fault = _say(error)
    try:
        if fault:
            if loader is not None and loader.target == "cuda":
                advice = "set GPUQ_TARGET=cpu to do without the GPU"
            reason = f"no kernel can pull bytes here: {fault}"
            yield None, Finding("trial", "stops", "", reason, advice)
        else:
            assert loader is not None
            reason = f"a kernel on the {loader.target} target pulled them, and all are right"
            yield loader, Finding("trial", "yes", f"{TRIAL_BYTES:,} bytes", reason)
    finally:
        if loader is not None:
            loader.abort()
            with contextlib.suppress(PollerDiedError):  # that was its fault above
                loader.close()


def _pull(loader: Loader, path: str, nbytes: int) -> Pull:
    """Let a kernel pull the first bytes of a file; it is told to return after a minute."""
    entry = ArrayEntry("trial", path, np.dtype(np.uint8), "U8", (nbytes,), 0, nbytes)
    timer = threading.Timer(_TRIAL_SECONDS, loader.abort)
    timer.daemon = True
    timer.start()
    try:
        return pull_arrays(loader, [entry], slice_bytes=_TRIAL_SLICE_BYTES)
    finally:
        timer.cancel()


def _fault(pulled: Pull) -> str:
    """Say what went wrong; empty where nothing did."""
    return "" if pulled.ok else f"a kernel got {pulled.arrays[0].verdict}"


# --- paths ---


def examine_path(path: str, config: LoaderConfig, loader: Loader | None) -> list[Finding]:
    """Say how a path can be read.

    Parameters
    ----------
    path : str
        In a directory a temporary file is made, examined, and removed.
    config : LoaderConfig
    loader : Loader or None
        Pulls the first bytes; None where none can be had.
    """
    findings = []
    try:
        findings.append(_file_system(mount_of(path)))
        if os.path.isdir(path):
            findings += _examine_directory(path, config, loader)
        else:
            findings += _examine_file(path, "", config, loader)
    except (OSError, GpuqError) as error:
        findings.append(Finding("file", "stops", "", _say(error).removeprefix(f"{path}: ")))
    return [replace(finding, path=path) for finding in findings]


def _file_system(mount: Mount | None) -> Finding:
    if mount is None:
        return Finding("file system", "unknown", "", "/proc/self/mountinfo does not say")
    reason = f"{mount.source} on {mount.point}" + (", read-only" if mount.is_read_only else "")
    return Finding("file system", "yes", mount.kind, reason)


def _examine_directory(path: str, config: LoaderConfig, loader: Loader | None) -> list[Finding]:
    try:
        file = tempfile.NamedTemporaryFile(dir=path, prefix=".gpuq-doctor-")  # noqa: SIM115
    except OSError as error:
        return [_cannot_write(error)]
    with file:
        try:
            file.write(os.urandom(TRIAL_BYTES))
            file.flush()
        except OSError as error:
            return [_cannot_write(error)]
        return _examine_file(file.name, "a temporary file, removed again", config, loader)


def _cannot_write(error: OSError) -> Finding:
    reason = f"a directory in which no file can be made: {error.strerror}"
    return Finding("file", "unknown", "", reason, "name a file in it instead")


def _examine_file(
    path: str, what: str, config: LoaderConfig, loader: Loader | None
) -> list[Finding]:
    file = open_file(path, "auto", config.staging_bytes)
    try:
        said = statx_alignment(file.buffered)
    finally:
        file.close()
    pulled, trial = _pull_first_bytes(path, file.size, loader)
    seen = None if pulled is None else pulled.sources[0]
    return [
        Finding("file", "yes", f"{file.size:,} bytes", what),
        _alignment(said),
        _direct_read(file, seen, config),
        trial,
    ]


def _pull_first_bytes(path: str, size: int, loader: Loader | None) -> tuple[Pull | None, Finding]:
    if loader is None:
        return None, Finding("trial", "unknown", "", "see above why no kernel can pull bytes")
    if size == 0:
        return None, Finding("trial", "unknown", "", "there are no bytes to pull")
    nbytes = min(size, TRIAL_BYTES)
    value = f"{nbytes:,} bytes"
    try:
        pulled = _pull(loader, path, nbytes)
    except Exception as error:
        return None, Finding("trial", "stops", value, _say(error))
    fault = _fault(pulled)
    if fault:
        return pulled, Finding("trial", "stops", value, fault)
    how = "direct" if pulled.sources[0].direct else "buffered"
    reason = f"a kernel pulled them with {how} reads, and all are right"
    return pulled, Finding("trial", "yes", value, reason)


def _alignment(said: tuple[int, int] | None) -> Finding:
    name = "alignment"
    if said is None:
        reason = "statx does not say (Linux 6.1 or newer, and not every file system); 4096 is tried"
        return Finding(name, "unknown", "", reason)
    memory, offset = said
    if offset == 0:
        return Finding(name, "no", "", "statx says that there are no direct reads here")
    return Finding(name, "yes", f"offsets by {offset}, memory by {memory} bytes", "statx says so")


def _direct_read(file: OpenFile, seen: Explanation | None, config: LoaderConfig) -> Finding:
    """Judge by a read that was done: by the trial's own where there was one."""
    name = "direct read"
    if seen is None or config.direct == "off":
        works, reason = file.direct >= 0, file.reason
    else:
        works, reason = seen.direct, seen.reason
    if not works:
        if config.direct == "require":
            return Finding(
                name, "stops", "", f"GPUQ_DIRECT=require, but {reason}", "set GPUQ_DIRECT to auto"
            )
        advice = "nothing must be done: reads are buffered; ext4 and xfs on a disk can do it"
        if "EMFILE" in reason:
            advice = _RAISE_OPEN_FILES
        return Finding(name, "no", "", reason, advice)
    if not file.proven:
        return Finding(name, "unknown", "", "it opens with O_DIRECT; an empty file proves no more")
    if config.direct == "off":
        reason += "; but GPUQ_DIRECT=off, so reads are buffered"
        return Finding(name, "degraded", "", reason, "set GPUQ_DIRECT to auto")
    return Finding(name, "yes", "", reason)


# --- words ---


def _say(error: BaseException) -> str:
    """Return an error's message in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _SAID_CHARACTERS else words[:_SAID_CHARACTERS] + " ..."


def _bytes(count: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.3g} {unit}"
    return f"{count} bytes"


def _read_word(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""

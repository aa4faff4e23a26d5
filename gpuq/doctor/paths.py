"""How a path can be read: its file system, its alignment, and reads that were tried."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import replace

from gpuq.config import LoaderConfig
from gpuq.doctor.finding import Finding, say
from gpuq.doctor.mounts import mount_of
from gpuq.doctor.reading import RAISE_OPEN_FILES
from gpuq.doctor.trial import TRIAL_BYTES, fault_of, pull_first
from gpuq.errors import GpuqError
from gpuq.handles import Explanation
from gpuq.host.direct_file import OpenFile, open_file, statx_alignment
from gpuq.loader import Loader
from gpuq.pull_files import Pull


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
        findings.append(_file_system(path))
        if os.path.isdir(path):
            findings += _examine_directory(path, config, loader)
        else:
            findings += _examine_file(path, "", config, loader)
    except (OSError, GpuqError) as error:
        findings.append(Finding("file", "stops", "", say(error).removeprefix(f"{path}: ")))
    return [replace(finding, path=path) for finding in findings]


def _file_system(path: str) -> Finding:
    if stat.S_ISBLK(os.stat(path).st_mode):
        return Finding("file system", "yes", "none", "a block device is read as it is")
    mount = mount_of(path)
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
        pulled = pull_first(loader, path, nbytes)
    except Exception as error:
        return None, Finding("trial", "stops", value, say(error))
    fault = fault_of(pulled)
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
            advice = RAISE_OPEN_FILES
        return Finding(name, "no", "", reason, advice)
    if not file.proven:
        return Finding(name, "unknown", "", "it opens with O_DIRECT; an empty file proves no more")
    if config.direct == "off":
        reason += "; but GPUQ_DIRECT=off, so reads are buffered"
        return Finding(name, "degraded", "", reason, "set GPUQ_DIRECT to auto")
    return Finding(name, "yes", "", reason)

"""What reads, and the limits that reading meets."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import replace

from gpuq.config import LoaderConfig
from gpuq.doctor.finding import Finding, say
from gpuq.errors import ReaderUnavailableError
from gpuq.host.choice import choose_reader
from gpuq.host.uring_abi import ring_bytes

RAISE_OPEN_FILES = "raise the limit of open files (ulimit -n)"

_MANY_FILES = 256
"""More shards than the largest published checkpoints have."""
_DESCRIPTORS_PER_FILE = 2
_SPARE_DESCRIPTORS = 8
_THREADS_INSTEAD = "nothing must be done: worker threads read instead"


def find_io_uring(config: LoaderConfig) -> Finding:
    """Say whether a read through a ring comes back, whichever reader is asked for."""
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
            errno.EMFILE: RAISE_OPEN_FILES,
        }.get(number, "")
        advice = f"{_THREADS_INSTEAD}; to have it, {advice}" if advice else _THREADS_INSTEAD
        return Finding("io_uring", "no", errno.errorcode.get(number, ""), say(error), advice)
    choice.stop(1.0)
    return Finding("io_uring", "yes", "", "set up, and a trial read with it succeeded")


def find_reader(config: LoaderConfig) -> Finding:
    """Say what would read, and why."""
    try:
        choice = choose_reader(config)
    except OSError as error:
        is_asked = isinstance(error, ReaderUnavailableError)
        advice = "unset GPUQ_READER, or set it to auto" if is_asked else RAISE_OPEN_FILES
        return Finding("reader", "stops", config.reader, say(error), advice)
    choice.stop(1.0)
    is_second_best = config.reader == "auto" and choice.name != "io_uring"
    return Finding("reader", "degraded" if is_second_best else "yes", choice.name, choice.reason)


def find_locked_memory(config: LoaderConfig, io_uring: Finding) -> Finding:
    """Judge the limit by whether the ring could be had.

    Some kernels charge the ring to the user (6.18 was seen to), others do not, and CAP_IPC_LOCK
    lifts the limit. Registered buffers would be charged too, but gpuq has none.
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


def find_open_files() -> Finding:
    """Say how many files the limit of descriptors leaves room for."""
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


def _bytes(count: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.3g} {unit}"
    return f"{count} bytes"

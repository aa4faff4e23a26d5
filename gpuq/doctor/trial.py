"""Kernels that pull bytes: the only proof that kernels can."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gpuq.config import LoaderConfig
from gpuq.doctor.finding import Finding, say
from gpuq.errors import PollerDiedError
from gpuq.formats import ArrayEntry
from gpuq.loader import Loader
from gpuq.pull_files import Pull, prepare, pull_arrays

TRIAL_BYTES = 100_003
"""What trial kernels pull, in bytes; no multiple of any block."""

_SLICE_BYTES = 16_384
_SECONDS = 60.0


@contextlib.contextmanager
def try_loader(config: LoaderConfig, is_stopped: bool) -> Iterator[tuple[Loader | None, Finding]]:
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
            pulled = pull_first(loader, f"/proc/self/fd/{descriptor}", TRIAL_BYTES)
        finally:
            os.close(descriptor)
        fault = fault_of(pulled)
    except Exception as error:
        fault = say(error)
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


def pull_first(loader: Loader, path: str, nbytes: int) -> Pull:
    """Let a kernel pull the first bytes of a file; it is told to return after a minute."""
    entry = ArrayEntry("trial", path, np.dtype(np.uint8), "U8", (nbytes,), 0, nbytes)
    timer = threading.Timer(_SECONDS, loader.abort)
    timer.daemon = True
    timer.start()
    try:
        return pull_arrays(loader, [entry], slice_bytes=_SLICE_BYTES)
    finally:
        timer.cancel()


def fault_of(pulled: Pull) -> str:
    """Say what went wrong; empty where nothing did."""
    return "" if pulled.ok else f"a kernel got {pulled.arrays[0].verdict}"

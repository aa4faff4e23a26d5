"""A trace in a file: an ``.npz`` archive of NumPy's, with nothing in it that would be run.

``records`` is the structured array, ``about`` a text in JSON: version, sources, what was lost.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zipfile
import zlib
from typing import Any

import numpy as np

from gpuq.errors import FormatError
from gpuq.host.taken import Trace
from gpuq.host.tracing import TRACE_DTYPE

VERSION = 1


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace to a file, under exactly this name; `load` reads it.

    Raises
    ------
    OSError
        It cannot be written.
    """
    about = {
        "gpuq_trace": VERSION,
        "target": trace.target,
        "reader": trace.reader,
        "lost": int(trace.lost),
        "sources": {str(handle): path for handle, path in trace.sources.items()},
    }
    with open(path, "wb") as file:
        np.savez_compressed(file, records=trace.records, about=np.array(json.dumps(about)))


def load(path: str | os.PathLike[str]) -> Trace:
    """Read what `save` wrote.

    Raises
    ------
    FormatError
        It is no trace, or damaged.
    OSError
        It cannot be read.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        if not zipfile.is_zipfile(file):
            raise FormatError(f"{name}: this is no trace, as gpuq.trace.save writes it")
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as archive:
                records, about = archive["records"], json.loads(str(archive["about"]))
            trace = _understand(records, about)
        except (
            ValueError, KeyError, TypeError, AttributeError, EOFError, OverflowError,
            RuntimeError,  # of JSON too deep, and of zipfile: a bit says that it is encrypted
            zipfile.BadZipFile, zlib.error, struct.error,
            OSError,  # of a place in the archive that cannot be: the file itself is open
        ) as error:  # fmt: skip
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                error.filename = error.filename or name
                raise
            reason = str(error) if isinstance(error, FormatError) else "damaged"
            raise FormatError(f"{name}: this is no trace that can be read: {reason}") from None
    return trace


def _understand(records: Any, about: Any) -> Trace:
    if about["gpuq_trace"] != VERSION:
        raise FormatError(f"it is of version {about['gpuq_trace']}, and {VERSION} is known")
    if records.dtype != TRACE_DTYPE or records.ndim != 1:
        raise FormatError("its records have other fields")
    times = records["admitted_ns"]
    if len(records) and (times.min() <= 0 or (records["completed_ns"] < times).any()):
        raise FormatError("a request was completed before it was admitted")
    return Trace(
        records=records,
        sources={int(handle): str(path) for handle, path in about["sources"].items()},
        lost=int(about["lost"]),
        target=str(about["target"]),
        reader=str(about["reader"]),
    )

"""What was taken from a trace's ring, with what a reader of the records needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuq.host.tracing import TRACE_DTYPE


@dataclass(frozen=True, repr=False, eq=False)
class Trace:
    """What happened to requests, one record for each. Made by `Loader.trace`.

    Attributes
    ----------
    records : array of gpuq.host.tracing.TRACE_DTYPE
        In the order of completion. docs/trace.md says what each field means.
    sources : dict of int to str
        Paths by handle, of files that were closed meanwhile too. A handle that was never given
        out is not in it.
    lost : int
        Records that found no room in the ring since the trace before.
    target, reader : str
        Of the loader.
    """

    records: Any
    sources: Mapping[int, str]
    lost: int
    target: str
    reader: str

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        return f"<gpuq.Trace of {len(self.records):,} requests, {self.lost:,} lost>"


def join(traces: Sequence[Trace]) -> Trace:
    """Return traces of one loader, one or more, taken one after another, as one."""
    return Trace(
        records=np.concatenate([trace.records for trace in traces]).astype(TRACE_DTYPE, copy=False),
        sources={handle: path for trace in traces for handle, path in trace.sources.items()},
        lost=sum(trace.lost for trace in traces),
        target=traces[0].target,
        reader=traces[0].reader,
    )

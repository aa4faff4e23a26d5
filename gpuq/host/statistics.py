"""What a loader has done: a snapshot of the figures that its poller counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuq.host.records import (
    STATISTICS_BYTES,
    STATISTICS_FALLBACKS,
    STATISTICS_HIGH_WATER,
    STATISTICS_LAST_ERRNO,
    STATISTICS_MERGED,
    STATISTICS_OUTSTANDING,
    STATISTICS_QUARANTINED,
    STATISTICS_READS,
    STATISTICS_RETRIES,
    STATISTICS_SHORT_READS,
    STATISTICS_STRAIGHT,
    STATISTICS_WORDS,
    Poller,
)
from gpuq.layout import STATUS_COUNT, Status
from gpuq.ordering import load_acquire


@dataclass(frozen=True)
class Statistics:
    """What a loader has done so far; a snapshot.

    Attributes
    ----------
    target, reader : str
        In use.
    requests : dict of str to int
        Completed requests by the name of their status; names with none are left out.
    outstanding : int
        Requests admitted and not completed.
    bytes : int
        Bytes that reached destinations.
    straight : int
        Of these, bytes that were read straight into host memory, without staging.
    reads : int
        Reads handed to the operating system.
    merged : int
        Requests whose bytes came with a neighbour's read.
    short_reads : int
        Reads that brought less than was asked and wanted.
    retries : int
        Reads done again: after a short one, an interruption, or a refusal of O_DIRECT.
    fallbacks : int
        Reads that were refused with O_DIRECT and done buffered.
    last_errno : int
        Of the newest failed read; 0 where none failed.
    staging_buffers : int
        Buffers in all.
    staging_high_water : int
        Most buffers in use at once.
    staging_quarantined : int
        Buffers that are never used again, because a copy from them could not be seen to end.
    """

    target: str
    reader: str
    requests: dict[str, int] = field(default_factory=dict)
    outstanding: int = 0
    bytes: int = 0
    straight: int = 0
    reads: int = 0
    merged: int = 0
    short_reads: int = 0
    retries: int = 0
    fallbacks: int = 0
    last_errno: int = 0
    staging_buffers: int = 0
    staging_high_water: int = 0
    staging_quarantined: int = 0


def take_statistics(poller: Poller, target: str, reader: str) -> Statistics:
    """Return what a poller has counted; each figure is exact, the set may be a pass apart."""
    words = [int(load_acquire(poller.statistics, position)) for position in range(STATISTICS_WORDS)]
    requests = {Status(code).name: n for code, n in enumerate(words[:STATUS_COUNT]) if n}
    return Statistics(
        target=target,
        reader=reader,
        requests=requests,
        outstanding=words[STATISTICS_OUTSTANDING],
        bytes=words[STATISTICS_BYTES],
        straight=words[STATISTICS_STRAIGHT],
        reads=words[STATISTICS_READS],
        merged=words[STATISTICS_MERGED],
        short_reads=words[STATISTICS_SHORT_READS],
        retries=words[STATISTICS_RETRIES],
        fallbacks=words[STATISTICS_FALLBACKS],
        last_errno=words[STATISTICS_LAST_ERRNO],
        staging_buffers=len(poller.staging.free),
        staging_high_water=words[STATISTICS_HIGH_WATER],
        staging_quarantined=words[STATISTICS_QUARANTINED],
    )
